"""Kernels of the network and their fixed-order primitives (jax and numpy only)."""
