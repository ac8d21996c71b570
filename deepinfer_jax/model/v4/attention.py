"""The attention sub-layer of DeepSeek-V4: write this tile's rows, pool, select, attend.

As in V4.1 everything a row reads is read back from the cache after the tile has written. The kind
of the layer (window, ratio 4, ratio 128) is data; branches return rows, never caches.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import source_ratios
from deepinfer_jax.model.attention import core, indexer, projections
from deepinfer_jax.model.attention.window import read_window, write_window
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.params_v4 import V4CompressorParams, V4IndexerParams, V4Params
from deepinfer_jax.model.rope import apply_rope, rope_frequencies, rope_tables
from deepinfer_jax.model.state import may_close, read_pages, write_pages
from deepinfer_jax.model.tile import Rows, branch
from deepinfer_jax.model.v4 import compress
from deepinfer_jax.model.v4.role import V4Role
from deepinfer_jax.model.v4.state import V4CacheState, read_tail, write_tail
from deepinfer_jax.numerics.ops import Ops

Published = tuple[Float[Array, "t c"], Float[Array, "t i"]]  # compressed rows, index keys
Mixed = tuple[Float[Array, "t h c"], Int[Array, "t k"]]  # attention output, selected indices


def attention(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    layer: LayerParams,
    role: V4Role,
    state: V4CacheState,
    tile: Rows,
    v: Float[Array, "t d"],
) -> tuple[V4CacheState, Float[Array, "t d"], Int[Array, "t k"], Published]:
    """Returns (state with this tile's rows written, output, selected indices, published rows).

    layer: leaves of this layer. params: for the compressor and indexer leaves of its role.
    v: normed sub-layer input.
    """
    frequency = rope_frequencies(config.attention)[role.yarn]
    rope = rope_tables(tile.position, frequency)
    latent = projections.query_latent(ops, config, layer, v)
    query = queries(ops, config, layer, latent, rope)
    key = projections.window_key(ops, config, layer, v, rope)
    state = write_window(config, state, role.layer, tile, key)
    state = _write_tails(ops, config, params, role, state, tile, v)
    state, published = _publish(ops, config, params, role, state, tile, frequency)
    mixed, topk = _attend(ops, config, params, layer, role, state, tile, v, latent, query, rope)
    return state, projections.output(ops, config, layer, mixed, rope), topk, published


def queries(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    latent: Float[Array, "t q"],
    rope: projections.Rope,
) -> Float[Array, "t h c"]:
    """Returns rotated queries; before the rotation every head gets an unweighted RMS norm."""
    q = ops.contract(latent, layer.wq_b)
    q = q.reshape(q.shape[0], config.attention.num_attention_heads, config.attention.head_dim)
    q = q * ops.rms_scale(q, config.rms_norm_eps)[:, :, None]
    return apply_rope(q, *rope)


def _at(stacked: Any, role: V4Role) -> Any:
    """Returns the leaves of this layer from a record stacked over its ratio's layers."""
    return jax.tree.map(lambda leaf: leaf[role.source], stacked)


def _indexer(params: V4Params, role: V4Role) -> V4IndexerParams:
    assert params.indexers is not None  # a ratio-4 layer has one
    return _at(params.indexers, role)


def _write_tails(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    role: V4Role,
    state: V4CacheState,
    tile: Rows,
    v: Float[Array, "t d"],
) -> V4CacheState:
    """Writes (gate, value) of this tile's rows to the tails of the layer's compressors."""
    count, ratios = tile.ids.shape[0], source_ratios(config)
    leaves = [*state.tail] if state.index_tail is None else [*state.tail, state.index_tail]
    empty = tuple(jnp.zeros((count, *leaf.shape[3:]), jnp.float32) for leaf in leaves)

    def project(group: int) -> Callable[[], tuple[Array, ...]]:
        def run() -> tuple[Array, ...]:
            found = list(empty)
            found[group] = compress.project(ops, _at(params.compressors[group], role), v)
            if ratios[group] == 4:
                found[-1] = compress.project(ops, _indexer(params, role).compressor, v)
            return tuple(found)

        return run

    values = branch(role.group, lambda: empty, [project(group) for group in range(len(ratios))])
    owners = [*range(len(ratios)), *([ratios.index(4)] if 4 in ratios else [])]
    written = [
        write_tail(leaf, role.source, tile, value, role.group == owner)
        for leaf, value, owner in zip(leaves, values, owners, strict=True)
    ]
    tails = tuple(written[: len(ratios)])
    return replace(state, tail=tails, index_tail=None if state.index_tail is None else written[-1])


def _publish(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    role: V4Role,
    state: V4CacheState,
    tile: Rows,
    frequency: Float[Array, " r2"],
) -> tuple[V4CacheState, Published]:
    """Writes compressed rows and index keys of the groups this tile closes."""
    count, ratios = tile.ids.shape[0], source_ratios(config)
    nothing = (
        jnp.zeros((count, config.attention.head_dim), jnp.float32),
        jnp.zeros((count, config.indexer.index_head_dim), jnp.float32),
    )

    def entry(leaves: V4CompressorParams, leaf: Array, ratio: int) -> Float[Array, "t c"]:
        position = compress.pooled_positions(tile.position, ratio)
        present = (position >= 0) & (position <= tile.position[:, None])
        tokens = read_tail(leaf, role.source, tile.slot, position)
        pooled = compress.pool(ops, leaves, config.rms_norm_eps, tokens, present)
        return compress.rotate(pooled, tile.position, ratio, frequency)

    def pool(group: int, ratio: int) -> Callable[[], Published]:
        def run() -> Published:
            row = entry(_at(params.compressors[group], role), state.tail[group], ratio)
            if ratio != 4:
                return row, nothing[1]
            return row, entry(_indexer(params, role).compressor, state.index_tail, ratio)

        closes = (tile.valid & ((tile.position + 1) % ratio == 0)).any()
        return lambda: lax.cond(closes, run, lambda: nothing)

    published = branch(role.group, lambda: nothing, [pool(g, r) for g, r in enumerate(ratios)])
    main, keys = list(state.main), state.index_keys
    tile, written = tile.shared(published)
    for group, ratio in enumerate(ratios):
        closes = may_close(state, tile.slot, tile.position, ratio)
        allowed = tile.valid & (role.group == group) & closes
        address = (state, role.source, tile.slot, tile.position // ratio)
        main[group] = write_pages(main[group], *address, written[0], allowed)
        if ratio == 4 and keys is not None:
            keys = write_pages(keys, *address, written[1], allowed)
    return replace(state, main=tuple(main), index_keys=keys), published


def _attend(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    layer: LayerParams,
    role: V4Role,
    state: V4CacheState,
    tile: Rows,
    v: Float[Array, "t d"],
    latent: Float[Array, "t q"],
    query: Float[Array, "t h c"],
    rope: projections.Rope,
) -> Mixed:
    """Attends over window ranks, then selected or all visible compressed rows (model.md 10.4)."""
    near, is_near = read_window(config, state, role.layer, tile.slot, tile.position)
    none = jnp.full((tile.ids.shape[0], config.indexer.index_topk), -1, jnp.int32)

    def window() -> Mixed:
        return core.attend(ops, query, near, is_near, layer.attn_sink), none

    def selected(group: int) -> Callable[[], Mixed]:
        def run() -> Mixed:
            topk = _select(ops, config, params, role, state, tile, v, latent, rope)
            far = read_pages(state.main[group], state, role.source, tile.slot, topk)
            keys = jnp.concatenate([near, far], axis=1)
            valid = jnp.concatenate([is_near, topk >= 0], axis=1)
            return core.attend(ops, query, keys, valid, layer.attn_sink), topk

        return run

    def dense(group: int, ratio: int) -> Callable[[], Mixed]:
        def run() -> Mixed:
            read, valid = _dense_list(role, state, tile, near, is_near, group, ratio)
            blocks = jnp.arange(valid.shape[1] // core.BLOCK, dtype=jnp.int32)
            return core.attend_blocks(ops, query, blocks, valid, read, layer.attn_sink), none

        return run

    kinds = [
        selected(group) if ratio == 4 else dense(group, ratio)
        for group, ratio in enumerate(source_ratios(config))
    ]
    return branch(role.group, window, kinds)


def _select(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    role: V4Role,
    state: V4CacheState,
    tile: Rows,
    v: Float[Array, "t d"],
    latent: Float[Array, "t q"],
    rope: projections.Rope,
) -> Int[Array, "t k"]:
    """Returns the best visible ratio-4 indices of every row, ascending, -1 padded."""
    settings, keys = config.indexer, state.index_keys
    leaves = _indexer(params, role)
    query = ops.contract(latent, leaves.wq_b)
    query = query.reshape(query.shape[0], settings.index_n_heads, settings.index_head_dim)
    weight = ops.contract(v, leaves.weights_proj)
    length = jnp.where(tile.valid, (tile.position + 1) // 4, 0)

    def read(index: Int[Array, "t s"]) -> Float[Array, "t s i"]:
        return read_pages(keys, state, role.source, tile.slot, index)

    capacity = state.block_table.shape[1] * keys.shape[2]
    scores = indexer.score_all(
        ops, config, apply_rope(query, *rope), weight, read, length, capacity
    )
    return indexer.select(config, scores, length)


def _dense_list(
    role: V4Role,
    state: V4CacheState,
    tile: Rows,
    near: Float[Array, "t w c"],
    is_near: Bool[Array, "t w"],
    group: int,
    ratio: int,
) -> tuple[Callable[[Array, Array], Array], Bool[Array, "t s"]]:
    """Returns how a block of 64 ranks is read, and which ranks are valid.

    The list has a rank for every compressed row the block table can address, most of them unused,
    so rows are read block by block and only where a block has a valid rank.
    """
    leaf, window = state.main[group], near.shape[1]
    capacity = state.block_table.shape[1] * leaf.shape[2]
    visible = jnp.arange(capacity) < ((tile.position + 1) // ratio)[:, None]
    valid = jnp.concatenate([is_near, visible], axis=1)
    valid = jnp.pad(valid, ((0, 0), (0, -valid.shape[1] % core.BLOCK)))

    def read(block: Int[Array, ""], mask: Bool[Array, "t s"]) -> Float[Array, "t s c"]:
        rank = block * core.BLOCK + jnp.arange(core.BLOCK, dtype=jnp.int32)
        index = jnp.broadcast_to(jnp.clip(rank - window, 0, capacity - 1), mask.shape)
        far = read_pages(leaf, state, role.source, tile.slot, index)
        keys = jnp.where((rank < window)[:, None], near[:, jnp.minimum(rank, window - 1)], far)
        return jnp.where(mask[:, :, None], keys, 0.0)

    return read, valid
