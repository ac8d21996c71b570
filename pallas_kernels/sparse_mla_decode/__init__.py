"""Attention over window and selected cache rows (kernels.md 4.1 and 4.2)."""
