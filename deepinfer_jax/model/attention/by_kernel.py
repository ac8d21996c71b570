"""Attention and index scores by named kernels, which read the bytes of the cache themselves.

A kernel gets whole leaves, as rows or pages one after the other, and where the rows of each query
lie in them; nothing is gathered or decoded beforehand. Same lists in the same order as the
functions of `core`, `indexer` and `window`, which are their XLA form.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import rows
from deepinfer_jax.model.attention import indexer
from deepinfer_jax.model.attention.window import window_places
from deepinfer_jax.model.state import CacheState, page_address
from deepinfer_jax.model.tile import Role, Rows, branch
from deepinfer_jax.numerics import kernels
from deepinfer_jax.numerics.ops import Ops

#: Neighbouring rows that may read their keys together, if they belong to one sequence.
SHARING = 8


def attend(
    ops: Ops,
    config: ModelConfig,
    role: Role,
    state: CacheState,
    tile: Rows,
    topk: Int[Array, "t k"],
    query: Float[Array, "t h c"],
    sink: Float[Array, " h"],
) -> Float[Array, "t h c"]:
    """Returns the attention of a tile's rows over their window ranks and selected ranks."""
    listed = _window_ids(config, state, role.layer, tile.slot, tile.position)
    window = state.window.reshape(-1, state.window.shape[-1])
    name = ops.kernel("sparse_mla_decode")

    def alone() -> Array:
        return kernels.attend(query, window, listed, None, None, sink, name)

    def selected(group: int) -> Callable[[], Array]:
        def run() -> Array:
            leaf = state.main[group]
            block, row = page_address(
                state, tile.slot[:, None], jnp.maximum(topk, 0), leaf.shape[2]
            )
            place = (role.source * leaf.shape[1] + block) * leaf.shape[2] + row
            ids = jnp.where(topk >= 0, place, -1)
            return kernels.attend(
                query, window, listed, leaf.reshape(-1, leaf.shape[-1]), ids, sink, name
            )

        return run

    return branch(role.group, alone, [selected(group) for group in range(len(state.main))])


def attend_block(
    ops: Ops,
    config: ModelConfig,
    state: CacheState,
    layer: Int[Array, ""] | int,
    slot: Int[Array, " k"],
    last: Int[Array, " k"],
    own: Float[Array, "n c"],
    owner: Int[Array, " t"],
    query: Float[Array, "t h c"],
    sink: Float[Array, " h"],
) -> Float[Array, "t h c"]:
    """Returns the attention of draft rows over the window of their block and its own rows.

    Args:
        ops: primitives.
        config: of the model.
        state: of the cache.
        layer: the window rings of this stage.
        slot: of every block.
        last: newest processed position of every block, where its window ends.
        own: keys of the blocks' rows, block after block, at the Q8 rounding point.
        owner: the block of every query.
        query: queries.
        sink: of every head.
    """
    size = own.shape[0] // slot.shape[0]
    window = state.window.reshape(-1, state.window.shape[-1])
    listed = _window_ids(config, state, layer, slot, last)[owner]
    ids = owner[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    return kernels.attend(
        query,
        window,
        listed,
        rows.encode_window(config, own),
        ids,
        sink,
        ops.kernel("sparse_mla_decode"),
    )


def index_scores(
    ops: Ops,
    config: ModelConfig,
    role: Role,
    state: CacheState,
    tile: Rows,
    group: int,
    query: Float[Array, "t h i"],
    weight: Float[Array, "t h"],
    length: Int[Array, " t"],
) -> Float[Array, "t s"]:
    """Returns scores, bfloat16 [t, capacity], of compressed indices below each row's length.

    Eight neighbouring rows of one sequence read a key once; a row has the same bits either way.
    """
    data, scale = state.index_data[group], state.index_scale[group]
    assert scale is not None  # kernels are for checkpoint arithmetic, whose keys are quantised
    query, weight = lax.stop_gradient((query, weight))
    weight = indexer.scaled_weights(ops, config, weight)
    pages = role.source * data.shape[1] + state.block_table[tile.slot]

    def score(lists: Int[Array, "n b"]) -> Array:
        return kernels.index_scores(
            query,
            weight,
            data.reshape(-1, *data.shape[2:]),
            scale.reshape(-1, *scale.shape[2:]),
            lists,
            length,
            ops.kernel("indexer_logits"),
        )

    count = tile.slot.shape[0]
    if count % SHARING or ops.static:
        return score(pages)
    slots = tile.slot.reshape(-1, SHARING)
    alike = (slots == slots[:, :1]) | ~tile.valid.reshape(-1, SHARING)
    return lax.cond(alike.all(), lambda: score(pages[::SHARING]), lambda: score(pages))


def _window_ids(
    config: ModelConfig,
    state: CacheState,
    layer: Int[Array, ""] | int,
    slot: Int[Array, " t"],
    position: Int[Array, " t"],
) -> Int[Array, "t w"]:
    """Returns the window ranks of rows as rows of all rings one after the other, -1 for none."""
    ranks, ring = window_places(config, state, layer, slot, position)
    _, layers, capacity, _ = state.window.shape
    place = (slot[:, None] * layers + layer) * capacity + ring
    return jnp.where(ranks >= 0, place, -1).astype(jnp.int32)
