"""Meshes, axis rules, placements of experts and rows, ordered collectives; jax and numpy only."""
