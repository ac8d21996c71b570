"""Mixture of experts of DeepSeek-V4: routed by score or by token id (model.md 5.2, 10.4)."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.config.model import MoEConfig
from deepinfer_jax.model import moe
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.model.v4.role import V4Role
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import core


def route(
    ops: Ops,
    config: MoEConfig,
    params: V4Params,
    gate: Float[Array, "e d"],
    role: V4Role,
    ids: Int[Array, " t"],
    v: Float[Array, "t d"],
) -> tuple[Int[Array, "t x"], Float[Array, "t x"]]:
    """Returns (expert ids, weights) in slot order.

    Scored layers: s + bias descending, ties to the lower id. Hash layers: the row of `tid2eid` for
    the token id, in stored order; an expert may stand there twice, and each slot counts.
    """
    scores = moe.router_scores(ops.contract(v, gate))
    kinds = []
    if params.gate_bias is not None:
        bias = params.gate_bias[jnp.maximum(role.scored, 0)]
        kinds.append((role.scored, core.top_k(scores + bias, config.num_experts_per_tok)[1]))
    if params.tid2eid is not None:
        kinds.append((role.hashed, params.tid2eid[jnp.maximum(role.hashed, 0), ids]))
    chosen = kinds[0][1] if len(kinds) == 1 else jnp.where(kinds[0][0] >= 0, *(k[1] for k in kinds))
    return chosen, moe.weigh(ops, config, scores, chosen)


def moe_layer(
    ops: Ops,
    config: MoEConfig,
    params: V4Params,
    layer: LayerParams,
    role: V4Role,
    tile: Rows,
    v: Float[Array, "t d"],
) -> tuple[Float[Array, "t d"], Int[Array, "t x"], Float[Array, "t x"]]:
    """Returns (sub-layer output, expert ids, routing weights).

    layer: this layer's leaves, its experts still stacked over all layers.
    """
    ids, weights = route(ops, config, params, layer.gate, role, tile.ids, v)
    chosen = (ids, weights, tile.valid, tile.position)
    routed = moe.selected_experts(ops, config, layer, role.layer, v, *chosen)
    return ops.combine(routed, moe.swiglu(ops, config, layer.shared, v)), ids, weights
