"""Images to pixels on a planned canvas, and their place in a prompt. No JAX, no model."""
