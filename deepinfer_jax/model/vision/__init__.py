"""Image encoder, projector and what stands in the prompt for an image (model.md 3.13)."""
