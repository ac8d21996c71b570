"""Selection in plain jnp, from core."""

import jax
import jax.numpy as jnp

from pallas_kernels import core


def _visible(scores: jax.Array, length: jax.Array | None) -> jax.Array:
    if length is None:
        return scores
    return jnp.where(jnp.arange(scores.shape[1]) < length[:, None], scores, -jnp.inf)


def select_topk(scores: jax.Array, k: int, length: jax.Array | None) -> jax.Array:
    """Returns ids int32 [m, k]; arguments as in api.select_topk."""
    return core.select_topk(_visible(scores, length), k)


def select_blocks(
    scores: jax.Array, length: jax.Array, block_size: int, topk_blocks: int
) -> jax.Array:
    """Returns bool [m, blocks]; arguments as in api.select_blocks."""
    return core.select_blocks(scores, length, block_size, topk_blocks)


def block_maxima(scores: jax.Array, length: jax.Array, block_size: int) -> jax.Array:
    """Returns the largest visible score of every block [m, ceil(n / block_size)]; NaN as -inf."""
    rows, size = scores.shape
    blocks = -(-size // block_size)
    visible = _visible(jnp.where(jnp.isnan(scores), -jnp.inf, scores), length)
    edge = [(0, 0), (0, blocks * block_size - size)]
    padded = jnp.pad(visible, edge, constant_values=-jnp.inf)
    return jnp.max(padded.reshape(rows, blocks, block_size), axis=-1)
