"""RMSNorm and Q8 in plain jnp, from core."""

import jax
import jax.numpy as jnp

from pallas_kernels import core


def rms_norm_quant(
    x: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (row, codes, scale); arguments as in api.rms_norm_quant."""
    row = core.round_bf16(core.rms_norm(x, weight, eps))
    codes, scale = core.quantize_q8(row)
    return row.astype(jnp.bfloat16), codes, scale
