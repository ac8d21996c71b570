"""Coefficients of the residual streams: gates and the balanced mixing matrix (kernels.md 4.7)."""
