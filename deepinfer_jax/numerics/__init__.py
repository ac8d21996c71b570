"""Arithmetic and determinism level: which primitives the network calls."""
