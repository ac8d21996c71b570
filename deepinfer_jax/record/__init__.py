"""Run records: what a request's output depends on, and that output (determinism.md 7)."""
