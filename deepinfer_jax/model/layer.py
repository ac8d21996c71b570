"""One backbone layer of DeepSeek-V4.1 on one tile of rows.

Rows may belong to any sequences: they read and write their own sequence's state by slot and
position. The role of the layer is data, so that the network can scan over layers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import mhc, moe
from deepinfer_jax.model.attention.sublayer import attention, index_loss
from deepinfer_jax.model.engram import gate, hashing
from deepinfer_jax.model.exchanged import engram_rows
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.tile import Flow, Role, Rows, branch
from deepinfer_jax.model.vision.positions import image_mask
from deepinfer_jax.numerics.ops import Ops


class OwnLayer:
    """A leaf of one layer where a stack over layers is expected: any layer index gives it.

    A scan that takes the layers as its inputs, which training does, has no stack to index. Not a
    pytree: for `jax.tree` it is a leaf.
    """

    def __init__(self, leaf: Array) -> None:
        """Holds the leaf of the layer in hand, without its layer axis."""
        self.leaf = leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a stack of one layer."""
        return (1, *self.leaf.shape)

    def __getitem__(self, index: Any) -> Array:
        """Returns the leaf at an index whose first entry, the layer, is disregarded."""
        rest = index[1:] if isinstance(index, tuple) else ()
        return self.leaf[rest] if rest else self.leaf


def layer_at(stacked: LayerParams, layer: Int[Array, ""] | int) -> LayerParams:
    """Returns one layer's leaves, its experts still stacked over all layers.

    Expert weights are addressed by (layer, expert) inside the expert loop: sliced here, every
    expert of the layer would be copied out.
    """
    taken = jax.tree.map(lambda leaf: leaf[layer], replace(stacked, experts=None))
    return replace(taken, experts=stacked.experts)


def apply_layer(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    role: Role,
    state: CacheState,
    flow: Flow,
    tile: Rows,
) -> tuple[CacheState, Flow, dict[str, Callable[[], Array]]]:
    """Returns (state with this tile's rows written, flow to the next layer, observations).

    The observations are what drafts, `hidden_states`, training and layer-by-layer tests look at:
    functions without arguments, so that those nobody asks for are never computed.
    """
    layer = layer_at(params.layers, role.layer)
    entering = _engram(ops, config, params, role, state, flow.streams, tile)

    def attend(v: Float[Array, "t d"]) -> tuple[Array, tuple]:
        state_, output, *rest = attention(
            ops, config, params, layer, role, state, flow.selection, tile, v
        )
        return output, (state_, *rest, v, output)

    def experts(v: Float[Array, "t d"]) -> tuple[Array, tuple]:
        output, ids, weights = moe.moe_layer(
            ops,
            config.moe,
            layer,
            role.layer,
            v,
            tile.valid,
            tile.position,
            image_mask(config, tile.ids),
        )
        return output, (ids, weights, v, output)

    streams, rest = mhc.residual(
        ops, config, layer.hc_attn, layer.attn_norm, (entering, flow.mix), attend
    )
    state, selection, published, attn_in, attn_out = rest
    streams, rest = mhc.residual(ops, config, layer.hc_ffn, layer.ffn_norm, streams, experts)
    ids, weights, ffn_in, ffn_out = rest
    seen = {
        "x_in": lambda: entering,
        "tap": lambda: ops.bf16(ops.fold_sum(entering, axis=1) / config.mhc.hc_mult),
        "attn_in": lambda: attn_in,
        "attn_out": lambda: attn_out,
        "ffn_in": lambda: ffn_in,
        "ffn_out": lambda: ffn_out,
        "x_out": lambda: streams[0],
        "pre_out": lambda: streams[1],
        "topk": lambda: selection.topk,
        "expert_ids": lambda: ids,
        "expert_weights": lambda: weights,
        "compressed_rows": lambda: published[0],
        "index_keys": lambda: published[1],
        "index_loss": lambda: index_loss(
            ops, config, params, layer, role, state, selection, tile, attn_in
        ),
    }
    return state, Flow(streams=streams[0], mix=streams[1], selection=selection), seen


def _engram(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    role: Role,
    state: CacheState,
    streams: Float[Array, "t m d"],
    tile: Rows,
) -> Float[Array, "t m d"]:
    """Returns the streams after this layer's n-gram memory, if it has one."""
    if config.engram is None or params.engram is None:
        return streams
    engram, constants, memory = config.engram, engram_primes(config), params.engram
    position = tile.position[:, None] - jnp.arange(engram.engram_max_ngram_size)
    ring = jnp.maximum(position, 0) % state.engram_ids.shape[1]
    context = jnp.where(position >= 0, state.engram_ids[tile.slot[:, None], ring], -1)
    pad = int(memory.token_map.ids[engram.engram_pad_token_id])

    def apply(place: int) -> Callable[[], Array]:
        def run() -> Array:
            leaves = jax.tree.map(lambda leaf: leaf[place], replace(memory, tables=()))
            ids = hashing.hash_ids(constants, place, context, pad)
            found = engram_rows(ops, memory.tables[place], ids, tile.valid)
            return gate.inject(ops, config, leaves, found, streams, context[:, 0] >= 0)

        return run

    places = range(len(engram.engram_layer_ids))
    return branch(role.engram, lambda: streams, [apply(place) for place in places])
