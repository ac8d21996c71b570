"""N-gram hash ids on the device, without 64-bit integers (model.md 3.10.3).

JAX has no int64 unless x64 is on, and a library must not switch it on: a 64-bit product is held as
two uint32 limbs. Every operation wraps modulo 2^32.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt32

from deepinfer_jax.config.engram_primes import EngramPrimes
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import EngramParams
from deepinfer_jax.model.vision.positions import image_mask

Limbs = tuple[UInt32[Array, "*b"], UInt32[Array, "*b"]]


def multiply(
    c: UInt32[Array, "*#b"], high: UInt32[Array, "*#b"], low: UInt32[Array, "*#b"]
) -> Limbs:
    """Returns (hi, lo) of c * m for c < 2^17 and a product below 2^64."""
    c0, c1 = c & 0xFFFF, c >> 16
    b0, b1 = low & 0xFFFF, low >> 16
    p00, p01, p10, p11 = c0 * b0, c0 * b1, c1 * b0, c1 * b1
    middle = (p00 >> 16) + (p01 & 0xFFFF) + (p10 & 0xFFFF)
    return (
        p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16) + c * high,
        (middle << 16) | (p00 & 0xFFFF),
    )


def modulo(value: Limbs, prime: UInt32[Array, "*#b"]) -> UInt32[Array, "*b"]:
    """Returns value mod prime, prime < 2^25, seven bits of the low limb at a time."""
    high, low = value
    rest = high % prime
    for shift, width in ((25, 7), (18, 7), (11, 7), (4, 7), (0, 4)):
        rest = ((rest << width) | ((low >> shift) & ((1 << width) - 1))) % prime
    return rest


def compressed_ids(
    config: ModelConfig, params: EngramParams, ids: Int[Array, "*b"]
) -> Int[Array, "*b"]:
    """Returns the compressed id of every token id, -1 for rows of images."""
    found = jnp.asarray(params.token_map.ids)[ids]
    is_image = image_mask(config, ids)
    return found if is_image is None else jnp.where(is_image, -1, found)


def look_back(context: Int[Array, "t n"], pad: int) -> Int[Array, "t n"]:
    """Returns the compressed ids of p, p-1, .. with everything at or behind a -1 replaced by pad.

    context[:, r] is the compressed id at p-r, or -1 for an image position or before the start. The
    rule is sticky: behind the first -1 there is only pad.
    """
    blocked = jnp.cumsum((context < 0).astype(jnp.int32), axis=1) > 0
    return jnp.where(blocked, pad, context)


def hash_ids(
    tables: EngramPrimes, layer: int, context: Int[Array, "t n"], pad: int
) -> Int[Array, "t k"]:
    """Returns the table rows of every token: int32 [t, orders * heads], order-major.

    tables: constants of `config.engram_primes`. layer: index among the Engram layers.
    context: see `look_back`; n = largest order.
    """
    ids = look_back(context, pad).astype(jnp.uint32)
    multipliers = np.asarray(tables.multipliers[layer], np.uint64)
    highs = jnp.asarray((multipliers >> np.uint64(32)).astype(np.uint32))
    lows = jnp.asarray((multipliers & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    mixed = multiply(ids[:, 0], highs[0], lows[0])
    columns: list[Array] = []
    for back in range(1, context.shape[1]):
        product = multiply(ids[:, back], highs[back], lows[back])
        mixed = (mixed[0] ^ product[0], mixed[1] ^ product[1])
        primes = tables.primes[layer][back - 1]
        columns += [modulo(mixed, jnp.full(ids.shape[:1], prime, jnp.uint32)) for prime in primes]
    offsets = jnp.asarray(np.asarray(tables.offsets[layer], np.uint32))
    return (jnp.stack(columns, axis=1) + offsets).astype(jnp.int32)
