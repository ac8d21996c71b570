"""One backbone layer of DeepSeek-V4 on one tile of rows; its role is data."""

from dataclasses import fields, replace

import jax
from jax import Array
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.model.v4.attention import attention
from deepinfer_jax.model.v4.moe import moe_layer
from deepinfer_jax.model.v4.role import V4Role
from deepinfer_jax.model.v4.state import V4CacheState
from deepinfer_jax.model.v4.streams import residual
from deepinfer_jax.numerics.ops import Ops


def layer_leaves(params: V4Params, role: V4Role) -> LayerParams:
    """Returns one layer's leaves in the record of V4.1, whose projections and experts serve V4 too.

    Experts stay stacked over all layers, as in V4.1; router data are stacked elsewhere.
    """
    stacked = params.layers
    taken = jax.tree.map(lambda leaf: leaf[role.layer], replace(stacked, experts=None))
    leaves = {field.name: getattr(taken, field.name) for field in fields(taken)}
    leaves["experts"] = stacked.experts
    return LayerParams(**leaves, gate_bias=None, gate_bias_vl=None)


def apply_layer(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    role: V4Role,
    state: V4CacheState,
    streams: Float[Array, "t m d"],
    tile: Rows,
) -> tuple[V4CacheState, Float[Array, "t m d"], dict[str, Array]]:
    """Returns (state with this tile's rows written, streams to the next layer, observations).

    Observations nobody asks for are never computed.
    """
    layer = layer_leaves(params, role)

    def attend(v: Float[Array, "t d"]) -> tuple[Array, tuple]:
        state_, output, *rest = attention(ops, config, params, layer, role, state, tile, v)
        return output, (state_, *rest, v, output)

    def experts(v: Float[Array, "t d"]) -> tuple[Array, tuple]:
        output, ids, weights = moe_layer(ops, config.moe, params, layer, role, tile, v)
        return output, (ids, weights, v, output)

    between, rest = residual(ops, config, layer.hc_attn, layer.attn_norm, streams, attend)
    state, topk, published, attn_in, attn_out = rest
    leaving, rest = residual(ops, config, layer.hc_ffn, layer.ffn_norm, between, experts)
    ids, weights, ffn_in, ffn_out = rest
    seen = {
        "x_in": streams,
        "attn_in": attn_in,
        "attn_out": attn_out,
        "ffn_in": ffn_in,
        "ffn_out": ffn_out,
        "x_out": leaving,
        "topk": topk,
        "expert_ids": ids,
        "expert_weights": weights,
        "compressed_rows": published[0],
        "index_keys": published[1],
    }
    return state, leaving, seen
