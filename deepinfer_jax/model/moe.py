"""Mixture of experts: router, experts in fixed-shape products, ordered combine (model.md 3.11)."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import MoEConfig
from deepinfer_jax.model.exchanged import exchanged_experts, expert_slots
from deepinfer_jax.model.params import ExpertParams, LayerParams
from deepinfer_jax.numerics import kernels
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import core

#: Weights of one layer's experts up to which all of them are computed at once (`all_experts`).
SMALL_EXPERTS = 2**26
#: Experts of one product in `all_experts` at level "batch".
GROUP = 8


def router_scores(logits: Float[Array, "t e"]) -> Float[Array, "t e"]:
    """Returns sqrt(softplus(logit)); softplus is the identity above 20."""
    return jnp.sqrt(jnp.where(logits > 20.0, logits, jnp.log1p(jnp.exp(jnp.minimum(logits, 20.0)))))


def route(
    ops: Ops,
    moe: MoEConfig,
    gate: Float[Array, "e d"],
    bias: Float[Array, "*t e"],
    v: Float[Array, "t d"],
) -> tuple[Int[Array, "t x"], Float[Array, "t x"]]:
    """Returns (expert ids, weights) in slot order: s + bias descending, ties to the lower id.

    bias: one row for all tokens or one per token; it selects but does not weigh.
    """
    scores = router_scores(ops.contract(v, gate))
    _, ids = core.top_k(scores + bias, moe.num_experts_per_tok)
    return ids, weigh(ops, moe, scores, ids)


def weigh(
    ops: Ops, moe: MoEConfig, scores: Float[Array, "t e"], ids: Int[Array, "t x"]
) -> Float[Array, "t x"]:
    """Returns the routing weights of the chosen experts from the unbiased scores."""
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if moe.norm_topk_prob and moe.num_experts_per_tok > 1:
        weights = weights / (ops.fold_sum(weights, axis=1)[:, None] + 1e-20)
    return weights * moe.routed_scaling_factor


def swiglu(
    ops: Ops,
    moe: MoEConfig,
    expert: ExpertParams,
    x: Float[Array, "t d"],
    weight: Float[Array, "t 1"] | None = None,
) -> Float[Array, "t d"]:
    """Returns one expert's output; `x` is already quantised.

    The gate is clamped from above only, `up` on both sides; the routing weight multiplies before
    the down projection's quantiser, so it changes the FP8 scales.
    """
    active = _activated(ops, moe, ops.contract(x, expert.w1), ops.contract(x, expert.w3))
    if weight is not None:
        active = active * weight
    return ops.bf16(ops.contract(ops.q8(ops.bf16(active)), expert.w2))


def _activated(
    ops: Ops, moe: MoEConfig, gate: Float[Array, "t w"], up: Float[Array, "t w"]
) -> Float[Array, "t w"]:
    """Returns SwiGLU of the two products, rounded and clamped first."""
    gate = jnp.minimum(ops.bf16(gate), moe.swiglu_limit)
    up = jnp.clip(ops.bf16(up), -moe.swiglu_limit, moe.swiglu_limit)
    return jax.nn.silu(gate) * up


def routed_experts(
    ops: Ops,
    moe: MoEConfig,
    experts: ExpertParams,
    layer: Int[Array, ""] | int,
    x: Float[Array, "t d"],
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    valid: Bool[Array, " t"],
) -> Float[Array, "t k d"]:
    """Returns the output of every selected expert, [t, slot, d].

    Every expert that a valid row selected runs on all rows of the tile, in ascending order, and its
    result is kept where it was selected: one product shape whatever the routing. The trip count is
    the static bound; experts beyond the ones hit are skipped.

    experts: leaves [l, e, ..] of all layers, addressed by (layer, expert): sliced per layer first,
    all experts of the layer would be copied.
    """
    count = experts.w1.shape[1]
    bound = min(count, ids.size)
    chosen = (ids[:, :, None] == jnp.arange(count)) & valid[:, None, None]
    hit = chosen.any(axis=(0, 1))
    order = jnp.argsort(~hit, stable=True)[:bound].astype(jnp.int32)

    def run(out: Float[Array, "t k d"], expert: Int[Array, ""]) -> Float[Array, "t k d"]:
        selected = ids == expert
        # Once per row, or (V4, by token id) twice with equal weights: each slot gets the result.
        weight = jnp.where(selected, weights, 0.0).max(axis=1)
        leaves = jax.tree.map(lambda leaf: leaf[layer, expert], experts)
        result = swiglu(ops, moe, leaves, x, weight[:, None])
        return jnp.where(selected[:, :, None], result[:, None, :], out)

    def visit(
        out: Float[Array, "t k d"], expert: Int[Array, ""]
    ) -> tuple[Float[Array, "t k d"], None]:
        if ops.static:
            return run(out, expert), None
        return lax.cond(hit[expert], run, lambda o, _: o, out, expert), None

    start = jnp.zeros((*ids.shape, x.shape[1]), jnp.float32)
    return lax.scan(visit, start, order)[0]


def all_experts(
    ops: Ops,
    moe: MoEConfig,
    experts: ExpertParams,
    layer: Int[Array, ""] | int,
    x: Float[Array, "t d"],
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
) -> Float[Array, "t k d"]:
    """Returns the same as `routed_experts`: every expert on every row, in one product for each use.

    More arithmetic and no loop over experts, for small ones on a device that waits for launches.
    At level "batch" products are of `GROUP` experts, padded with zeros: XLA cuts K by a product's
    width, which may not depend on how many experts a device holds.
    """
    taken = jax.tree.map(lambda leaf: leaf[layer], experts)
    w1, w3, w2 = (core.dequantize(leaf) for leaf in (taken.w1, taken.w3, taken.w2))
    count, width, dim = w1.shape
    selected = ids[:, :, None] == jnp.arange(count)
    weight = jnp.where(selected, weights[:, :, None], 0.0).max(axis=1).T

    def run(part: tuple[Array, ...]) -> Float[Array, "e t d"]:
        w1, w3, w2, weight = part
        gate = ops.contract_float32(x, w1.reshape(-1, dim))
        up = ops.contract_float32(x, w3.reshape(-1, dim))
        active = _activated(ops, moe, gate, up).reshape(-1, len(w1), width)
        active = ops.q8(ops.bf16(active * weight.T[:, :, None]))
        return ops.bf16(ops.contract_grouped_float32(active, w2)).swapaxes(0, 1)

    group = GROUP if ops.fixed_order else count
    groups = -(-count // group)

    def cut(leaf: Array) -> Array:
        padding = [(0, groups * group - count)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(groups, group, *leaf.shape[1:])

    out = core.fixed.in_turn(run, (cut(w1), cut(w3), cut(w2), cut(weight)))
    out = out.reshape(groups * group, *x.shape)
    return jnp.take_along_axis(out.swapaxes(0, 1), ids[:, :, None], axis=1)


def _are_small(experts: ExpertParams) -> bool:
    """Says whether the experts of a layer may be expanded at once."""
    return 3 * math.prod(experts.w1.shape[1:]) <= SMALL_EXPERTS


def grouped_experts(
    ops: Ops,
    moe: MoEConfig,
    experts: ExpertParams,
    layer: Int[Array, ""] | int,
    x: Float[Array, "t d"],
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    valid: Bool[Array, " t"],
) -> Float[Array, "t k d"]:
    """Returns the same as `routed_experts` by one grouped product over the selected experts.

    Rows are sorted by expert; rows that are not valid come last and reach no expert. `experts`
    lie as they were loaded or as `for_kernels` arranges them.
    """
    count = experts.w1.shape[1]
    ids = jnp.where(valid[:, None], ids, count)
    # all layers in one stack of experts: a layer's slice would be copied out before the kernel
    stacks = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), experts)
    return kernels.routed_experts(
        x,
        (stacks.w1, stacks.w3, stacks.w2),
        layer * count,
        count,
        ids,
        weights,
        moe.swiglu_limit,
        ops.kernel("grouped_matmul"),
    )


def every_expert(
    ops: Ops,
    moe: MoEConfig,
    experts: ExpertParams,
    x: Float[Array, "t d"],
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
) -> Float[Array, "t d"]:
    """Returns the sum over the selected experts by three products over all experts at once.

    For training, where the loop would visit every expert too, and copy its result each time.
    experts: leaves [e, ..] of one layer.
    """
    count, width, dim = experts.w1.shape
    up_shape = (count * width, dim)
    gate = ops.contract(x, experts.w1.reshape(up_shape))
    up = ops.contract(x, experts.w3.reshape(up_shape))
    chosen = ids[:, :, None] == jnp.arange(count)
    weight = jnp.where(chosen, weights[:, :, None], 0.0).sum(axis=1)
    active = _activated(ops, moe, gate, up) * jnp.repeat(weight, width, axis=1)
    active = ops.q8(ops.bf16(active))
    return ops.contract(active, experts.w2.swapaxes(0, 1).reshape(dim, count * width))


def selected_experts(
    ops: Ops,
    moe: MoEConfig,
    params: LayerParams,
    layer: Int[Array, ""] | int,
    x: Float[Array, "t d"],
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    valid: Bool[Array, " t"],
    position: Int[Array, " t"] | None = None,
) -> Float[Array, "t k d"]:
    """Returns the output of every selected expert, wherever it lies, [t, slot, d]."""
    experts = params.experts

    def here(x: Array, ids: Array, weights: Array, valid: Array) -> Array:
        grouped = ops.kernel("grouped_matmul") != "xla"
        given = (ops, moe, experts, layer, x, ids, weights)
        if ops.static and not grouped and _are_small(experts):
            return all_experts(*given)
        return (grouped_experts if grouped else routed_experts)(*given, valid)

    if ops.mesh is None or ops.mesh.expert_parallel == 1:
        return here(x, ids, weights, valid)
    slots = expert_slots(params.replicas, ids, position)
    return exchanged_experts(ops, ops.mesh, experts, here, x, slots, weights, valid)


def moe_layer(
    ops: Ops,
    moe: MoEConfig,
    params: LayerParams,
    layer: Int[Array, ""] | int,
    v: Float[Array, "t d"],
    valid: Bool[Array, " t"],
    position: Int[Array, " t"] | None = None,
    is_image: Bool[Array, " t"] | None = None,
) -> tuple[Float[Array, "t d"], Int[Array, "t k"], Float[Array, "t k"]]:
    """Returns (sub-layer output, expert ids, routing weights).

    params: one layer's leaves, its experts still stacked over all layers. position: of the rows in
    their sequences, by which replicas of an expert share them; None sends all to the first.
    is_image: rows that the router selects experts for with the bias of images; None for text alone.
    """
    bias = params.gate_bias
    if is_image is not None:
        bias = jnp.where(is_image[:, None], params.gate_bias_vl, bias)
    ids, weights = route(ops, moe, params.gate, bias, v)
    x = ops.q8(v)
    if ops.training:
        leaves = jax.tree.map(lambda leaf: leaf[layer], params.experts)
        routed = every_expert(ops, moe, leaves, x, ids, weights)[:, None]
    else:
        routed = selected_experts(ops, moe, params, layer, x, ids, weights, valid, position)
    return ops.combine(routed, swiglu(ops, moe, params.shared, x)), ids, weights
