"""Products and norms of the network by named kernels, in terms of what the network passes around.

The network carries float32 arrays that hold checkpoint values: BF16, or Q8 dequantised. Kernels
read codes and scales. Q8 of dequantised Q8 gives the same values again, so encoding here is exact
and costs one fused elementwise pass.
Every function takes the name of an implementation (kernels.md section 8), which runs or raises.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import core

Weight = Any  # jax.Array or core.QuantArray


def contract(x: Float[Array, "t i"], w: Weight, implementation: str) -> Float[Array, "t o"]:
    """Returns x @ w^T for a weight stored [o, i], x at a rounding point.

    A quantised weight gives BF16 values: every caller rounds such a product, and the kernel has
    done it. A BF16 weight gives the float32 sum.
    """
    from pallas_kernels.block_scaled_matmul.api import block_scaled_matmul, matmul_bf16

    if isinstance(w, core.QuantArray):
        codes, scale = core.quantize_q8(x)
        out = block_scaled_matmul(codes, scale, w, implementation=implementation)
        return out.astype(jnp.float32)
    return matmul_bf16(
        x.astype(jnp.bfloat16), w, out_dtype=jnp.float32, implementation=implementation
    )


def contract_grouped(
    x: Float[Array, "t g i"], w: Float[Array, "g o i"], implementation: str
) -> Float[Array, "t g o"]:
    """Returns one product per group for a BF16 weight stored [g, o, i]; float32 sums."""
    from pallas_kernels.block_scaled_matmul.api import matmul_bf16

    return matmul_bf16(
        x.astype(jnp.bfloat16), w, out_dtype=jnp.float32, implementation=implementation
    )


def norm(
    x: Float[Array, "t d"], weight: Float[Array, " d"], eps: float, implementation: str
) -> Float[Array, "t d"]:
    """Returns RMSNorm of BF16 values, rounded once to BF16."""
    from pallas_kernels.rms_norm_quant.api import rms_norm_quant

    row, _, _ = rms_norm_quant(x.astype(jnp.bfloat16), weight, eps, implementation=implementation)
    return row.astype(jnp.float32)


def routed_experts(
    x: Float[Array, "t d"],
    experts: tuple[Weight, Weight, Weight],
    first: Int[Array, ""] | int,
    count: int,
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    limit: float,
    implementation: str,
) -> Float[Array, "t k d"]:
    """Returns the BF16 outputs of the selected experts, [t, slot, d].

    Args:
        x: rows at the Q8 rounding point.
        experts: w1 (gate), w3 (up), w2 (down), MXFP4 [g, ..]: the experts of all layers, as stored
            or as the kernel wants them.
        first: the first expert of this layer in that stack.
        count: experts of a layer, e.
        ids: selected experts of each row, in [0, e); e marks a padding row, whose output is zero.
        weights: routing weights.
        limit: the clamp of gate and up.
        implementation: of `grouped_matmul`.
    """
    from pallas_kernels.grouped_matmul.api import routed_experts as grouped
    from pallas_kernels.grouped_matmul.plan import group_rows

    rows, slots = ids.shape
    codes, scale = core.quantize_q8(x)
    groups = group_rows(ids, count)
    out = grouped(
        codes,
        scale,
        *experts,
        groups.offsets,
        groups.order // slots,
        weights.reshape(-1)[groups.order],
        first_group=jnp.asarray(first, jnp.int32),
        limit=limit,
        implementation=implementation,
    )
    # selected, not multiplied: padding rows of the kernel may hold anything
    is_routed = (ids.reshape(-1) < count)[:, None]
    found = jnp.where(is_routed, out[groups.slot].astype(jnp.float32), 0.0)
    return found.reshape(rows, slots, -1)
