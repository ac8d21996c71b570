"""The Q8 scale inside kernels: core's rule on int32 bit patterns, in operations Mosaic and Triton
lower (core.quantize_q8 itself needs a rounding primitive that neither has)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_EXPONENT = np.int32(0x7F800000)
_NAN = np.int32(0x7FC00000)
_ONE = np.int32(1 << 23)


def q8_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (2^e, 2^-e) as float32, 2^e = pow2ceil(max(amax, 1e-4) / 448); NaN stays NaN."""
    bits = lax.bitcast_convert_type(jnp.maximum(amax, np.float32(1e-4)), jnp.int32)
    up = jnp.where((bits & np.int32(0x007FFFFF)) > np.int32(0x600000), _ONE, np.int32(0))
    scale = (bits & _EXPONENT) + up - np.int32(8 << 23)
    scale = jnp.where((bits & _EXPONENT) == _EXPONENT, _NAN, scale)
    inverse = np.int32(254 << 23) - scale
    return (
        lax.bitcast_convert_type(scale, jnp.float32),
        lax.bitcast_convert_type(inverse, jnp.float32),
    )


def q8_codes(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the E4M3 codes of x * inverse, clamped to +-448, as float8_e4m3fn."""
    scaled = jnp.minimum(jnp.maximum(x * inverse, np.float32(-448)), np.float32(448))
    return scaled.astype(jnp.float8_e4m3fn)
