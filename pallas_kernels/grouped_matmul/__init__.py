"""Grouped expert products (kernels.md 4.6)."""
