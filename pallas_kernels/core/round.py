"""The one BF16 rounding point of the network (model.md 3.2)."""

import jax
from jax import lax


def round_bf16(x: jax.Array) -> jax.Array:
    """Returns float32 ``x`` rounded to the nearest BF16 value (ties to even), still as float32.

    A float32 -> bfloat16 -> float32 cast pair is not a rounding point: XLA may delete it (excess
    precision), and whether it does depends on fusion and hence on somebody else's ``jit``.
    ``reduce_precision`` is always kept, and a later cast of the result to bfloat16 is exact.

    Args:
        x: float32 array of any shape.

    Returns:
        float32 array of the same shape; every value is representable in bfloat16.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
