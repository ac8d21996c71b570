"""Bridge to Ascend NPUs. Empty so far; importable everywhere, active only with CANN."""
