"""DSpark draft: context rows, and drafts of many sequences at once (model.md 3.12).

The parallel stages run on tiles of whole blocks, then a sequential head (`draft_heads`) on tiles of
one row per sequence. At level "batch" both tiles have a fixed height, so that the drafts of a
sequence do not depend on how many are drafted for, on its place among them, or on the others.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import DraftConfig, ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model import mhc, moe
from deepinfer_jax.model.attention import by_kernel, core, projections
from deepinfer_jax.model.attention.window import read_window, write_window
from deepinfer_jax.model.draft_heads import Choose, DraftOutput, for_tiles, highest, propose
from deepinfer_jax.model.layer import layer_at
from deepinfer_jax.model.params import DraftParams, LayerParams, Leaf, Params
from deepinfer_jax.model.rope import rope_frequencies, rope_tables
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.numerics.ops import Ops, ops_for


@struct.dataclass
class Anchors:
    """Where k blocks begin: newest token (in no cache yet), newest processed position, slot."""

    token: Leaf  # int32 [k]
    last: Leaf  # int32 [k]
    slot: Leaf  # int32 [k]


def draft_settings(config: ModelConfig) -> DraftConfig:
    """Returns the config of the draft stages.

    Raises:
        InputError: the model has none.
    """
    if config.draft is None:
        raise InputError(
            "drafts need draft stages, and this model has none loaded (its checkpoint has no mtp.* "
            "tensors, or is a DeepSeek-V4, whose stages are not supported): do not draft"
        )
    return config.draft


def draft_params(params: Any) -> DraftParams:
    """Returns the parameters of the draft stages.

    Raises:
        InputError: they were not loaded.
    """
    stages = getattr(params, "draft", None)
    if stages is None:
        raise InputError("drafts need the parameters of the draft stages, which were not loaded")
    return stages


def main_features(
    ops: Ops, config: ModelConfig, draft: DraftParams, taps: Float[Array, "l t d"]
) -> Float[Array, "t d"]:
    """Returns what the stages see of the target: its taps side by side, projected and normed."""
    joined = taps.swapaxes(0, 1).reshape(taps.shape[1], -1)
    projected = ops.bf16(ops.contract(ops.q8(joined), draft.main_proj))
    return ops.norm(projected, draft.main_norm, config.rms_norm_eps)


def stage_rope(config: ModelConfig, position: Int[Array, " t"]) -> projections.Rope:
    """Returns the rotary tables of the stages: plain theta, no YaRN."""
    return rope_tables(position, rope_frequencies(config.attention)[0])


def write_context(
    ops: Ops,
    config: ModelConfig,
    draft: DraftParams,
    state: CacheState,
    tile: Rows,
    taps: Float[Array, "l t d"],
) -> CacheState:
    """Returns the state with every stage's context row of every row of the tile.

    Written for unverified rows too: rejected positions are overwritten before they are read.
    """
    features = main_features(ops, config, draft, taps)
    rope = stage_rope(config, tile.position)
    for stage in range(draft_settings(config).num_stages):
        key = projections.window_key(ops, config, layer_at(draft.stages, stage), features, rope)
        state = write_window(config, state, config.num_hidden_layers + stage, tile, key)
    return state


def draft_blocks(
    params: Params,
    config: ModelConfig,
    state: CacheState,
    anchor: Int[Array, " s"],
    last: Int[Array, " s"],
    slot: Int[Array, " s"],
    count: Int[Array, ""] | int,
    choose: Choose = highest,
    *,
    with_logits: bool = False,
) -> DraftOutput:
    """Returns the drafts of the first `count` of s sequences; what stands after them is padding.

    Pure, to be called inside a jitted function. At level "batch" a sequence's bits depend on
    nothing but its own rows, if those of `choose` do.

    Args:
        params: Parameters with draft stages.
        config: Their config.
        state: The cache; it is only read.
        anchor: Newest token of each sequence, in no cache yet: at index last + 1.
        last: Newest processed position of each sequence.
        slot: Where each sequence is cached.
        count: Real sequences.
        choose: Called inside the loop, once for every position of a tile of sequences; its scores
            are the logits after the head. It must treat rows independently; a row's sequence is
            below s, also where it is padding. The draft at place k has index last + 2 + k.
        with_logits: Also return the logits [s, block, v].
    """
    ops = ops_for(config.execution)
    size = _padded_size(ops, config, anchor.shape[0])
    missing = size - anchor.shape[0]
    anchors = Anchors(*(jnp.pad(x.astype(jnp.int32), (0, missing)) for x in (anchor, last, slot)))
    hidden = _block_hidden(ops, config, params, state, anchors, count)
    sequences = jnp.minimum(jnp.arange(size, dtype=jnp.int32), anchor.shape[0] - 1)
    found = propose(
        ops, config, params, hidden, anchors.token, sequences, count, choose, with_logits
    )
    return jax.tree.map(lambda leaf: leaf[: anchor.shape[0]], found)


def blocks_per_tile(config: ModelConfig) -> int:
    """Returns how many whole blocks one row tile holds; a longer block has several tiles."""
    return max(1, config.execution.row_step // draft_settings(config).dspark_block_size)


def _padded_size(ops: Ops, config: ModelConfig, count: int) -> int:
    """Returns how many sequences the loops are laid out for.

    At least two tiles of either loop, for the reason of `plan_length`, and whole ones:
    `dynamic_slice` clamps.
    """
    if not ops.is_tiled:
        return count
    tiles = [
        max(2, -(-count // height)) * height
        for height in (blocks_per_tile(config), config.execution.row_tile)
    ]
    return max(tiles)


def _block_hidden(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    state: CacheState,
    anchors: Anchors,
    count: Int[Array, ""] | int,
) -> Float[Array, "s k d"]:
    """Returns the hidden rows of every block, before the final norm."""
    size, total = draft_settings(config).dspark_block_size, anchors.token.shape[0]
    blocks = blocks_per_tile(config) if ops.is_tiled else total

    def tile(first: Int[Array, ""] | int, hidden: Float[Array, "s k d"]) -> Float[Array, "s k d"]:
        cut = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, blocks), anchors)
        valid = first + jnp.arange(blocks) < count
        # Against row-only work being hoisted out of the loop, as in `step`.
        cut, valid = lax.optimization_barrier((cut, valid))
        rows, _ = run_stages(ops, config, params, state, block_rows(config, cut, valid), cut)
        found = rows[: blocks * size].reshape(blocks, size, -1)
        return lax.dynamic_update_slice_in_dim(hidden, found, first, axis=0)

    hidden = jnp.zeros((total, size, config.hidden_size), jnp.float32)
    return for_tiles(ops, blocks, ops.agree(count), tile, hidden)


def block_rows(config: ModelConfig, anchors: Anchors, valid: Bool[Array, " k"]) -> Rows:
    """Returns the rows of k blocks one after the other, up to whole row tiles."""
    settings, count = draft_settings(config), anchors.token.shape[0]
    size, tile = settings.dspark_block_size, config.execution.row_step
    rows = jnp.arange(-(-count * size // tile) * tile, dtype=jnp.int32)
    owner = _owner(rows, size, count)
    place = rows - owner * size
    return Rows(
        ids=jnp.where(place == 0, anchors.token[owner], settings.dspark_noise_token_id),
        position=anchors.last[owner] + 1 + place,
        slot=anchors.slot[owner],
        valid=valid[owner] & (place < size),
    )


def _owner(rows: Int[Array, " t"], size: int, count: int) -> Int[Array, " t"]:
    """Returns the block of every row; rows after the last block, all invalid, count as its own."""
    return jnp.minimum(rows // size, count - 1)


def run_stages(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    state: CacheState,
    tile: Rows,
    anchors: Anchors,
) -> tuple[Float[Array, "t d"], dict[str, Array]]:
    """Returns (hidden rows before the final norm, observations [stage, ...]) of k blocks.

    tile: the `block_rows` of `anchors`.
    """
    embedded = params.embed[tile.ids].astype(jnp.float32)
    count, streams = tile.ids.shape[0], config.mhc.hc_mult
    start = (
        jnp.broadcast_to(embedded[:, None], (count, streams, config.hidden_size)),
        mhc.initial_mix(count, streams),
    )

    def stage(flow: tuple, index: Int[Array, ""]) -> tuple[tuple, dict[str, Array]]:
        layer = layer_at(draft_params(params).stages, index)
        return _stage(ops, config, layer, index, state, flow, tile, anchors)

    flow, seen = lax.scan(
        stage, start, jnp.arange(draft_settings(config).num_stages, dtype=jnp.int32)
    )
    return mhc.collapse(ops, flow[1], flow[0]), seen


def _stage(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    index: Int[Array, ""],
    state: CacheState,
    flow: mhc.Streams,
    tile: Rows,
    anchors: Anchors,
) -> tuple[mhc.Streams, dict[str, Array]]:
    def attend(v: Float[Array, "t d"]) -> tuple[Array, None]:
        place = config.num_hidden_layers + index
        if ops.kernel("sparse_mla_decode") != "xla":
            return _kernel_attention(ops, config, layer, v, tile, state, place, anchors), None
        context = read_window(config, state, place, anchors.slot, anchors.last)
        return block_attention(ops, config, layer, v, tile, context), None

    def experts(v: Float[Array, "t d"]) -> tuple[Array, None]:
        given = (ops, draft_moe(config), layer, index, v, tile.valid, tile.position)
        return moe.moe_layer(*given)[0], None

    flow, _ = mhc.residual(ops, config, layer.hc_attn, layer.attn_norm, flow, attend)
    flow, _ = mhc.residual(ops, config, layer.hc_ffn, layer.ffn_norm, flow, experts)
    return flow, {"x_out": flow[0], "pre_out": flow[1]}


def block_attention(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    v: Float[Array, "t d"],
    tile: Rows,
    context: tuple[Float[Array, "k w c"], Bool[Array, "k w"]],
) -> Float[Array, "t d"]:
    """Returns attention of the rows of k blocks, each over its context window and its own block.

    Every row sees the window that ends at the last processed position, and its block in both
    directions. A key list is built per block, and read by its rows 64 ranks at a time.
    """

    def mix(q: Array, own: Array, owner: Array) -> Array:
        own = own.reshape(context[0].shape[0], -1, own.shape[1])
        keys, valid = core.pad_keys(
            jnp.concatenate([context[0], own], axis=1),
            jnp.concatenate([context[1], jnp.ones(own.shape[:2], bool)], axis=1),
        )
        parts = keys.reshape(keys.shape[0], -1, core.BLOCK, keys.shape[2]).swapaxes(0, 1)
        return core.attend_blocks(
            ops, q, parts, valid[owner], lambda part, mask: part[owner], layer.attn_sink
        )

    return _mixed_block(ops, config, layer, v, tile, context[0].shape[0], mix)


def _kernel_attention(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    v: Float[Array, "t d"],
    tile: Rows,
    state: CacheState,
    place: Int[Array, ""] | int,
    anchors: Anchors,
) -> Float[Array, "t d"]:
    """Returns `block_attention` by the named kernel, which reads the window rows itself."""

    def mix(q: Array, own: Array, owner: Array) -> Array:
        return by_kernel.attend_block(
            ops, config, state, place, anchors.slot, anchors.last, own, owner, q, layer.attn_sink
        )

    return _mixed_block(ops, config, layer, v, tile, anchors.slot.shape[0], mix)


def _mixed_block(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    v: Float[Array, "t d"],
    tile: Rows,
    count: int,
    mix: Callable[[Array, Array, Array], Array],
) -> Float[Array, "t d"]:
    """Returns the sub-layer output of the rows of `count` blocks.

    mix: (queries [t, h, c], keys of the blocks' rows in order, block of every row) -> attention.
    """
    rope = stage_rope(config, tile.position)
    latent = projections.query_latent(ops, config, layer, v)
    q = projections.queries(ops, config, layer, latent, rope)
    # Block keys go through the cache's quantiser like every window row.
    own = ops.q8(projections.window_key(ops, config, layer, v, rope))
    size = draft_settings(config).dspark_block_size
    o = mix(q, own[: count * size], _owner(jnp.arange(v.shape[0]), size, count))
    return projections.output(ops, config, layer, o, rope)


def draft_moe(config: ModelConfig) -> moe.MoEConfig:
    """Returns the expert settings of the draft stages: fewer experts, otherwise the backbone's."""
    settings = draft_settings(config)
    return replace(
        config.moe,
        n_routed_experts=settings.dspark_n_routed_experts,
        num_experts_per_tok=settings.dspark_num_experts_per_tok,
    )
