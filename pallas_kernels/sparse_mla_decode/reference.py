"""Sparse attention in plain jnp: the fold of model.md 3.6 over blocks of 64 ranks, from core."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import core

BLOCK = 64
#: Start of the running maximum; finite, so that an empty row stays free of NaN.
LOWEST = -1e30


def decode_rows(rows: jax.Array, dim: int) -> jax.Array:
    """Returns float32 [..., dim] of cache rows uint8 [..., bytes]; exact.

    Rows of ``dim + dim / 32`` bytes are Q8, rows of ``dim / 2 + dim / 16`` bytes are Q4n.
    """
    if rows.shape[-1] == dim + dim // 32:
        return core.dequantize_q8(rows[..., :dim], rows[..., dim:])
    return core.dequantize_q4n(rows[..., : dim // 2], rows[..., dim // 2 :])


def read_rows(cache: jax.Array, ids: jax.Array, dim: int) -> jax.Array:
    """Returns float32 [..., dim] of the rows that ``ids`` [...] name; zeros where an id is -1."""
    keys = decode_rows(cache[jnp.maximum(ids, 0)], dim)
    return jnp.where(ids[..., None] >= 0, keys, 0.0)


def attend(
    q: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    selected: jax.Array | None,
    selected_ids: jax.Array | None,
    sink: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output bfloat16 [t, h, c], log-sum-exp float32 [t, h]).

    Arguments as in api.sparse_mla_decode. Scores, probabilities and sums are float32;
    probabilities are rounded to BF16 against the running maximum of their block.
    """
    tokens, heads, dim = q.shape
    carry = (
        jnp.full((tokens, heads), LOWEST),
        jnp.zeros((tokens, heads)),
        jnp.zeros((tokens, heads, dim)),
    )
    q = q.astype(jnp.float32)
    carry = _fold_set(q, window, window_ids, carry)
    if selected is not None and selected_ids is not None:
        carry = _fold_set(q, selected, selected_ids, carry)
    maximum, denominator, total = carry
    final = jnp.maximum(maximum, sink)
    shrink = jnp.exp(maximum - final)
    denominator = denominator * shrink + jnp.exp(sink - final)
    out = total * shrink[:, :, None] / denominator[:, :, None]
    return core.round_bf16(out).astype(jnp.bfloat16), final + jnp.log(denominator)


def _fold_set(q: jax.Array, cache: jax.Array, ids: jax.Array, carry: Any) -> Any:
    """Returns (maximum, denominator, total) after the blocks of one set, rows read block by block.

    Args:
        q: float32 [t, h, c].
        cache: uint8 [rows, bytes].
        ids: int32 [t, ranks], -1 for none; a last block that is not whole is filled with -1.
        carry: float32 [t, h], [t, h] and [t, h, c].
    """
    tokens, _, dim = q.shape
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % BLOCK)), constant_values=-1)

    def fold(carry: Any, listed: jax.Array) -> tuple[Any, None]:
        maximum, denominator, total = carry
        key = read_rows(cache, listed, dim)
        scores = core.contract_pairs(q, key) * dim**-0.5
        scores = jnp.where(listed[:, None, :] >= 0, scores, -jnp.inf)
        raised = jnp.maximum(maximum, scores.max(axis=-1))
        shrink = jnp.exp(maximum - raised)
        weight = jnp.exp(scores - raised[:, :, None])
        value = core.contract_values(core.round_bf16(weight), key)
        denominator = denominator * shrink + core.tree_sum(weight)
        return (raised, denominator, total * shrink[:, :, None] + value), None

    blocks = ids.reshape(tokens, -1, BLOCK).swapaxes(0, 1)
    return lax.scan(fold, carry, blocks)[0]
