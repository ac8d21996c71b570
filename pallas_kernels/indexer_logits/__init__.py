"""Scores of the lightning indexer from the FP4 index cache (kernels.md 4.3)."""
