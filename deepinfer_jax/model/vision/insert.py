"""From features to what stands in the prompt: projector, start, newline and end (model.md 3.13)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt8

from deepinfer_jax.config.model import ModelConfig, VisionConfig
from deepinfer_jax.model.params import VisionParams
from deepinfer_jax.model.vision.encoder import by_tiles, encode, product, vision_ops
from deepinfer_jax.model.vision.patches import pixel_values, vision_of
from deepinfer_jax.numerics.ops import Ops


def image_rows(
    ops: Ops,
    config: ModelConfig,
    params: VisionParams,
    patches: UInt8[Array, "p v"],
    grid: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    tokens: int,
) -> Float[Array, "n d"]:
    """Returns the rows that take the place of an image's token embeddings. Pure.

    Differentiable in `params`, and one image's rows depend on nothing but it, so that `vmap` over
    images of equal size is what training does.

    Args:
        ops: primitives of the execution, of `numerics.ops.ops_for` or of training.
        config: of the model.
        params: encoder, projector and image vectors.
        patches: uint8 (`patches.patch_rows`), padded behind; at level "batch" in whole tiles.
        grid: rows and columns of real patches.
        tokens: rows to return, at least as many as the image has; those beyond mean nothing.
    """
    vision, ops = vision_of(config), vision_ops(ops)
    rows, columns = grid
    place = jnp.arange(patches.shape[0], dtype=jnp.int32)
    features = encode(
        ops,
        vision,
        params,
        pixel_values(patches),
        place // columns,
        place % columns,
        place < rows * columns,
    )
    return joined_rows(ops, vision, params, features, grid, tokens)


def joined_rows(
    ops: Ops,
    vision: VisionConfig,
    params: VisionParams,
    features: Float[Array, "p w"],
    grid: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    tokens: int,
) -> Float[Array, "n d"]:
    """Returns start, projected cells with a newline behind each row of them, and end.

    Args:
        ops: from `vision_ops`.
        vision: config of the encoder.
        params: projector and image vectors.
        features: of the encoder, patch by patch.
        grid: rows and columns of real patches; cells beyond them have zeros there.
        tokens: rows to return; those beyond the image's mean nothing.
    """
    rows, columns = grid
    ratio, slot = vision.downsample_ratio, jnp.arange(tokens, dtype=jnp.int32) - 1
    across = -(-columns // ratio) + 1  # cells of a row and its newline
    cell_row, cell_column = slot // across, slot % across
    reach = jnp.arange(ratio, dtype=jnp.int32)
    row = cell_row[:, None, None] * ratio + reach[:, None]
    column = cell_column[:, None, None] * ratio + reach
    inside = (row >= 0) & (row < rows) & (column < columns)
    index = jnp.where(inside, row * columns + column, 0).reshape(tokens, -1)
    cells = jnp.where(inside.reshape(tokens, -1)[:, :, None], features[index], 0.0)
    cells = cells.swapaxes(1, 2).reshape(tokens, -1)  # channel, then place in the cell
    projected = by_tiles(ops, partial(_project, ops, params), cells)
    last = -(-rows // ratio) * across
    kinds = (slot < 0, slot == last, cell_column == across - 1)
    vectors = (params.image_start, params.image_end, params.image_newline)
    for is_kind, vector in zip(reversed(kinds), reversed(vectors), strict=True):
        projected = jnp.where(is_kind[:, None], vector.astype(jnp.float32), projected)
    return projected


def _project(ops: Ops, params: VisionParams, cells: Float[Array, "t v"]) -> Float[Array, "t d"]:
    """Returns w2(gelu(w1 x + b1)) + b2, gelu with the error function."""
    inner = ops.bf16(product(ops, cells, params.aligner_w1) + params.aligner_b1.astype(jnp.float32))
    active = ops.bf16(jax.nn.gelu(inner, approximate=False))
    return ops.bf16(product(ops, active, params.aligner_w2) + params.aligner_b2.astype(jnp.float32))
