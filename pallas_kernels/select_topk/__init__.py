"""Exact selection of the largest scores and of candidate blocks (kernels.md 4.4)."""
