"""Lightning indexer: scores, top-k and candidate blocks (model.md 3.8, 3.9)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.attention.projections import Rope
from deepinfer_jax.model.params import IndexerParams
from deepinfer_jax.model.rope import apply_rope
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import core

KEY_BLOCK = 64  # keys scored at once; scores of different keys never meet, so it is free of bits
STATIC_KEYS = 2**21  # keys of all rows scored at once where all of them are scored anyhow
FIXED_BLOCK = 512  # and at level "batch", whose shapes may not follow the capacity


def index_query(
    ops: Ops, config: ModelConfig, params: IndexerParams, latent: Float[Array, "t q"], rope: Rope
) -> Float[Array, "t h i"]:
    """Returns rotated index queries, Q4m quantised; no norm."""
    indexer = config.indexer
    query = ops.bf16(ops.contract(ops.q8(latent), params.wq_b))
    query = query.reshape(query.shape[0], indexer.index_n_heads, indexer.index_head_dim)
    return ops.q4m(ops.bf16(apply_rope(query, *rope)))


def head_weights(ops: Ops, params: IndexerParams, v: Float[Array, "t d"]) -> Float[Array, "t h"]:
    """Returns the weight of every index head, before the constant."""
    return ops.bf16(ops.contract(v, params.weights_proj))


def score_block(
    ops: Ops,
    config: ModelConfig,
    query: Float[Array, "t h i"],
    weight: Float[Array, "t h"],
    keys: Float[Array, "t s i"],
) -> Float[Array, "t s"]:
    """Returns sum_h relu(q_h . k) * w_h, BF16 at every stage, heads added in ascending order."""
    return weigh_heads(ops, config, ops.contract_pairs(query, keys), weight)


def weigh_heads(
    ops: Ops, config: ModelConfig, dots: Float[Array, "t h s"], weight: Float[Array, "t h"]
) -> Float[Array, "t s"]:
    """Returns the index scores of dots of every head with every key."""
    scaled = scaled_weights(ops, config, weight)
    weighted = ops.bf16(jax.nn.relu(ops.bf16(dots)) * scaled[:, :, None])
    return ops.bf16(ops.fold_sum(weighted, axis=1))


def scaled_weights(
    ops: Ops, config: ModelConfig, weight: Float[Array, "t h"]
) -> Float[Array, "t h"]:
    """Returns the weight of every index head times the constant."""
    indexer = config.indexer
    constant = indexer.index_head_dim**-0.5 * indexer.index_n_heads**-0.5
    return ops.bf16(weight * constant)


def select(
    config: ModelConfig,
    scores: Float[Array, "t s"],
    length: Int[Array, " t"],
    inside: Bool[Array, "t s"] | None = None,
) -> Int[Array, "t k"]:
    """Returns the `index_topk` best visible indices, ascending, -1 padded; ties to the lower index.

    length: visible indices of every row. inside: positions that may be chosen at all.
    """
    visible = jnp.arange(scores.shape[1]) < length[:, None]
    if inside is not None:
        visible = visible & inside
    return core.select_topk(jnp.where(visible, scores, -jnp.inf), config.indexer.index_topk)


def candidate_mask(
    config: ModelConfig, scores: Float[Array, "t s"], length: Int[Array, " t"]
) -> Bool[Array, "t b"]:
    """Returns which blocks of compressed indices later index sources may score."""
    indexer = config.indexer
    return core.select_blocks(
        scores, length, indexer.candidate_block_size, indexer.candidate_topk_blocks
    )


def candidate_positions(
    config: ModelConfig, mask: Bool[Array, "t b"], capacity: int
) -> Bool[Array, "t s"]:
    """Returns which compressed indices lie inside the candidate blocks."""
    return core.expand_blocks(mask, config.indexer.candidate_block_size, capacity)


def score_all(
    ops: Ops,
    config: ModelConfig,
    query: Float[Array, "t h i"],
    weight: Float[Array, "t h"],
    read_keys: Callable[[Array], Array],
    length: Int[Array, " t"],
    capacity: int,
) -> Float[Array, "t s"]:
    """Returns scores [t, capacity] of compressed indices below the longest row; -inf above it.

    read_keys: index [t, block] -> keys. Selection is not differentiable, so neither is this. If no
    loop bound may be data, all of the capacity is scored, in blocks as large as memory allows.
    """
    query, weight = lax.stop_gradient((query, weight))
    size = KEY_BLOCK
    if ops.static:
        most = FIXED_BLOCK if ops.fixed_order else min(STATIC_KEYS // query.shape[0], capacity)
        size = max(size, most)
    blocks = -(-capacity // size)

    def visit(block: Int[Array, ""] | int, scores: Float[Array, "t s"]) -> Float[Array, "t s"]:
        index = block * size + jnp.arange(size, dtype=jnp.int32)
        index = jnp.broadcast_to(jnp.minimum(index, capacity - 1), (query.shape[0], size))
        keys = lax.stop_gradient(read_keys(index))
        found = score_block(ops, config, query, weight, keys)
        return lax.dynamic_update_slice(scores, found, (0, block * size))

    start = jnp.full((query.shape[0], blocks * size), -jnp.inf)
    if ops.static:
        scores = visit(0, start) if blocks == 1 else lax.fori_loop(0, blocks, visit, start)
        return scores[:, :capacity]
    used = -(-length.max() // size)
    return lax.fori_loop(0, used, visit, start)[:, :capacity]


def mean_attention(scores: Float[Array, "t h s"], valid: Bool[Array, "t s"]) -> Float[Array, "t s"]:
    """Returns the mean over heads of softmax(scores) over valid entries; zeros without one."""
    masked = jnp.where(valid[:, None, :], scores, -jnp.inf)
    return core.stock.softmax(masked).mean(axis=1)


def divergence(
    target: Float[Array, "t s"], scores: Float[Array, "t s"], valid: Bool[Array, "t s"]
) -> Float[Array, " t"]:
    """Returns KL(target || softmax(scores)) over valid entries; 0 for rows without one."""
    lowest = jnp.finfo(jnp.float32).min  # finite: a row without entries has gradient 0, not NaN
    found = jax.nn.log_softmax(jnp.where(valid, scores, lowest), axis=1)
    wanted = jnp.log(jnp.maximum(target, jnp.finfo(jnp.float32).tiny))
    return jnp.where(valid & (target > 0), target * (wanted - found), 0.0).sum(axis=1)
