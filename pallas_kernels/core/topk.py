"""Exact top-k in a total order: score descending, equal scores lower index first (model.md 3.9).

Before comparison NaN becomes -inf, and zeros of both signs and float32 subnormals become +0.0:
``lax.top_k`` orders -0.0 below +0.0, and whether a subnormal compares equal to zero depends on
the flush mode of the thread. No sums, so nothing here depends on tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.codes import float_bits
from pallas_kernels.errors import KernelError

_LARGEST = np.finfo(np.float32).max


def _canonical(scores: jax.Array) -> jax.Array:
    """Returns float32 scores in which equal bits, equal values and equal ranks are one thing."""
    scores = jnp.asarray(scores).astype(jnp.float32)
    is_zero = (float_bits(scores) & np.uint32(0x7F800000)) == 0
    scores = jnp.where(is_zero, np.float32(0), scores)
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores)


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest scores of each row and their indices, in the total order.

    Args:
        scores: [m, n] of any float dtype.
        k: static, 0 <= k <= n.

    Returns:
        values float32 [m, k] (canonical: NaN as -inf, zeros as +0.0), indices int32 [m, k].

    Raises:
        KernelError: k exceeds n.
    """
    if not 0 <= k <= scores.shape[-1]:
        raise KernelError(f"top_k needs 0 <= k <= n, got k={k} and scores {scores.shape}")
    if k == 0 or scores.shape[0] == 0:
        shape = (*scores.shape[:-1], k)
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    values, indices = lax.top_k(_canonical(scores), k)
    return values, indices.astype(jnp.int32)


def select_topk(scores: jax.Array, k: int) -> jax.Array:
    """Returns the indices of the k largest scores above -inf, ascending, then -1.

    Args:
        scores: [m, n]; -inf (or NaN) marks entries that may not be chosen.
        k: static; may exceed n, the rest is -1.

    Returns:
        int32 [m, k].
    """
    size = scores.shape[-1]
    values, indices = top_k(scores, min(k, size))
    ordered = jnp.sort(jnp.where(values > -jnp.inf, indices, size), axis=-1)
    chosen = jnp.where(ordered == size, -1, ordered)
    padding = [(0, 0)] * (chosen.ndim - 1) + [(0, k - chosen.shape[-1])]
    return jnp.pad(chosen, padding, constant_values=-1)


def select_blocks(
    scores: jax.Array, length: jax.Array, block_size: int, topk_blocks: int
) -> jax.Array:
    """Returns which blocks of positions each row keeps (candidate selection, model.md 3.9).

    A block's score is its largest visible score, clamped to finite values; the last visible block
    is always kept; ties go to the lower block; blocks without a visible position are never kept.

    Args:
        scores: [m, n]; values at positions >= length are ignored, NaN included.
        length: int [m], visible positions of each row; 0 gives an all-false row.
        block_size: positions a block, counted from position 0.
        topk_blocks: most blocks to keep, the forced one included.

    Returns:
        bool [m, ceil(n / block_size)].
    """
    rows, size = scores.shape
    blocks = -(-size // block_size)
    length = jnp.minimum(jnp.asarray(length), size)[:, None]
    visible = jnp.arange(size) < length
    masked = jnp.where(visible, _canonical(scores), -jnp.inf)
    edge = blocks * block_size - size
    padded = jnp.pad(masked, [(0, 0), (0, edge)], constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(rows, blocks, block_size), axis=-1)
    block = jnp.arange(blocks)
    is_visible = block * block_size < length
    best = jnp.where(is_visible, jnp.clip(best, -_LARGEST, _LARGEST), -jnp.inf)
    best = jnp.where(is_visible & (block == (length - 1) // block_size), jnp.inf, best)
    _, indices = top_k(best, min(topk_blocks, blocks))
    kept = jnp.zeros((rows, blocks), bool).at[jnp.arange(rows)[:, None], indices].set(True)
    return kept & is_visible


def expand_blocks(mask: jax.Array, block_size: int, n: int) -> jax.Array:
    """Returns the positions of kept blocks, bool [m, n]; visibility is the caller's own test."""
    return jnp.repeat(mask, block_size, axis=-1)[..., :n]
