"""Images to the rows that take their place in a prompt, in a finite set of programs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int, UInt8

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params import VisionParams
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.vision.insert import image_rows
from deepinfer_jax.model.vision.patches import (
    grid_of,
    padded_patches,
    patch_rows,
    size_for,
    vision_of,
)
from deepinfer_jax.numerics.ops import ops_for


@partial(jax.jit, static_argnames=("config", "tokens"))
def encode_program(
    params: VisionParams,
    patches: UInt8[Array, "p v"],
    grid: Int[Array, "2"],
    *,
    config: ModelConfig,
    tokens: int,
) -> Float[Array, "n d"]:
    """Returns the rows of one image: `insert.image_rows` as the engine and `encode_images` run it.

    Args:
        params: encoder, projector and image vectors.
        patches: padded to a size of `encoder_sizes`.
        grid: rows and columns of real patches.
        config: of the model.
        tokens: of that size.
    """
    place = (grid[0], grid[1])
    return image_rows(ops_for(config.execution), config, params, patches, place, tokens)


def encode_images(
    params: AnyParams, config: ModelConfig, canvases: Sequence[Any]
) -> Float[Array, "n d"]:
    """Returns the rows of some images, one image's after the other's: `image_rows` of `score`.

    Pure, and differentiable in the parameters. Compiles once for each of a few sizes.

    Args:
        params: of a model with an image encoder.
        config: its config.
        canvases: uint8 [height, width, 3] each, as `deepinfer_jax.vision.read_image` makes them
            (`ImageInput.pixels`).

    Returns:
        float32 [rows, hidden_size]: for each image start, rows of cells with newlines, end.

    Raises:
        InputError: no image encoder, or a canvas of another form or too large.
    """
    vision_of(config)
    vision = vision_params(params)
    found = [_encode_one(vision, config, canvas) for canvas in canvases]
    return jnp.concatenate([jnp.zeros((0, config.hidden_size)), *found])


def vision_params(params: Any) -> VisionParams:
    """Returns the parameters of the image encoder.

    Raises:
        InputError: they were not loaded.
    """
    vision = getattr(params, "vision", None)
    if vision is None:
        raise InputError("images need the parameters of the image encoder, which were not loaded")
    return vision


def _encode_one(params: VisionParams, config: ModelConfig, canvas: Any) -> Float[Array, "n d"]:
    grid = grid_of(config, canvas)
    size = size_for(config, grid)
    if isinstance(canvas, Tracer):
        found = patch_rows(config, canvas)
        patches = jnp.pad(found, ((0, size.patches - grid.patches), (0, 0)))
    else:
        patches = jnp.asarray(padded_patches(config, np.asarray(canvas), size))
    sides = jnp.asarray([grid.rows, grid.columns], jnp.int32)
    rows = encode_program(params, patches, sides, config=config, tokens=size.tokens)
    return rows[: grid.tokens]
