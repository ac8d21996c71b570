"""Index scores in plain jnp, from core (model.md 3.8, rounding points of 9.3)."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import core


def indexer_logits(
    query_codes: jax.Array,
    query_scale: jax.Array,
    weight: jax.Array,
    key_codes: jax.Array,
    key_scale: jax.Array,
    pages: jax.Array,
    length: jax.Array,
) -> jax.Array:
    """Returns bfloat16 [t, n]; arguments as in api.indexer_logits."""
    rows, heads, _ = query_codes.shape
    tiles = pages.shape[0]
    query = core.dequantize_q4m(query_codes, query_scale).reshape(tiles, -1, 2 * key_codes.shape[2])
    scaled = weight.astype(jnp.float32)[:, :, None]

    def score(page: jax.Array) -> jax.Array:
        """Returns the scores of one page of every tile, float32 [t, page rows]."""
        keys = core.dequantize_q4m(key_codes[page], key_scale[page])
        dots = core.contract_pairs(query, keys).reshape(rows, heads, -1)
        weighted = core.round_bf16(jax.nn.relu(core.round_bf16(dots)) * scaled)
        return core.round_bf16(core.fold_sum(weighted, axis=1))

    scores = jnp.moveaxis(lax.map(score, pages.T), 0, 1).reshape(rows, -1)
    visible = jnp.arange(scores.shape[1]) < length[:, None]
    return jnp.where(visible, scores, -jnp.inf).astype(jnp.bfloat16)
