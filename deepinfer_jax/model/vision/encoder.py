"""The image encoder: patches to features, full attention inside one image (model.md 3.13).

Patches beyond the image's own are padding: no patch attends to them, and nothing reads them. Where
the network runs by tiles the encoder does too, on tiles of its own height; otherwise all patches go
through a product at once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.model.params import VisionBlockParams, VisionParams
from deepinfer_jax.model.vision.patches import TILE
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import core

EPS = 1e-6  # of the norms; not in config.json (model.md 1.4)
#: Patches whose scores with all others are formed at once, where there are no tiles.
QUERIES = 512


def vision_ops(ops: Ops) -> Ops:
    """Returns the primitives as the encoder uses them: tiles of its own height, no kernels.

    The kernels are tuned for the network's shapes; the encoder's products are few and large. Where
    all rows run at once nothing asks for a fixed order: an image is alone in its program, so that
    its bits are a function of the image already.
    """
    return replace(ops, tile=TILE, kernels=(), fixed_order=ops.is_tiled)


@cache
def has_fused_attention() -> bool:
    """Says whether the default device attends without writing scores to memory, through cuDNN."""
    head = jax.ShapeDtypeStruct((1, TILE, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(partial(jax.nn.dot_product_attention, implementation="cudnn"), *(head,) * 3)
    except (RuntimeError, NotImplementedError):  # no CUDA device, no cuDNN, or too old a one
        return False
    return True


def product(ops: Ops, x: Float[Array, "t i"], w: Array) -> Float[Array, "t o"]:
    """Returns x @ w^T with float32 sums, for a BF16 or float32 weight [o, i].

    At a rounding point x has BF16 values, so that a GPU multiplies them as BF16, exactly.
    """
    if not ops.static:
        return ops.contract(x, w)
    return _dot(ops, "mk,nk->mn", x, w)


def _dot(ops: Ops, spec: str, x: Array, y: Array) -> Array:
    if ops.rounded and ops.static:
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
    return jnp.einsum(spec, x, y, precision=_precision(ops))


def _precision(ops: Ops) -> lax.Precision:
    return lax.Precision.DEFAULT if ops.training else lax.Precision.HIGHEST


def by_tiles(ops: Ops, body: Callable[..., Any], *arrays: Array) -> Any:
    """Returns body(*arrays), of tiles of rows where the network runs by tiles; rows first."""
    if not ops.is_tiled:
        return body(*arrays)

    def tile(*parts: Array) -> Any:
        # Against row-only work being hoisted out of the loop, as in `step`.
        return body(*lax.optimization_barrier(parts))

    return core.map_row_tiles(tile, *arrays, tile=TILE)


def rope_2d(
    vision: VisionConfig, row: Int[Array, " p"], column: Int[Array, " p"]
) -> tuple[Float[Array, "p a"], Float[Array, "p a"]]:
    """Returns cos and sin of the angles of patches: half of them of the row, half of the column."""
    angles = vision.hidden_size // vision.num_attention_heads // 2
    # The float32 steps of the released code, as in `rope.inverse_frequencies`.
    exponent = np.arange(0, angles, 2, dtype=np.float32) / np.float32(angles)
    frequency = np.float32(1) / (vision.rope_theta ** exponent.astype(np.float64)).astype(
        np.float32
    )
    place = jnp.stack([row, column], axis=1).astype(jnp.float32)
    angle = (place[:, :, None] * frequency).reshape(place.shape[0], -1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate_half(
    x: Float[Array, "p h c"], cos: Float[Array, "p a"], sin: Float[Array, "p a"]
) -> Float[Array, "p h c"]:
    """Rotates channel j with channel j + c/2 by angle j; float32, not rounded."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def encode(
    ops: Ops,
    vision: VisionConfig,
    params: VisionParams,
    values: Float[Array, "p v"],
    row: Int[Array, " p"],
    column: Int[Array, " p"],
    is_real: Bool[Array, " p"],
) -> Float[Array, "p w"]:
    """Returns the features of every patch after the final norm; those of padding mean nothing.

    Args:
        ops: from `vision_ops`.
        vision: config of the encoder.
        params: its parameters.
        values: of the pixels (`patches.pixel_values`).
        row: of each patch in its image.
        column: of each patch in its image.
        is_real: which patches are the image's.
    """
    cos, sin = rope_2d(vision, row, column)

    def embed(rows: Array) -> Array:
        return ops.bf16(product(ops, rows, params.patch_proj) + _float32(params.patch_bias))

    def block(x: Array, leaves: VisionBlockParams) -> tuple[Array, None]:
        return _block(ops, vision, leaves, x, cos, sin, is_real), None

    x = lax.scan(block, by_tiles(ops, embed, values), params.blocks)[0]
    return by_tiles(ops, lambda rows: ops.norm(rows, params.norm, EPS), x)


def _block(
    ops: Ops,
    vision: VisionConfig,
    params: VisionBlockParams,
    x: Float[Array, "p w"],
    cos: Float[Array, "p a"],
    sin: Float[Array, "p a"],
    is_real: Bool[Array, " p"],
) -> Float[Array, "p w"]:
    heads = vision.num_attention_heads

    def projections(rows: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        normed = ops.norm(rows, params.norm1, EPS)
        joined = ops.bf16(product(ops, normed, params.wqkv) + _float32(params.wqkv_bias))
        parts = joined.reshape(rows.shape[0], 3, heads, -1)
        query, key = (ops.bf16(rotate_half(parts[:, n], cos, sin)) for n in (0, 1))
        return query, key, parts[:, 2]

    query, key, value = by_tiles(ops, projections, x, cos, sin)
    key, value = _turned(key), _turned(value)

    def rest(rows: Array, query: Array) -> Array:
        mixed = attend(ops, query, key, value, is_real).reshape(rows.shape[0], -1)
        rows = ops.bf16(rows + ops.bf16(product(ops, mixed, params.wo) + _float32(params.wo_bias)))
        hidden = ops.bf16(product(ops, ops.norm(rows, params.norm2, EPS), params.w1))
        gate, up = jnp.split(hidden, 2, axis=1)
        active = ops.bf16(ops.bf16(jax.nn.silu(gate)) * up)
        return ops.bf16(rows + ops.bf16(product(ops, active, params.w2)))

    return by_tiles(ops, rest, x, query)


def attend(
    ops: Ops,
    query: Float[Array, "t h c"],
    key: Float[Array, "h p c"],
    value: Float[Array, "h p c"],
    is_real: Bool[Array, " p"],
) -> Float[Array, "t h c"]:
    """Returns attention of some patches to all real ones, rounded once.

    Unlike those of the text network, probabilities are not rounded (the released code's bits on a
    CPU); fused attention, in checkpoint arithmetic on a GPU, rounds them to BF16.
    """
    rows = query.shape[0]
    if ops.static and ops.rounded and not ops.training and has_fused_attention():
        q, k, v = (x.astype(jnp.bfloat16)[None] for x in (query, _turned(key), _turned(value)))
        count = is_real.sum(dtype=jnp.int32)[None]
        found = jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=count, implementation="cudnn"
        )
        return found[0].astype(jnp.float32)
    if rows > QUERIES and rows % QUERIES == 0:
        parts = query.reshape(-1, QUERIES, *query.shape[1:])
        found = lax.map(lambda part: attend(ops, part, key, value, is_real), parts)
        return found.reshape(query.shape)
    scores = _dot(ops, "thc,hpc->htp", query, key) * query.shape[2] ** -0.5
    scores = jnp.where(is_real, scores, -jnp.inf)
    highest = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weight = jnp.exp(scores - highest)
    total = jnp.einsum("htp,hpc->thc", weight, value, precision=_precision(ops))
    return ops.bf16(total / ops.tree_sum(weight).swapaxes(0, 1)[:, :, None])


def _turned(heads: Array) -> Array:
    return heads.swapaxes(0, 1)


def _float32(leaf: Array) -> Array:
    return leaf.astype(jnp.float32)
