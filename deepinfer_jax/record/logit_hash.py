"""A 64-bit hash of a row of logits, of integer arithmetic alone.

Lane i of a row has the bits u of its float32 logit. With m the 32-bit finaliser of MurmurHash3,

    a_i = m(u ^ m(i + 1))        b_i = m(a_i ^ 0x9E3779B9)        all mod 2^32
    hash = (sum of a_i) * 2^32 + (sum of b_i)

The sums are integers, so no order of adding changes them. m is a bijection: a change of one lane
always changes the first sum; other changes go unseen once in about 2^64.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, UInt32

_SPREAD = np.uint32(0x9E3779B9)


def logit_hash_tile(logits: Float[Array, "t v"]) -> UInt32[Array, "t 2"]:
    """Returns the two sums of every row. NaNs and signs of zero count by their bits."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    lane = jnp.arange(1, logits.shape[1] + 1, dtype=jnp.uint32)
    first = _mix(bits ^ _mix(lane))
    second = _mix(first ^ _SPREAD)
    sums = (part.sum(axis=1, dtype=jnp.uint32) for part in (first, second))
    return jnp.stack(list(sums), axis=1)


def hash_text(words: np.ndarray) -> str:
    """Returns the two sums of a row as 16 hexadecimal digits."""
    return f"{int(words[0]):08x}{int(words[1]):08x}"


def _mix(x: Array) -> Array:
    """Returns the finaliser of MurmurHash3: two rounds of shift and multiply, and a shift."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
