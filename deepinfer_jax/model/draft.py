"""DSpark draft: context rows, parallel block, Markov and confidence heads (model.md 3.12)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import DraftConfig, ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model import mhc, moe
from deepinfer_jax.model.attention import core, projections
from deepinfer_jax.model.attention.window import read_window, write_window
from deepinfer_jax.model.layer import layer_at
from deepinfer_jax.model.params import DraftParams, LayerParams, Leaf, Params
from deepinfer_jax.model.rope import rope_frequencies, rope_tables
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.numerics.ops import Ops, ops_for


@struct.dataclass
class DraftOutput:
    """One round of `block` proposals after the anchor, without the anchor itself.

    logits: after the Markov head. confidence: estimated acceptance probability of every draft,
    given that the ones before it were accepted; confidence_logit: before the sigmoid.
    """

    logits: Leaf  # float32 [block, v]
    token_ids: Leaf  # int32 [block]
    confidence: Leaf  # float32 [block]
    confidence_logit: Leaf  # float32 [block]


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


def draft_block(
    params: Params,
    config: ModelConfig,
    state: CacheState,
    anchor: Int[Array, ""],
    last: Int[Array, ""],
    slot: Int[Array, ""],
) -> DraftOutput:
    """Returns one greedy round of one sequence. The block fills (part of) one row tile.

    anchor: newest target token, at index last + 1, in no cache yet. last: newest processed
    position.
    """
    ops = ops_for(config.execution)
    settings, draft, rows = draft_settings(config), draft_params(params), draft_rows(config)
    place = jnp.arange(rows, dtype=jnp.int32)
    tile = Rows(
        ids=jnp.where(place == 0, anchor, settings.dspark_noise_token_id),
        position=last + 1 + place,
        slot=jnp.full((rows,), slot),
        valid=place < settings.dspark_block_size,
    )
    hidden, _ = run_stages(ops, config, params, state, tile, jnp.full((rows,), last))
    normed = ops.norm(hidden, draft.norm, config.rms_norm_eps)
    return propose(ops, config, draft, ops.contract(normed, params.head), hidden, anchor)


def draft_rows(config: ModelConfig) -> int:
    """Returns the tile height of a draft block."""
    tile = config.execution.row_tile
    return -(-draft_settings(config).dspark_block_size // tile) * tile


def run_stages(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    state: CacheState,
    tile: Rows,
    last: Int[Array, " t"],
) -> tuple[Float[Array, "t d"], dict[str, Array]]:
    """Returns (hidden rows before the final norm, observations [stage, ...]) of a draft block."""
    embedded = params.embed[tile.ids].astype(jnp.float32)
    count, streams = tile.ids.shape[0], config.mhc.hc_mult
    start = (
        jnp.broadcast_to(embedded[:, None], (count, streams, config.hidden_size)),
        mhc.initial_mix(count, streams),
    )

    def stage(flow: tuple, index: Int[Array, ""]) -> tuple[tuple, dict[str, Array]]:
        layer = layer_at(draft_params(params).stages, index)
        return _stage(ops, config, layer, index, state, flow, tile, last)

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
    last: Int[Array, " t"],
) -> tuple[mhc.Streams, dict[str, Array]]:
    def attend(v: Float[Array, "t d"]) -> tuple[Array, None]:
        context = read_window(config, state, config.num_hidden_layers + index, tile.slot, last)
        return block_attention(ops, config, layer, v, tile, context), None

    def experts(v: Float[Array, "t d"]) -> tuple[Array, None]:
        return moe.moe_layer(ops, draft_moe(config), layer, index, v, tile.valid)[0], None

    flow, _ = mhc.residual(ops, config, layer.hc_attn, layer.attn_norm, flow, attend)
    flow, _ = mhc.residual(ops, config, layer.hc_ffn, layer.ffn_norm, flow, experts)
    return flow, {"x_out": flow[0], "pre_out": flow[1]}


def block_attention(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    v: Float[Array, "t d"],
    tile: Rows,
    context: tuple[Float[Array, "t w c"], Array],
) -> Float[Array, "t d"]:
    """Returns attention of the block rows over the context window and all block rows.

    Every row sees the window that ends at the last processed position, and the block in both
    directions.
    """
    rope = stage_rope(config, tile.position)
    latent = projections.query_latent(ops, config, layer, v)
    q = projections.queries(ops, config, layer, latent, rope)
    # Block keys go through the cache's quantiser like every window row.
    block = ops.q8(projections.window_key(ops, config, layer, v, rope))
    block_size = draft_settings(config).dspark_block_size
    shape = (tile.ids.shape[0], block_size)
    keys = jnp.concatenate(
        [context[0], jnp.broadcast_to(block[:block_size], (*shape, block.shape[1]))], axis=1
    )
    valid = jnp.concatenate([context[1], jnp.ones(shape, bool)], axis=1)
    o = core.attend(ops, q, keys, valid, layer.attn_sink)
    return projections.output(ops, config, layer, o, rope)


def draft_moe(config: ModelConfig) -> moe.MoEConfig:
    """Returns the expert settings of the draft stages: fewer experts, otherwise the backbone's."""
    settings = draft_settings(config)
    return replace(
        config.moe,
        n_routed_experts=settings.dspark_n_routed_experts,
        num_experts_per_tok=settings.dspark_num_experts_per_tok,
    )


def propose(
    ops: Ops,
    config: ModelConfig,
    draft: DraftParams,
    base: Float[Array, "t v"],
    hidden: Float[Array, "t d"],
    anchor: Int[Array, ""],
) -> DraftOutput:
    """Returns greedy drafts of one block: logits get the bias of the token before them.

    base: logits of the parallel stage. hidden: before the final norm.
    """
    size = draft_settings(config).dspark_block_size

    def position(previous: Int[Array, ""], index: Int[Array, ""]) -> tuple[Array, tuple]:
        # A whole tile per position, of which one row is used: the product keeps its shape.
        embedded = jnp.broadcast_to(
            draft.markov_embed[previous].astype(jnp.float32),
            (base.shape[0], draft.markov_embed.shape[1]),
        )
        scores = (base + ops.contract(embedded, draft.markov_head))[index]
        joined = jnp.concatenate([hidden, embedded], axis=1)
        confidence = ops.contract(joined, draft.confidence)[index, 0]
        token = jnp.argmax(scores).astype(jnp.int32)  # lowest id among equal maxima
        return token, (scores, token, confidence)

    _, (scores, tokens, raw) = lax.scan(
        position, anchor.astype(jnp.int32), jnp.arange(size, dtype=jnp.int32)
    )
    return DraftOutput(
        logits=scores,
        token_ids=tokens,
        confidence=jax.nn.sigmoid(jnp.clip(raw, -60.0, 60.0)),
        confidence_logit=raw,
    )
