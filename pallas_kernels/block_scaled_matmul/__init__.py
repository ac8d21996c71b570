"""Dense products of FP8 and BF16 weights (kernels.md 4.5)."""
