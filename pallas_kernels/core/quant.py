"""Activation quantisers Q8, Q4m and Q4n (model.md 3.2): codes, scales, and their round trips.

Scales are computed by bit operations, so that no compiler may turn ``a / 448`` into a product
with a rounded reciprocal. A group with a NaN or an infinity gets a NaN scale in Q8 and Q4m (the
failure stays visible); Q4n clamps its scale as the format says and keeps only NaN.
All functions are row-local, differentiable nowhere, and equal in eager mode and under ``jit``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.codes import (
    bits_float,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    float_bits,
    pack_nibbles,
    scale_by_e8m0,
    unpack_nibbles,
)
from pallas_kernels.errors import KernelError

Q8_GROUP = 32
Q4M_GROUP = 32
Q4N_GROUP = 16

_EXPONENT = np.uint32(0x7F800000)


def _grouped(x: jax.Array, group: int, name: str) -> jax.Array:
    """Returns float32 ``x`` [..., c] as [..., c / group, group]."""
    x = jnp.asarray(x).astype(jnp.float32)
    if x.ndim == 0 or x.shape[-1] % group:
        raise KernelError(
            f"{name} needs a last axis that is a multiple of {group}, got shape {x.shape}: "
            f"pad the channels to a multiple of {group}"
        )
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _amax(groups: jax.Array, floor: float) -> jax.Array:
    """Returns max(max |x|, floor) over the last axis; NaN stays NaN."""
    return jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(floor))


def _power_scale(amax: jax.Array, exponent: int, mantissa: int) -> jax.Array:
    """Returns pow2ceil(amax / c) for c = (1 + mantissa / 2^23) * 2^exponent, by bit operations.

    Equal to the rounded float32 division followed by pow2ceil for c = 448 and c = 6: next to
    amax = c * 2^j the quotient moves by 0.57 or 0.67 of an ulp, so it never rounds onto 2^j.
    """
    bits = float_bits(amax)
    up = (bits & np.uint32(0x007FFFFF)) > np.uint32(mantissa)
    scale = (bits & _EXPONENT) + (up.astype(jnp.uint32) << 23) - np.uint32(exponent << 23)
    return bits_float(jnp.where((bits & _EXPONENT) == _EXPONENT, np.uint32(0x7FC00000), scale))


def _divide_by_power(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale for powers of two in [2^-126, 2^126], float32 subnormals in x included."""
    bits = float_bits(groups)
    # 1 / 2^e has the exponent field 254 - (e + 127)
    inverse = (np.uint32(254 << 23) - float_bits(scale))[..., None]
    # A subnormal would be flushed by the multiply: count its units of 2^-149 and multiply by
    # inverse * 2^-149. That factor is formed from bits, because XLA reassociates constant factors
    # and its product of two constants would be flushed. Where it does not fit, x / scale is tiny.
    unit = jnp.where(inverse > np.uint32(149 << 23), inverse - np.uint32(149 << 23), np.uint32(0))
    small = (bits & np.uint32(0x007FFFFF)).astype(jnp.float32) * bits_float(unit)
    small = bits_float(float_bits(small) | (bits & np.uint32(0x80000000)))
    return jnp.where((bits & _EXPONENT) == 0, small, groups * bits_float(inverse))


def quantize_q8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Q8: E4M3 codes uint8 [..., c] and E8M0 scale bytes uint8 [..., c / 32].

    ``a = max(max|x|, 1e-4); s = pow2ceil(a / 448); code = e4m3(clamp(x / s, -448, 448))``.
    Raises KernelError if c is not a multiple of 32.
    """
    groups = _grouped(x, Q8_GROUP, "quantize_q8")
    scale = _power_scale(_amax(groups, 1e-4), 8, 0x600000)
    scaled = jnp.clip(_divide_by_power(groups, scale), -448.0, 448.0)
    return encode_e4m3(scaled).reshape(x.shape), encode_e8m0(scale)


def dequantize_q8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns float32 [..., c] of Q8 codes [..., c] and scale bytes [..., c / 32]; exact."""
    values = _grouped(decode_e4m3(codes), Q8_GROUP, "dequantize_q8")
    return scale_by_e8m0(values, scale[..., None]).reshape(codes.shape)


def quantize_q4m(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Q4m: packed E2M1 uint8 [..., c / 2] and E8M0 scale bytes uint8 [..., c / 32].

    ``a = max(max|x|, 6 * 2^-126); s = pow2ceil(a / 6); code = e2m1(clamp(x / s, -6, 6))``.
    Raises KernelError if c is not a multiple of 32.
    """
    groups = _grouped(x, Q4M_GROUP, "quantize_q4m")
    scale = _power_scale(_amax(groups, 6 * 2.0**-126), 2, 0x400000)
    codes = encode_e2m1(_divide_by_power(groups, scale))  # saturates at 6, which is the clamp
    return pack_nibbles(codes.reshape(x.shape)), encode_e8m0(scale)


def dequantize_q4m(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns float32 [..., c] of packed codes [..., c / 2] and scales [..., c / 32]; exact."""
    values = _grouped(decode_e2m1(unpack_nibbles(packed)), Q4M_GROUP, "dequantize_q4m")
    return scale_by_e8m0(values, scale[..., None]).reshape(*packed.shape[:-1], -1)


def quantize_q4n(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Q4n: packed E2M1 uint8 [..., c / 2] and E4M3 scales uint8 [..., c / 16].

    ``a = max(max|x|, 6 * 2^-9); s = e4m3(min(a / 6, 448)); code = e2m1(clamp(x / s, -6, 6))``,
    both divisions real ones (model.md 9.5). Raises KernelError if c is not a multiple of 16.
    """
    groups = _grouped(x, Q4N_GROUP, "quantize_q4n")
    amax = _amax(groups, 6 * 2.0**-9)
    # XLA turns a division by a constant into a product with its rounded reciprocal, which breaks
    # ties of the scale; a divisor that it cannot fold stays a division
    six = jnp.where(amax < 0, np.float32(0), np.float32(6))
    scale = encode_e4m3(jnp.minimum(amax / six, np.float32(448)))
    codes = encode_e2m1(groups, decode_e4m3(scale)[..., None])
    return pack_nibbles(codes.reshape(x.shape)), scale


def dequantize_q4n(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns float32 [..., c] of packed codes [..., c / 2] and E4M3 scales [..., c / 16]; exact.

    Every product has at most six significant bits, so it is also exact in BF16.
    """
    values = _grouped(decode_e2m1(unpack_nibbles(packed)), Q4N_GROUP, "dequantize_q4n")
    return (values * decode_e4m3(scale)[..., None]).reshape(*packed.shape[:-1], -1)


def fake_q8(x: jax.Array) -> jax.Array:
    """Returns the Q8 round trip of x [..., c] as float32; equals dequantize_q8(quantize_q8(x))."""
    return dequantize_q8(*quantize_q8(x))


def fake_q4m(x: jax.Array) -> jax.Array:
    """Returns the Q4m round trip of x [..., c] as float32."""
    return dequantize_q4m(*quantize_q4m(x))


def fake_q4n(x: jax.Array) -> jax.Array:
    """Returns the Q4n round trip of x [..., c] as float32."""
    return dequantize_q4n(*quantize_q4n(x))
