"""Structured outputs: what a text must match, as masks over token ids (io.md 2)."""
