"""The only random numbers of the project: Threefry-2x32 on explicit counters (engine.md 5.3).

A word is a function of (key, index, purpose, lane) and of nothing else: no state, no split, no
shape. `index` is the position of the token that is chosen; `lane` tells draws of one purpose apart.
Integer arithmetic is exact everywhere, so tokens do not depend on batch, slot, padding or device
count; the float transforms run in row tiles.
"""

import secrets
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from pallas_kernels import core
from pallas_kernels.core.pin import pin

TARGET = 0  # target noise, bonus tokens included; with verify="exact" also the draft's
ACCEPT = 1  # accept coin of draft j: lane j, word y0
RESIDUAL = 2
DRAFT = 3  # draft noise of "rejection" and "block", under the anchor key
DERIVE = 4  # keys
USER = 5
MAX_LANE = 2**28

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_LARGEST_UNIT = np.float32(1 - 2**-24)  # without it the top 128 words become 1 and E infinite


def _rounds(key0: Any, key1: Any, count0: Any, count1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds on uint32 arrays of NumPy or JAX."""
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = count0 + key0, count1 + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def threefry(
    key: UInt32[Array, "*#n 2"], count0: UInt32[Array, "*#n"], count1: UInt32[Array, "*#n"]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Returns the words (y0, y1) = F(key, (count0, count1)); shapes broadcast."""
    return _rounds(key[..., 0], key[..., 1], count0, count1)


def fresh_seed() -> int:
    """Returns 64 bits of the operating system's randomness, for requests that give no seed."""
    return secrets.randbits(64)


def seed_key(seed: int) -> np.ndarray:
    """Returns the key of a request, uint32 [2]: the high and the low word of its seed.

    Raises:
        ValueError: the seed is not in 0..2^64-1.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"a seed must be in 0..2^64-1, got {seed}")
    return np.asarray([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def child_seed(seed: int, child: int) -> int:
    """Returns the seed with which a lone request reproduces completion `child` of n."""
    if child == 0:
        return seed
    key = seed_key(seed)[:, None]
    counter = np.asarray([[child], [DERIVE * MAX_LANE]], np.uint32)
    high, low = _rounds(key[0], key[1], counter[0], counter[1])
    return int(high[0]) << 32 | int(low[0])


def _derive(key: Array, count: Array, lane: int) -> Array:
    second = jnp.full(count.shape, DERIVE * MAX_LANE + lane, jnp.uint32)
    return jnp.stack(threefry(key, count.astype(jnp.uint32), second), axis=-1)


def child_key(key: UInt32[Array, "b 2"], child: Int[Array, " b"]) -> UInt32[Array, "b 2"]:
    """Returns the key of completion `child` of each request; child 0 keeps the key."""
    return jnp.where(child[:, None] == 0, key, _derive(key, child, 0))


def anchor_key(key: UInt32[Array, "b 2"], anchor: Int[Array, " b"]) -> UInt32[Array, "b 2"]:
    """Returns the key of the draft noise of the round whose anchor token has index `anchor`."""
    return _derive(key, anchor, 1)


def random_words(
    key: UInt32[Array, "b 2"], index: Int[Array, " b"], lane: UInt32[Array, "#b n"], purpose: int
) -> tuple[UInt32[Array, "b n"], UInt32[Array, "b n"]]:
    """Returns (y0, y1) of every row's lanes, each lane below 2^28."""
    count1 = lane | np.uint32(purpose * MAX_LANE)
    return threefry(key[:, None, :], index.astype(jnp.uint32)[:, None], count1)


def unit_interval(words: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Returns v in (0, 1): the word plus a half, times 2^-32, rounded once, below 1."""
    high = (words >> np.uint32(16)).astype(jnp.float32) * np.float32(2**-16)
    low = (words & np.uint32(0xFFFF)).astype(jnp.float32) + np.float32(0.5)
    return jnp.minimum(high + low * np.float32(2**-32), _LARGEST_UNIT)


def exponential(unit: Float[Array, "b ..."]) -> Float[Array, "b ..."]:
    """Returns E = -log1p(-v), an exponential variate with full relative precision near 0."""
    return core.map_row_tiles(lambda v: pin(-jnp.log1p(-v)), unit)


def coins(
    key: UInt32[Array, "b 2"], index: Int[Array, "b n"], draft: Int[Array, "b n"]
) -> Float[Array, "b n"]:
    """Returns the accept coins u of drafts number `draft` (1, 2, ...), tokens at `index`."""
    count1 = draft.astype(jnp.uint32) | np.uint32(ACCEPT * MAX_LANE)
    word, _ = threefry(key[:, None, :], index.astype(jnp.uint32), count1)
    return unit_interval(word)


def token_noise(
    key: UInt32[Array, "b 2"], index: Int[Array, " b"], size: int, purpose: int = TARGET
) -> Float[Array, "b v"]:
    """Returns log E of every token id 0..size-1; the Gumbel variate of an id is its negative.

    Args:
        key: of each row's request, or its anchor key for `DRAFT`.
        index: position of the token that each row chooses.
        size: number of ids; an id's number does not depend on it.
        purpose: `TARGET`, `RESIDUAL` or `DRAFT`.
    """
    lane = jnp.arange((size + 1) // 2, dtype=jnp.uint32)[None, :]

    def body(key: Array, index: Array) -> Array:
        words = jnp.stack(random_words(key, index, lane, purpose), axis=-1)
        unit = unit_interval(words.reshape(words.shape[0], -1)[:, :size])
        return pin(jnp.log(exponential(unit)))

    return core.map_row_tiles(body, key, index)
