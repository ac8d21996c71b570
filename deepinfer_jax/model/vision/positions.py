"""Which rows of a sequence belong to an image."""

from jax import Array
from jaxtyping import Bool, Int

from deepinfer_jax.config.model import ModelConfig


def image_mask(config: ModelConfig, ids: Int[Array, "*b"]) -> Bool[Array, "*b"] | None:
    """Returns which rows belong to an image; None for a model that has no image encoder.

    Start, newline and end count as the image: all its rows carry one id, found by id and never by
    spelling (model.md 3.13, 9.14).
    """
    if config.vision is None or config.image_token_id is None:
        return None
    return ids == config.image_token_id
