"""The ``"xla"`` implementation: core's decoders and fixed-order contraction, one rounding."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import core


def block_scaled(x: jax.Array, w: core.QuantArray) -> jax.Array:
    """Returns the product of decoded Q8 rows with a quantised weight as bfloat16 [m, n]."""
    return core.round_bf16(core.contract(x, w)).astype(jnp.bfloat16)


def bf16(x: jax.Array, w: jax.Array, out_dtype: Any) -> jax.Array:
    """Returns x[m, k] @ w[n, k]^T, or one product per group, as ``out_dtype``."""
    product = core.contract(x, w) if x.ndim == 2 else core.contract_grouped(x, w)
    if out_dtype == jnp.bfloat16:
        product = core.round_bf16(product)
    return product.astype(out_dtype)


def fp8_block128(
    x_codes: jax.Array, x_scale: jax.Array, w_codes: jax.Array, w_scale: jax.Array
) -> jax.Array:
    """Returns the product with 1x128 by 128x128 float32 scales as bfloat16 [m, n]."""
    n, k = w_codes.shape
    x = core.decode_e4m3(x_codes) * jnp.repeat(x_scale, 128, axis=1)[:, :k]
    spread = jnp.repeat(jnp.repeat(w_scale, 128, axis=0)[:n], 128, axis=1)[:, :k]
    product = core.contract(x, core.decode_e4m3(w_codes) * spread)
    return core.round_bf16(product).astype(jnp.bfloat16)
