"""Routed experts in plain jnp: every expert on all rows, kept where it was selected."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import core
from pallas_kernels.grouped_matmul.layout import ExpertWords, decode_expert


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns bf16(x @ w^T) as float32; products of bfloat16 values are exact in float32."""
    out = jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32)
    return core.round_bf16(out)


def _weights(w1: Any, w3: Any, w2: Any, expert: jax.Array) -> tuple[jax.Array, ...]:
    """Returns one expert's (gate, up, down) in bfloat16, which holds MXFP4 values exactly."""
    if isinstance(w1, ExpertWords):
        gate_up, down = (decode_expert(w.words[expert], w.interleaved) for w in (w1, w2))
        gate, up = (a[: w1.rows, : w1.channels] for a in gate_up)
        return gate, up, down[0][: w2.rows, : w2.channels]
    return tuple(w[expert].dequantize().astype(jnp.bfloat16) for w in (w1, w3, w2))


def routed_experts(
    x: jax.Array,
    w1: Any,
    w3: Any,
    w2: Any,
    offsets: jax.Array,
    weight: jax.Array,
    *,
    first_group: jax.Array,
    limit: float,
) -> jax.Array:
    """Returns the expert outputs of sorted rows; arguments as in api.routed_experts.

    x holds the gathered rows, bfloat16 [rows, channels]; rows of no expert come back as zeros.
    """
    row = jnp.arange(x.shape[0], dtype=jnp.int32)

    def run(out: jax.Array, expert: jax.Array) -> jax.Array:
        gate_w, up_w, down_w = _weights(w1, w3, w2, first_group + expert)
        gate = jnp.minimum(_product(x, gate_w), limit)
        up = jnp.clip(_product(x, up_w), -limit, limit)
        active = core.round_bf16(jax.nn.silu(gate) * up * weight[:, None])
        y = _product(core.fake_q8(active).astype(jnp.bfloat16), down_w).astype(jnp.bfloat16)
        mine = (row >= offsets[expert]) & (row < offsets[expert + 1])
        return jnp.where(mine[:, None], y, out)

    def visit(expert: jax.Array, out: jax.Array) -> jax.Array:
        used = offsets[expert + 1] > offsets[expert]
        return lax.cond(used, run, lambda out, _: out, out, expert)

    return lax.fori_loop(0, offsets.shape[0] - 1, visit, jnp.zeros(x.shape, jnp.bfloat16))
