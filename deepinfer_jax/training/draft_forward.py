"""The draft stages on many blocks at once, differentiable (model.md 3.12).

`model.draft` runs one block against a cache. Here the rows of a batch are whole sequences, so the
context of any block is a slice of them, and all blocks of a batch run as one set of rows through
the same projections, experts, residual mixing and attention fold. A test holds both forms equal.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import draft_heads, mhc, moe
from deepinfer_jax.model.attention import core, projections
from deepinfer_jax.model.attention.window import window_ranks
from deepinfer_jax.model.draft import draft_moe, draft_settings, main_features, stage_rope
from deepinfer_jax.model.layer import OwnLayer, layer_at
from deepinfer_jax.model.params import DraftParams, LayerParams, Leaf, Params
from deepinfer_jax.numerics.ops import Ops
from deepinfer_jax.training.forward import training_config, training_forward, training_ops


@struct.dataclass
class TargetRows:
    """What blocks need of the frozen target: its tapped trunks and its final normed hidden rows."""

    taps: Leaf  # float32 [taps, b, t, d]
    hidden: Leaf  # float32 [b, t, d]


@struct.dataclass
class Blocks:
    """Where the a blocks of a batch are: the sequence of each and the index of its anchor in it.

    The anchor is the newest token, not yet processed by the target: the block sees the target up to
    the position before it, and its row j predicts the token at `anchor + 1 + j`.
    """

    row: Leaf  # int32 [a]
    anchor: Leaf  # int32 [a], from 1

    def positions(self, size: int, offset: int = 0) -> Int[Array, "a k"]:
        """Returns the indices anchor + offset + 0..size-1 in the sequences."""
        return self.anchor[:, None] + offset + jnp.arange(size, dtype=jnp.int32)


def target_rows(params: Params, config: ModelConfig, ids: Int[Array, "b t"]) -> TargetRows:
    """Returns taps and hidden rows of whole sequences; no gradient reaches the target."""
    hidden, seen = training_forward(params, config, ids, collect=("tap",), remat=False)
    layers = np.asarray(draft_settings(config).dspark_target_layer_ids)
    return lax.stop_gradient(TargetRows(taps=seen["tap"][layers], hidden=hidden))


def block_hidden(
    config: ModelConfig,
    embed: Float[Array, "v d"],
    draft: DraftParams,
    taps: Float[Array, "l b t d"],
    ids: Int[Array, "b t"],
    blocks: Blocks,
) -> tuple[Float[Array, "a k d"], Int[Array, "s a k x"]]:
    """Returns (hidden rows before the final norm, expert ids of every stage) of all blocks.

    Args:
        config: The model; how it is executed does not matter.
        embed: The target's embedding.
        draft: Float32 parameters of the stages, quantised already where that is wanted.
        taps: The target's tapped trunks, of every token of the batch.
        ids: Token ids, every row a sequence from position 0.
        blocks: Sequence and anchor index of each block.
    """
    config = training_config(config)
    ops, settings = training_ops(config), draft_settings(config)
    count, size = blocks.anchor.shape[0], settings.dspark_block_size
    features = main_features(ops, config, draft, taps.reshape(taps.shape[0], -1, taps.shape[3]))
    place = jnp.arange(size)
    anchors = ids[blocks.row, blocks.anchor][:, None]
    inputs = jnp.where(place == 0, anchors, settings.dspark_noise_token_id).reshape(-1)
    embedded, streams = embed[inputs].astype(jnp.float32), config.mhc.hc_mult
    start = (
        jnp.broadcast_to(embedded[:, None], (inputs.shape[0], streams, config.hidden_size)),
        mhc.initial_mix(inputs.shape[0], streams),
    )

    def stage(flow: mhc.Streams, own: LayerParams) -> tuple[mhc.Streams, Array]:
        layer = layer_at(jax.tree.map(OwnLayer, own), 0)
        return _stage(ops, config, layer, features, ids.shape, flow, blocks)

    flow, chosen = lax.scan(stage, start, draft.stages)
    hidden = mhc.collapse(ops, flow[1], flow[0])
    return hidden.reshape(count, size, -1), chosen.reshape(chosen.shape[0], count, size, -1)


def _stage(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    features: Float[Array, "n d"],
    shape: tuple[int, ...],
    flow: mhc.Streams,
    blocks: Blocks,
) -> tuple[mhc.Streams, Int[Array, "r x"]]:
    """Returns (flow after one stage, its expert ids); shape: [b, t] of the batch."""

    def attend(v: Float[Array, "r d"]) -> tuple[Array, None]:
        position = jnp.tile(jnp.arange(shape[1], dtype=jnp.int32), shape[0])
        key = projections.window_key(ops, config, layer, features, stage_rope(config, position))
        context = _context(config, key.reshape(*shape, -1), blocks)
        return _block_attention(ops, config, layer, v, context, blocks), None

    def experts(v: Float[Array, "r d"]) -> tuple[Array, Array]:
        valid = jnp.ones((v.shape[0],), bool)
        output, ids, _ = moe.moe_layer(ops, draft_moe(config), layer, 0, v, valid)
        return output, ids

    flow, _ = mhc.residual(ops, config, layer.hc_attn, layer.attn_norm, flow, attend)
    return mhc.residual(ops, config, layer.hc_ffn, layer.ffn_norm, flow, experts)


def _context(
    config: ModelConfig, key: Float[Array, "b t c"], blocks: Blocks
) -> tuple[Float[Array, "a w c"], Array]:
    """Returns what `read_window` gives at the last processed position of every block."""
    ranks = window_ranks(blocks.anchor - 1, config.attention.sliding_window)
    return key[blocks.row[:, None], jnp.maximum(ranks, 0)], ranks >= 0


def _block_attention(
    ops: Ops,
    config: ModelConfig,
    layer: LayerParams,
    v: Float[Array, "r d"],
    context: tuple[Float[Array, "a w c"], Array],
    blocks: Blocks,
) -> Float[Array, "r d"]:
    """Returns `model.draft.block_attention` of every block.

    The rows of a block see the same keys, so they are folded into the heads: a key list per block,
    not per row.
    """
    count, size = blocks.anchor.shape[0], draft_settings(config).dspark_block_size
    rope = stage_rope(config, blocks.positions(size).reshape(-1))
    latent = projections.query_latent(ops, config, layer, v)
    q = projections.queries(ops, config, layer, latent, rope)
    block = projections.window_key(ops, config, layer, v, rope).reshape(count, size, -1)
    keys = jnp.concatenate([context[0], block], axis=1)
    valid = jnp.concatenate([context[1], jnp.ones((count, size), bool)], axis=1)
    folded = q.reshape(count, size * q.shape[1], q.shape[2])
    o = core.attend(ops, folded, keys, valid, jnp.tile(layer.attn_sink, size))
    return projections.output(ops, config, layer, o.reshape(q.shape), rope)


def block_logits(
    config: ModelConfig,
    head: Float[Array, "v d"],
    draft: DraftParams,
    hidden: Float[Array, "a k d"],
    previous: Int[Array, "a k"],
) -> tuple[Float[Array, "r v"], Float[Array, " r"]]:
    """Returns (logits after the head, confidence logits) of the r = a * k rows of whole blocks.

    Teacher-forced: `previous` is the true token before the one that a row predicts, where
    `model.draft_heads.propose` takes the draft before it.
    """
    ops, settings = training_ops(config), draft_settings(config)
    rows = hidden.reshape(-1, hidden.shape[2])
    base = ops.contract(ops.norm(rows, draft.norm, config.rms_norm_eps), head)
    embedded = draft_heads.embed_previous(settings, draft, previous.reshape(-1))

    def position(memory: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        return draft_heads.head_output(ops, settings, draft, memory, *row)

    by_place = (embedded.reshape(*previous.shape, -1).swapaxes(0, 1), hidden.swapaxes(0, 1))
    _, outputs = lax.scan(position, draft_heads.empty_memory(settings, previous.shape[0]), by_place)
    output = outputs.swapaxes(0, 1).reshape(embedded.shape)
    logits = draft_heads.head_scores(ops, settings, draft, base, output)
    return logits, draft_heads.confidence_logits(ops, draft, rows, embedded)
