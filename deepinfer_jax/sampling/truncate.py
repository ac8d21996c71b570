"""Temperature and joint truncation: which tokens stay, and with which probability (engine.md 5.2).

One order serves all tests: logit descending, then lower id, which is the order of the exact
probabilities. A token stays iff rank < top_k, the mass before it <= top_p, and p >= min_p * p_max,
with the masses of the full post-temperature softmax; nothing is renormalised in between.

Masses are the integers floor(p * 2^31), so sums have no order and top_p = mass stays exactly. The
kept tokens are a prefix of the order. Its last logit is found digit by digit over the 32 bits of an
ordered key, ties at it are cut by id: no sort. Wide digits take fewer passes that do more work.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.sampling.edits import tile_rows
from deepinfer_jax.sampling.params import GREEDY_BELOW
from deepinfer_jax.sampling.rows import RowParams
from pallas_kernels import core

_UNIT = np.float32(2**31)
_NO_LIMIT = np.uint32(0xFFFFFFFF)
#: Bits of a digit: a CPU looks for one bit a pass, a GPU, which waits for passes, for more.
NARROW, WIDE = 1, 4


def is_greedy(temperature: Float[Array, " b"]) -> Bool[Array, " b"]:
    """Returns which rows take the highest logit."""
    return temperature < np.float32(GREEDY_BELOW)


def ordered_key(scores: Float[Array, "b v"]) -> Array:
    """Returns uint32 keys in the order of the scores; no NaN, and one zero, are assumed."""
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))


def highest(scores: Float[Array, "b v"]) -> Int[Array, " b"]:
    """Returns the id of the highest score of each row, the lowest id among equals."""
    return jnp.argmax(ordered_key(scores), axis=-1).astype(jnp.int32)


def scale_tile(scores: Array, temperature: Array) -> Array:
    """Returns (z - max) / T, which cannot overflow; greedy rows and rows of -inf use T = 1."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    divisor = jnp.where(is_greedy(temperature), np.float32(1), temperature)[:, None]
    return jnp.where(scores == -jnp.inf, -jnp.inf, (scores - top) / divisor)


def keep_tile(
    scores: Array,
    scaled: Array,
    top_p: Array,
    top_k: Array,
    min_p: Array,
    active: Array,
    digit: int = NARROW,
) -> Array:
    """Returns which tokens of a tile stay; nothing is computed if no active row truncates."""
    is_possible = scores > -jnp.inf
    count = jnp.where(top_k < 0, scores.shape[-1], top_k)
    limit = jnp.where(top_p >= 1, _NO_LIMIT, (top_p * _UNIT).astype(jnp.uint32))

    def test() -> Array:
        p = core.softmax(scaled)
        is_prefix = _prefix(
            ordered_key(scores), (p * _UNIT).astype(jnp.uint32), count, limit, digit
        )
        is_likely = p >= min_p[:, None] * jnp.max(p, axis=-1, keepdims=True)
        return is_prefix & is_likely & is_possible

    needed = active & ((top_k >= 0) | (top_p < 1) | (min_p > 0))
    return lax.cond(jnp.any(needed), test, lambda: is_possible)


def _prefix(key: Array, mass: Array, count: Array, limit: Array, digit: int) -> Array:
    """Returns the longest prefix of the order with rank < count and mass before <= limit."""

    def stays(is_before: Array) -> Array:
        """Whether tokens stay that have exactly these before them: [b, n, v] -> [b, n]."""
        masses = jnp.where(is_before, mass[:, None], np.uint32(0))
        total = jnp.sum(masses, axis=-1, dtype=jnp.uint32)
        rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
        return (rank < count[:, None]) & (total <= limit[:, None])

    # the lowest key whose first token stays
    rows = key.shape[0]
    threshold = _lowest(32, digit, rows, lambda probe: stays(key[:, None] > probe[:, :, None]))
    is_above = key > threshold
    # the first id that is cut although its key is the threshold; `token` counts down from the end
    token = np.uint32(key.shape[-1]) - jnp.arange(key.shape[-1], dtype=jnp.uint32)
    is_tie = key == threshold
    bits = key.shape[-1].bit_length()
    above, tie = is_above[:, None], is_tie[:, None]
    last = _lowest(
        bits, digit, rows, lambda probe: stays(above | tie & (token > probe[:, :, None]))
    )
    return (is_above | is_tie & (token >= last)) & (count > 0)[:, None]


def _lowest(bits: int, digit: int, rows: int, is_enough: Callable[[Array], Array]) -> Array:
    """Returns the lowest uint32 [rows, 1] at which a monotone test of each row holds.

    is_enough: candidates [rows, n] -> bool [rows, n]. digit: bits found at once, which divide 32.
    """
    steps = -(-bits // digit)
    digits = jnp.arange(1, 2**digit, dtype=jnp.uint32)

    def step(number: int | Array, lower: Array) -> Array:
        shift = np.uint32(digit) * (np.uint32(steps - 1) - jnp.asarray(number, jnp.uint32))
        is_low = is_enough(lower + (digits << shift) - np.uint32(1))
        found = jnp.sum(~is_low, axis=-1, keepdims=True, dtype=jnp.uint32)
        return lower + (found << shift)

    return lax.fori_loop(0, steps, step, jnp.zeros((rows, 1), jnp.uint32))


def truncation_mask(
    scores: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    top_p: Float[Array, " b"],
    top_k: Int[Array, " b"],
    min_p: Float[Array, " b"],
) -> Bool[Array, "b v"]:
    """Returns which tokens stay. Row-tiled.

    Args:
        scores: edited logits; -inf never stays.
        temperature: 0 counts as 1 here.
        top_p: above 0; 1 is off.
        top_k: negative is off; 0 keeps nothing (SamplingParams maps it to -1).
        min_p: 0 is off.
    """

    def body(scores: Array, temperature: Array, p: Array, k: Array, low: Array) -> Array:
        active = jnp.ones(scores.shape[:1], bool)
        return keep_tile(scores, scale_tile(scores, temperature), p, k, low, active)

    return core.map_row_tiles(body, scores, temperature, top_p, top_k, min_p)


def _survivors(scores: Array, rows: RowParams, digit: int = NARROW) -> tuple[Array, Array]:
    """Returns (scaled scores with -inf at removed tokens, whether a row is greedy) of a tile."""
    scaled = scale_tile(scores, rows.temperature)
    greedy = is_greedy(rows.temperature)
    kept = keep_tile(scores, scaled, rows.top_p, rows.top_k, rows.min_p, ~greedy, digit)
    return jnp.where(kept, scaled, -jnp.inf), greedy


def _with_greedy(scores: Array, greedy: Array, values: Array, one: float, zero: float) -> Array:
    """Replaces greedy rows by `one` at the highest score and `zero` elsewhere."""
    is_chosen = jnp.arange(scores.shape[-1]) == highest(scores)[:, None]
    is_chosen &= scores > -jnp.inf
    single = jnp.where(is_chosen, np.float32(one), np.float32(zero))
    return jnp.where(greedy[:, None], single, values)


def logprobs_tile(scores: Array, rows: RowParams, digit: int = NARROW) -> Array:
    """The body of `processed_logprobs` for one tile of rows."""
    greedy = is_greedy(rows.temperature)
    single = _with_greedy(scores, greedy, jnp.zeros_like(scores), 0.0, -np.inf)

    def sampled() -> Array:
        kept, _ = _survivors(scores, rows, digit)
        return jnp.where(greedy[:, None], single, core.log_softmax(kept))

    return lax.cond(jnp.all(greedy), lambda: single, sampled)


def processed_logprobs(scores: Float[Array, "b v"], rows: RowParams) -> Float[Array, "b v"]:
    """Returns log p of edited logits after temperature and truncation; removed tokens are -inf.

    Greedy rows put all probability on the highest logit. Rows of -inf stay -inf. Row-tiled.
    """
    return tile_rows(logprobs_tile, scores, rows)


def processed_probabilities(scores: Float[Array, "b v"], rows: RowParams) -> Float[Array, "b v"]:
    """Returns p of edited logits after temperature and truncation; removed tokens are 0.

    Greedy rows are one-hot. Rows of -inf are zero. Row-tiled.
    """

    def body(scores: Array, rows: RowParams) -> Array:
        kept, greedy = _survivors(scores, rows)
        return _with_greedy(scores, greedy, core.softmax(kept), 1.0, 0.0)

    return tile_rows(body, scores, rows)


def temperature_probabilities(
    logits: Float[Array, "b v"], temperature: Float[Array, " b"]
) -> Float[Array, "b v"]:
    """Returns softmax(z / T) of each row, one-hot at the highest logit for T = 0. Row-tiled."""

    def body(scores: Array, temperature: Array) -> Array:
        p = core.softmax(scale_tile(scores, temperature))
        return _with_greedy(scores, is_greedy(temperature), p, 1.0, 0.0)

    return core.map_row_tiles(body, logits, temperature)
