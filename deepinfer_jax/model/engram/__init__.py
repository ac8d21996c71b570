"""Engram: hashed n-gram memory (model.md 3.10)."""
