"""The attention sub-layer of a backbone layer: write this tile's rows, select, attend.

Everything a row reads, its own window row included, is read back from the cache after the tile has
written, in the stored format: prefill, decode and verification see the same keys.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import source_ratios
from deepinfer_jax.model import rows
from deepinfer_jax.model.attention import by_kernel, compress, core, indexer, projections, whole
from deepinfer_jax.model.attention.window import read_window, write_window
from deepinfer_jax.model.params import CompressorParams, LayerParams, Params
from deepinfer_jax.model.rope import rope_frequencies, rope_tables
from deepinfer_jax.model.state import CacheState, may_close, read_pages, write_pages
from deepinfer_jax.model.tile import Role, Rows, Selection, branch, may_be
from deepinfer_jax.numerics import kernels
from deepinfer_jax.numerics.ops import Ops

Published = tuple[Float[Array, "t c"], Float[Array, "t i"]]  # compressed rows, index keys


def attention(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    layer: LayerParams,
    role: Role,
    state: CacheState,
    selection: Selection,
    tile: Rows,
    v: Float[Array, "t d"],
) -> tuple[CacheState, Float[Array, "t d"], Selection, Published]:
    """Returns (state with this tile's rows written, output, selection, rows published by a source).

    layer: leaves of this layer. params: for the compressor and indexer leaves of its role.
    v: normed sub-layer input.
    """
    frequency = rope_frequencies(config.attention)[role.yarn]
    rope = rope_tables(tile.position, frequency)
    latent = projections.query_latent(ops, config, layer, v)
    query = projections.queries(ops, config, layer, latent, rope)
    key = projections.window_key(ops, config, layer, v, rope)
    state = write_window(config, state, role.layer, tile, key)
    state, published = _compress(ops, config, params, role, state, tile, v, frequency)
    selection = _select(ops, config, params, role, state, selection, tile, v, latent, rope)
    if ops.training:
        mixed = _attend_whole(ops, config, role, state, selection, query, layer.attn_sink)
    elif ops.kernel("sparse_mla_decode") != "xla":
        mixed = by_kernel.attend(
            ops, config, role, state, tile, selection.topk, query, layer.attn_sink
        )
    else:
        lists = _key_lists(config, role, state, tile, selection.topk)
        keys, valid = (jnp.concatenate(parts, axis=1) for parts in zip(*lists, strict=True))
        mixed = core.attend(ops, query, keys, valid, layer.attn_sink)
    return state, projections.output(ops, config, layer, mixed, rope), selection, published


def _compress(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    role: Role,
    state: CacheState,
    tile: Rows,
    v: Float[Array, "t d"],
    frequency: Float[Array, " r2"],
) -> tuple[CacheState, Published]:
    """Writes compressor tails, then compressed rows and index keys of groups this tile closes."""
    count, dim = tile.ids.shape[0], config.attention.head_dim
    ratios = source_ratios(config)

    def leaves(group: int) -> CompressorParams:
        return jax.tree.map(lambda leaf: leaf[role.source], params.compressors[group])

    def project(group: int) -> Callable[[], Array]:
        return lambda: compress.project(ops, leaves(group), v)

    def publish(group: int, ratio: int) -> Callable[[], Published]:
        def run() -> Published:
            one, first = leaves(group), tile.position // ratio * ratio
            tail = state.comp_tail[group]
            if tail is None:
                latent = compress.single(ops, config, one, v)
            else:
                ring = (first[:, None] + jnp.arange(ratio)) % tail.shape[2]
                latent = compress.pool(
                    ops, config, one, tail[role.source, tile.slot[:, None], ring]
                )
            return compress.publish(ops, config, one, latent, first, frequency)

        return run

    no_tail = jnp.zeros((count, 2, dim), jnp.float32)
    tail = branch(
        role.owner,
        lambda: no_tail,
        [(lambda: no_tail) if ratio == 1 else project(g) for g, ratio in enumerate(ratios)],
    )
    state = _write_tails(role, state, tile, tail)
    nothing = (
        jnp.zeros((count, dim), jnp.float32),
        jnp.zeros((count, config.indexer.index_head_dim), jnp.float32),
    )
    published = branch(
        role.owner, lambda: nothing, [publish(g, ratio) for g, ratio in enumerate(ratios)]
    )
    return _write_published(config, role, state, tile, published)


def _write_tails(
    role: Role, state: CacheState, tile: Rows, tail: Float[Array, "t 2 c"]
) -> CacheState:
    tails = list(state.comp_tail)
    tile, tail = tile.shared(tail)
    for group, leaf in enumerate(tails):
        if leaf is not None and may_be(role.owner, group):
            slot = jnp.where(tile.valid & (role.owner == group), tile.slot, leaf.shape[1])
            ring = tile.position % leaf.shape[2]
            tails[group] = leaf.at[role.source, slot, ring].set(tail, mode="drop")
    return replace(state, comp_tail=tuple(tails))


def _write_published(
    config: ModelConfig, role: Role, state: CacheState, tile: Rows, published: Published
) -> tuple[CacheState, Published]:
    """Stores the rows of closed groups; returns the state and the values as they will be read."""
    own = (rows.encode_main(config, published[0]), *rows.encode_index(config, published[1]))
    tile, (stored, data, scale) = tile.shared(own)
    main, keys, scales = list(state.main), list(state.index_data), list(state.index_scale)
    for group, ratio in enumerate(source_ratios(config)):
        if not may_be(role.owner, group):
            continue
        closes = may_close(state, tile.slot, tile.position, ratio)
        allowed = tile.valid & (role.owner == group) & closes
        address = (state, role.source, tile.slot, tile.position // ratio)
        main[group] = write_pages(main[group], *address, stored, allowed)
        keys[group] = write_pages(keys[group], *address, data, allowed)
        scale_leaf = scales[group]
        if scale is not None and scale_leaf is not None:
            scales[group] = write_pages(scale_leaf, *address, scale, allowed)
    state = replace(state, main=tuple(main), index_data=tuple(keys), index_scale=tuple(scales))
    return state, (rows.decode_main(config, own[0]), rows.decode_index(config, *own[1:]))


def _select(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    role: Role,
    state: CacheState,
    selection: Selection,
    tile: Rows,
    v: Float[Array, "t d"],
    latent: Float[Array, "t q"],
    rope: projections.Rope,
) -> Selection:
    """Returns this layer's own selection if it is an index source, else the one it was given."""
    candidate_source = config.indexer.candidate_source_layer_id
    candidate_ratio = (
        None if candidate_source is None else config.attention.compress_ratios[candidate_source]
    )

    def search(group: int, ratio: int) -> Callable[[], Selection]:
        def run() -> Selection:
            leaves = jax.tree.map(lambda leaf: leaf[role.index], params.indexers)
            query = indexer.index_query(ops, config, leaves, latent, rope)
            weight = indexer.head_weights(ops, leaves, v)
            length = jnp.where(tile.valid, (tile.position + 1) // ratio, 0)
            capacity = state.block_table.shape[1] * state.main[group].shape[2]
            if ops.training:
                query, weight, keys = lax.stop_gradient(
                    (query, weight, whole.index_keys(config, state, role.source, group))
                )
                scores = whole.index_scores(ops, config, query, weight, keys)
            elif ops.kernel("indexer_logits") != "xla":
                scores = by_kernel.index_scores(
                    ops, config, role, state, tile, group, query, weight, length
                )
            else:
                read = _index_keys(config, role, state, tile, group)
                scores = indexer.score_all(ops, config, query, weight, read, length, capacity)
            if ratio != candidate_ratio:
                topk = _choose(ops, config, scores, length)
                return Selection(topk=topk, candidates=selection.candidates)
            found = _candidates(ops, config, scores, length)
            mask = jnp.where(role.is_candidate_source == 1, found, selection.candidates)
            inside = indexer.candidate_positions(config, mask, capacity)
            topk = _choose(ops, config, scores, length, inside | (role.uses_candidates == 0))
            return Selection(topk=topk, candidates=mask)

        return run

    searches = [search(g, ratio) for g, ratio in enumerate(source_ratios(config))]
    # A recomputing backward pass keeps what bears this name instead of sorting again.
    return checkpoint_name(branch(role.search, lambda: selection, searches), "selection")


def _choose(
    ops: Ops,
    config: ModelConfig,
    scores: Float[Array, "t s"],
    length: Int[Array, " t"],
    inside: Bool[Array, "t s"] | None = None,
) -> Int[Array, "t k"]:
    """Returns `indexer.select`, by the kernel if one is named."""
    name = ops.kernel("select_topk")
    if name == "xla":
        return indexer.select(config, scores, length, inside)
    return kernels.select_topk(scores, config.indexer.index_topk, length, inside, name)


def _candidates(
    ops: Ops, config: ModelConfig, scores: Float[Array, "t s"], length: Int[Array, " t"]
) -> Bool[Array, "t b"]:
    """Returns `indexer.candidate_mask`, by the kernel if one is named."""
    name, settings = ops.kernel("select_topk"), config.indexer
    if name == "xla":
        return indexer.candidate_mask(config, scores, length)
    return kernels.select_blocks(
        scores, length, settings.candidate_block_size, settings.candidate_topk_blocks, name
    )


def index_loss(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    layer: LayerParams,
    role: Role,
    state: CacheState,
    selection: Selection,
    tile: Rows,
    v: Float[Array, "t d"],
) -> Float[Array, " t"]:
    """Returns how far the indexer of this layer is from its attention, per row; 0 without one.

    KL(target || softmax(index scores)) over the row's selected entries, of whole sequences. target:
    mean over heads of the softmax of the attention scores of these entries. Only leaves of the
    indexer and of the index keys get a gradient. state, selection: after this layer's attention.
    """
    v, topk = lax.stop_gradient(v), selection.topk
    rope = rope_tables(tile.position, rope_frequencies(config.attention)[role.yarn])

    def measure(group: int) -> Callable[[], Array]:
        def run() -> Array:
            latent = lax.stop_gradient(projections.query_latent(ops, config, layer, v))
            query = projections.queries(ops, config, layer, latent, rope)
            entries = whole.entries(config, state, role.source, group)
            valid = whole.chosen(topk, entries.shape[1])
            scores = whole.head_scores(ops, query, entries) * config.attention.head_dim**-0.5
            target = lax.stop_gradient(indexer.mean_attention(scores, valid))
            leaves = jax.tree.map(lambda leaf: leaf[role.index], params.indexers)
            guess = whole.index_scores(
                ops,
                config,
                indexer.index_query(ops, config, leaves, latent, rope),
                indexer.head_weights(ops, leaves, v),
                whole.index_keys(config, state, role.source, group),
            )
            return indexer.divergence(target, guess, valid)

        return run

    measures = [measure(g) for g in range(len(state.main))]
    return branch(role.search, lambda: jnp.zeros(topk.shape[:1], jnp.float32), measures)


def _attend_whole(
    ops: Ops,
    config: ModelConfig,
    role: Role,
    state: CacheState,
    selection: Selection,
    query: Float[Array, "t h c"],
    sink: Float[Array, " h"],
) -> Float[Array, "t h c"]:
    """Returns the attention of whole sequences, in training."""
    window = whole.window_part(ops, config, state, role.layer, query)

    def selected(group: int) -> Callable[[], Array]:
        def run() -> Array:
            keys = whole.entries(config, state, role.source, group)
            valid = whole.chosen(selection.topk, keys.shape[1])
            return whole.merge([window, whole.attend_part(ops, query, keys, valid)], sink)

        return run

    searches = [selected(group) for group in range(len(state.main))]
    return branch(role.group, lambda: whole.merge([window], sink), searches)


def _index_keys(
    config: ModelConfig, role: Role, state: CacheState, tile: Rows, group: int
) -> Callable[[Int[Array, "t s"]], Float[Array, "t s i"]]:
    def read(index: Int[Array, "t s"]) -> Float[Array, "t s i"]:
        address = (state, role.source, tile.slot, index)
        leaf = state.index_scale[group]
        scale = None if leaf is None else read_pages(leaf, *address)
        return rows.decode_index(config, read_pages(state.index_data[group], *address), scale)

    return read


def _key_lists(
    config: ModelConfig, role: Role, state: CacheState, tile: Rows, topk: Int[Array, "t k"]
) -> list[core.KeyList]:
    """Returns window ranks and selected ranks, which are listed in this order (model.md 3.6).

    A layer that is known to select nothing has no selected ranks.
    """
    window = read_window(config, state, role.layer, tile.slot, tile.position)
    if isinstance(role.group, int) and role.group < 0:
        return [window]

    def selected(group: int) -> Callable[[], Array]:
        return lambda: rows.decode_main(
            config, read_pages(state.main[group], state, role.source, tile.slot, topk)
        )

    shape = (*topk.shape, config.attention.head_dim)
    chosen = branch(
        role.group,
        lambda: jnp.zeros(shape, jnp.float32),
        [selected(group) for group in range(len(state.main))],
    )
    return [window, (chosen, (topk >= 0) & (role.group >= 0))]


def empty_selection(config: ModelConfig, state: CacheState, count: int) -> Selection:
    """Returns the selection before the first index source: nothing chosen, no candidate blocks."""
    source, blocks = config.indexer.candidate_source_layer_id, 0
    if source is not None:
        group = source_ratios(config).index(config.attention.compress_ratios[source])
        capacity = state.block_table.shape[1] * state.main[group].shape[2]
        blocks = -(-capacity // config.indexer.candidate_block_size)
    return Selection(
        topk=jnp.full((count, config.indexer.index_topk), -1, jnp.int32),
        candidates=jnp.zeros((count, blocks), bool),
    )
