"""Scalar codes: E8M0, E4M3, E2M1 and the exact power-of-two products around them.

Everything is written with integer operations on the bit patterns. XLA:CPU runs with subnormals
flushed to zero, so a plain float multiply loses values such as 2^-127 (E8M0 byte 0) or
0.5 * 2^-126, which occur at the edges of the formats (model.md 2.6).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# numpy scalars, not jnp arrays: importing this module must not start a backend
_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_EXPONENT = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x007FFFFF)
_ONE_EXPONENT = np.uint32(0x00800000)
_NAN_BITS = np.uint32(0x7FC00000)

# midpoints between neighbouring E2M1 magnitudes, and whether a tie goes to the upper one
_E2M1_STEPS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def float_bits(x: jax.Array) -> jax.Array:
    """Returns the bit pattern of float32 ``x`` as uint32."""
    return lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)


def bits_float(bits: jax.Array) -> jax.Array:
    """Returns the float32 value of a uint32 bit pattern."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def pow2ceil(x: jax.Array) -> jax.Array:
    """Returns the smallest power of two >= positive float32 ``x`` (2^ceil(log2 x)), as float32.

    Keep the exponent, add one if any mantissa bit is set, clear the mantissa. Infinity and NaN
    give NaN, so that a broken row stays visible in its scale.
    """
    bits = float_bits(x)
    up = (bits + _MANTISSA) & _EXPONENT
    return bits_float(jnp.where((bits & _EXPONENT) == _EXPONENT, _NAN_BITS, up))


def decode_e8m0(byte: jax.Array) -> jax.Array:
    """Returns 2^(byte - 127) as float32; byte 0 is 2^-127 (a subnormal), byte 255 is NaN."""
    wide = jnp.asarray(byte).astype(jnp.uint32)
    bits = jnp.where(wide == 0, np.uint32(0x00400000), wide << 23)
    return bits_float(jnp.where(wide == 255, _NAN_BITS, bits))


def encode_e8m0(x: jax.Array) -> jax.Array:
    """Returns the E8M0 byte (uint8) of a float32 power of two; 2^-127 gives 0, NaN and inf 255."""
    return (float_bits(x) >> 23).astype(jnp.uint8)


def as_bytes(codes: jax.Array) -> jax.Array:
    """Returns 8-bit codes of any 8-bit dtype (uint8, int8, float8) as uint8, bits unchanged."""
    codes = jnp.asarray(codes)
    return codes if codes.dtype == jnp.uint8 else lax.bitcast_convert_type(codes, jnp.uint8)


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """Returns the float32 values of E4M3 codes (uint8 bytes or float8_e4m3fn); 0x7f is NaN."""
    wide = as_bytes(codes).astype(jnp.uint32)
    magnitude = wide & 0x7F
    # exponent 0 holds multiples of 2^-9; otherwise shift the four exponent bits into place
    small = magnitude.astype(jnp.float32) * np.float32(2.0**-9)
    normal = (magnitude << 20) + np.uint32(120 << 23)
    bits = jnp.where(magnitude < 8, float_bits(small), normal)
    bits = jnp.where(magnitude == 0x7F, _NAN_BITS, bits)
    return bits_float(bits | ((wide & 0x80) << 24))


def encode_e4m3(x: jax.Array) -> jax.Array:
    """Returns the E4M3 code (uint8) nearest to float32 ``x``, ties to even, sign of zero kept.

    The caller clamps to [-448, 448]; larger values have no code here. NaN gives 0x7f.
    """
    bits = float_bits(x)
    magnitude = bits & _MAGNITUDE
    # round to three mantissa bits; the carry may run into the exponent, as it should
    rounded = magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - np.uint32(120 << 3)
    # below 2^-6 the grid is 2^-9; a float32 subnormal is far below half of it
    small = lax.round(bits_float(magnitude) * np.float32(512.0), lax.RoundingMethod.TO_NEAREST_EVEN)
    tiny = magnitude < np.uint32(121 << 23)
    code = jnp.where(tiny, jnp.where(tiny, small, 0.0).astype(jnp.uint32), normal)
    code = jnp.where(magnitude > _EXPONENT, np.uint32(0x7F), code)
    return (code | ((bits & _SIGN) >> 24)).astype(jnp.uint8)


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """Returns the float32 values of E2M1 codes 0..15 (bit 3 sign; 0, .5, 1, 1.5, 2, 3, 4, 6)."""
    wide = jnp.asarray(codes).astype(jnp.uint32)
    magnitude = wide & 7
    normal = (magnitude << 22) + np.uint32(126 << 23)
    half = jnp.where(magnitude == 1, np.uint32(126 << 23), np.uint32(0))
    bits = jnp.where(magnitude >= 2, normal, half)
    return bits_float(bits | ((wide & 8) << 28))


def encode_e2m1(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Returns the E2M1 code (uint8, 0..15) nearest to x / scale; ties to even; sign kept.

    0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4; above 6 it saturates.
    The quotient is never formed: |x| is compared with threshold * scale, which is exact. XLA would
    turn a division by a broadcast scale into a product with its rounded reciprocal, other codes.
    (A correctly rounded quotient gives the same codes: at its own spacing |x| misses
    threshold * scale by more than the quotient's rounding can bridge.)

    Args:
        x: float32.
        scale: None (one), or positive values with at most 20 significant bits, at least 2^-120.
    """
    bits = float_bits(x)
    size = bits_float(bits & _MAGNITUDE)
    code = jnp.zeros(jnp.shape(x), jnp.uint8)
    for threshold, tie_goes_up in _E2M1_STEPS:
        bound = np.float32(threshold) if scale is None else np.float32(threshold) * scale
        code += (size >= bound if tie_goes_up else size > bound).astype(jnp.uint8)
    return code | ((bits & _SIGN) >> 28).astype(jnp.uint8)


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Packs uint8 codes [..., 2n] into bytes uint8 [..., n]; the even channel is the low nibble."""
    codes = jnp.asarray(codes)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Unpacks bytes [..., n] (uint8 or int8) into uint8 codes [..., 2n], low nibble first."""
    packed = as_bytes(packed)
    # spread the two nibbles over a 16-bit word and split it, low byte first; interleaving two
    # arrays instead makes a scalar loop of every fused use (measured: 5 ms against 1.2 ms)
    wide = packed.astype(jnp.uint16)
    pair = lax.bitcast_convert_type((wide | (wide << 4)) & np.uint16(0x0F0F), jnp.uint8)
    return pair.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def scale_by_e8m0(values: jax.Array, byte: jax.Array) -> jax.Array:
    """Returns values * 2^(byte - 127) exactly, subnormal results included.

    Args:
        values: float32 decoded E4M3 or E2M1 values (at most four significant bits, 0 or >= 2^-9).
        byte: uint8 E8M0 bytes, broadcastable against ``values``.

    Returns:
        float32; NaN where the byte is 255, infinity where the product overflows.
    """
    byte = jnp.asarray(byte)
    low = byte < 32
    # scales below 2^-95 are applied 2^64 too large; the product is then a normal number
    lifted = jnp.where(low, byte + np.uint8(64), byte)
    product = values * decode_e8m0(lifted)
    magnitude = bits_float(float_bits(product) & _MAGNITUDE)
    # undo the lift: exponent arithmetic if the result is normal, else count units of 2^-149
    # (exact, because four significant bits from 2^-136 upward are whole multiples of it)
    is_subnormal = magnitude < np.float32(2.0**-62)
    units = jnp.where(low & is_subnormal, magnitude * np.float32(2.0**85), 0.0).astype(jnp.uint32)
    sign = float_bits(product) & _SIGN
    lowered = jnp.where(is_subnormal, units | sign, float_bits(product) - np.uint32(64 << 23))
    lowered = jnp.where(magnitude != magnitude, float_bits(product), lowered)
    return bits_float(jnp.where(low, lowered, float_bits(product)))
