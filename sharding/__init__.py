"""Meshes, axis rules and ordered collectives. Empty so far; depends on jax and numpy only."""
