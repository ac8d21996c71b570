"""Attention and index scores of whole sequences at once, for training (model.md 3.6, 3.7).

Inference gathers a key list for every row. In training all rows of every sequence are in the tile,
sequence after sequence from position 0 in a fresh cache (`training.forward`), so rows share their
keys: products run over whole sequences, and what a row does not list is masked. Same lists, same
values, no gather of a list per row and no scatter of its gradient.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import rows
from deepinfer_jax.model.attention import indexer
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.numerics.ops import Ops

Part = tuple[Array, Array, Array]  # maximum [t h], denominator [t h], weighted values [t h c]

_LOWEST = -1e30  # finite, so that a row without keys stays free of NaN


def sequence_pages(
    leaf: Shaped[Array, "n p z w"], state: CacheState, source: Int[Array, ""]
) -> Shaped[Array, "b s w"]:
    """Returns the pages of every sequence: a fresh cache hands them out in order."""
    sequences = state.window.shape[0] - 1
    return leaf[source, 1:].reshape(sequences, -1, leaf.shape[3])


def index_keys(
    config: ModelConfig, state: CacheState, source: Int[Array, ""], group: int
) -> Float[Array, "b s i"]:
    """Returns the index keys of every sequence."""
    data = sequence_pages(state.index_data[group], state, source)
    leaf = state.index_scale[group]
    scale = None if leaf is None else sequence_pages(leaf, state, source)
    return rows.decode_index(config, data, scale)


def entries(
    config: ModelConfig, state: CacheState, source: Int[Array, ""], group: int
) -> Float[Array, "b s c"]:
    """Returns the compressed rows of every sequence."""
    return rows.decode_main(config, sequence_pages(state.main[group], state, source))


def index_scores(
    ops: Ops,
    config: ModelConfig,
    query: Float[Array, "t h i"],
    weight: Float[Array, "t h"],
    keys: Float[Array, "b s i"],
) -> Float[Array, "t s"]:
    """Returns the index score of every key of its own sequence, for every row."""
    dots = head_scores(ops, query, keys)
    return indexer.weigh_heads(ops, config, dots, weight)


def head_scores(
    ops: Ops, query: Float[Array, "t h c"], keys: Float[Array, "b s c"]
) -> Float[Array, "t h s"]:
    """Returns the dot of every head of every row with every key of the row's sequence."""
    count, heads, dim = query.shape
    flat = query.reshape(keys.shape[0], -1, dim)
    return ops.contract_pairs(flat, keys).reshape(count, heads, keys.shape[1])


def chosen(topk: Int[Array, "t k"], capacity: int) -> Bool[Array, "t s"]:
    """Returns which of a sequence's compressed indices a row selected."""
    place = jnp.where(topk >= 0, topk, capacity)
    row = jnp.arange(topk.shape[0])[:, None]
    return jnp.zeros((topk.shape[0], capacity), bool).at[row, place].set(True, mode="drop")


def window_part(
    ops: Ops,
    config: ModelConfig,
    state: CacheState,
    layer: Int[Array, ""] | int,
    query: Float[Array, "t h c"],
) -> Part:
    """Returns attention over window rows: chunks of a window's length see themselves and the last.

    The chunk before the first one is masked.
    """
    window = config.attention.sliding_window
    sequences = state.window.shape[0] - 1
    length = query.shape[0] // sequences
    keys = rows.decode_window(config, state.window[1:, layer, :length])
    missing = -length % window
    keys = jnp.pad(keys, ((0, 0), (window, missing), (0, 0)))
    heads, dim = query.shape[1:]
    grouped = query.reshape(sequences, length, heads, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, missing), (0, 0), (0, 0)))
    chunks = keys.reshape(sequences, -1, window, dim)
    both = jnp.concatenate([chunks[:, :-1], chunks[:, 1:]], axis=2).reshape(-1, 2 * window, dim)
    grouped = grouped.reshape(both.shape[0] * window, heads, dim)
    row, rank = jnp.arange(window)[:, None], jnp.arange(2 * window)
    visible = (rank > row) & (rank <= row + window)
    is_first = jnp.arange(both.shape[0]) % (chunks.shape[1] - 1) == 0
    valid = visible & ~(is_first[:, None, None] & (rank < window))
    part = attend_part(ops, grouped, both, valid.reshape(-1, 2 * window))

    def cut(x: Array) -> Array:
        return x.reshape(sequences, -1, *x.shape[1:])[:, :length].reshape(-1, *x.shape[1:])

    return cut(part[0]), cut(part[1]), cut(part[2])


def attend_part(
    ops: Ops,
    query: Float[Array, "t h c"],
    keys: Float[Array, "g s c"],
    valid: Bool[Array, "t s"],
) -> Part:
    """Returns softmax attention of t/g rows on each of g key sets, before the last division."""
    scores = head_scores(ops, query, keys) * query.shape[2] ** -0.5
    scores = jnp.where(valid[:, None], scores, _LOWEST)
    maximum = lax.stop_gradient(scores.max(axis=2))
    weight = jnp.exp(scores - maximum[:, :, None])
    flat = ops.bf16(weight).reshape(keys.shape[0], -1, keys.shape[1])
    total = ops.contract_values(flat, keys).reshape(query.shape)
    return maximum, weight.sum(axis=2), total


def merge(parts: list[Part], sink: Float[Array, " h"]) -> Float[Array, "t h c"]:
    """Returns the attention of all parts together; the sink joins the denominator."""
    highest = lax.stop_gradient(sink[None])
    for maximum, _, _ in parts:
        highest = jnp.maximum(highest, maximum)
    denominator, total = jnp.exp(sink - highest), jnp.zeros(())
    for maximum, part_sum, part_total in parts:
        shrink = jnp.exp(maximum - highest)
        denominator = denominator + shrink * part_sum
        total = total + shrink[:, :, None] * part_total
    return total / denominator[:, :, None]
