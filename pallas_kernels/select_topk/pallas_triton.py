"""Selection as Pallas-Triton kernels: the k-th largest key is found by counting, nothing is sorted.

Scores become integers of the same order. The k-th largest lies between two bounds, first the
largest key and the least of the largest keys of k groups; the bounds are halved by counting how
many keys reach the middle, until they meet or the middle has exactly k above it. One pass then
emits every key above the threshold and the first ones equal to it; their places are running sums,
so ids come out ascending. Counts are integers: no cut of a row can change them.

A long row is split over programs that each keep their own k best; a second kernel selects among
the kept ids with the same body. What the whole row keeps, its tile keeps too.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.select_topk.configs import SelectConfig

_FILL = 4096  # places a store of -1 covers
_HALF = 16  # two running counts share an integer


@dataclass(frozen=True)
class _Format:
    """Scores of one dtype as signed integers."""

    bits: int

    @property
    def lowest(self) -> int:
        """Key of what may not be chosen, below that of -inf."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """Key of what must be chosen, above that of +inf."""
        return (1 << (self.bits - 1)) - 1

    @property
    def infinity(self) -> int:
        """Key and bit pattern of +inf; the key of -inf is its complement."""
        return 0xFF << (self.bits - 9)

    def key(self, scores: jax.Array, blocks: bool) -> jax.Array:
        """Returns int32 keys of the order of core.top_k; ``blocks``: that of core.select_blocks."""
        integer = jnp.int16 if self.bits == 16 else jnp.int32
        pattern = lax.bitcast_convert_type(scores, integer).astype(jnp.int32)
        magnitude = pattern & np.int32(self.highest)
        # below zero a larger magnitude is a lower key
        key = jnp.where(pattern < 0, ~magnitude, magnitude)
        # exponent 0: zeros of both signs and subnormals are equal
        key = jnp.where(magnitude < np.int32(1 << (self.bits - 9)), np.int32(0), key)
        key = jnp.where(magnitude > np.int32(self.infinity), np.int32(~self.infinity), key)
        if not blocks:
            return jnp.where(key == np.int32(~self.infinity), np.int32(self.lowest), key)
        if self.bits == 32:
            # the clamp of core: infinities tie with the largest finite float32 values
            key = jnp.clip(key, np.int32(~self.infinity + 1), np.int32(self.infinity - 1))
        return key


@dataclass(frozen=True)
class _Launch:
    """Static facts of a launch.

    Attributes:
        format: of the scores.
        k: entries a program keeps.
        entries: of a row: ids of a list, or scores.
        span: entries of a program.
        chunk: entries counted at once, a power of two.
        part: entries emitted at once, a power of two: emitting takes more registers.
        listed: entries are ids, ascending or -1, of scores.
        blocks: scores are block maxima: the last visible one must be chosen, and the result is
            one byte an entry instead of ids.
    """

    format: _Format
    k: int
    entries: int
    span: int
    chunk: int
    part: int
    listed: bool
    blocks: bool


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _ones(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.int32)


@dataclass(frozen=True)
class _Row:
    """The entries that one program sees, read chunk by chunk.

    Attributes:
        launch: static facts.
        scores: reference to the row's scores.
        ids: reference to the row's list, or None.
        count: visible scores of the row.
        first: the program's first entry.
    """

    launch: _Launch
    scores: Any
    ids: Any
    count: jax.Array
    first: jax.Array

    def chunk(self, c: Any, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (place in the row, id, key) of chunk c of some width, each int32 [width]."""
        launch = self.launch
        inside = c * width + jnp.arange(width, dtype=jnp.int32)
        place = ids = self.first + inside
        visible = (inside < launch.span) & (place < launch.entries)
        if launch.listed:
            ids = plt.load(self.ids.at[place], mask=visible, other=-1)
            visible = ids >= 0
        visible = visible & (ids < self.count)
        score = plt.load(self.scores.at[ids], mask=visible, other=0.0)
        key = launch.format.key(score, launch.blocks)
        if launch.blocks:
            key = jnp.where(ids == self.count - 1, np.int32(launch.format.highest), key)
        return place, ids, jnp.where(visible, key, np.int32(launch.format.lowest))

    def chunks(self, width: int) -> Any:
        """Returns how many chunks there are with a visible entry; all of a list."""
        launch = self.launch
        if launch.listed:
            return -(-launch.span // width)
        return (jnp.clip(self.left, 0, launch.span) + (width - 1)) // width

    @property
    def left(self) -> jax.Array:
        """Returns how many visible entries of the row start at this program's first."""
        return self.count - self.first


def _bounds(row: _Row, held: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns int32 (low, high, above): where the k-th largest key lies; above keys exceed high.

    At least k keys reach low, or it is the lowest key. held: the row's keys, or None.
    """
    launch, above = row.launch, jnp.int32(0)
    groups = _power(launch.k)
    lowest, highest = np.int32(launch.format.lowest), np.int32(launch.format.highest)
    if held is None:
        return jnp.int32(lowest), jnp.int32(highest), above
    if launch.blocks and launch.k > 1:
        # the block that must be chosen is far above all others and would make the range wide
        held, above = jnp.where(held == highest, lowest, held), _ones(row.count > 0)
    if 2 * groups > launch.chunk:
        return jnp.int32(lowest), jnp.max(held), above
    # each of at least k groups has a key that reaches the least of their largest
    best = jnp.max(held.reshape(groups, launch.chunk // groups), axis=1)
    return jnp.min(best), jnp.max(best), above


def _body(*refs: Any, launch: _Launch) -> None:
    scores_ref, count_ref, *ids_ref, out_ref = refs
    first = pl.program_id(1) * launch.span
    row = _Row(launch, scores_ref, ids_ref[0] if ids_ref else None, count_ref[...], first)
    lowest, k = np.int32(launch.format.lowest), np.int32(launch.k)
    # what fits stays in registers; what does not is read again in every pass
    held = row.chunk(0, launch.chunk) if launch.span <= launch.chunk else None

    def count(test: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns how many keys pass a test."""
        if held is not None:
            return jnp.sum(_ones(test(held[2])))

        def add(c: jax.Array, total: jax.Array) -> jax.Array:
            return total + jnp.sum(_ones(test(row.chunk(c, launch.chunk)[2])))

        return lax.fori_loop(0, row.chunks(launch.chunk), add, jnp.int32(0))

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above = state
        middle = (low | high) - ((low ^ high) >> 1)  # half of the sum, rounded up, no overflow
        found = count(lambda key: key >= middle)
        more, exact = found > k, found == k
        low = jnp.where(more, middle, jnp.where(exact, middle - 1, low))
        return low, jnp.where(more, high, middle - 1), jnp.where(more, above, found)

    low, high, above = _bounds(row, None if held is None else held[2])
    if not launch.listed:
        # at most k visible entries: one pass counts those above the lowest key
        few = row.left <= launch.k
        low, high = jnp.where(few, lowest, low), jnp.where(few, lowest + np.int32(1), high)
    threshold, _, above = lax.while_loop(lambda s: s[0] < s[1], halve, (low, high, above))
    need = k - above

    fits = held if launch.part == launch.chunk else None

    def emit(c: Any, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, ids, key = fits or row.chunk(c, launch.part)
        over = key > threshold
        equal = (key == threshold) & (threshold > lowest)
        both = _ones(over) + (_ones(equal) << _HALF)
        running = jnp.cumsum(both)
        over_before = before[0] + (running & 0xFFFF) - _ones(over)
        equal_before = before[1] + (running >> _HALF) - _ones(equal)
        chosen = over | (equal & (equal_before < need))
        if launch.blocks:
            plt.store(
                out_ref.at[place], _ones(chosen).astype(jnp.int8), mask=place < launch.entries
            )
        else:
            # places that are not written point outside: the interpreter would write them back
            target = jnp.where(chosen, over_before + jnp.minimum(equal_before, need), launch.k)
            plt.store(out_ref.at[target], ids, mask=chosen)
        total = jnp.sum(both)
        return before[0] + (total & 0xFFFF), before[1] + (total >> _HALF)

    if not launch.blocks:
        # above the lowest key there are at least k where the threshold is higher
        total, width = jnp.where(threshold > lowest, k, above), min(_power(launch.k), _FILL)
        for start in range(0, launch.k, width):
            place = start + jnp.arange(width, dtype=jnp.int32)
            empty = (place >= total) & (place < launch.k)
            plt.store(out_ref.at[place], jnp.full((width,), -1, jnp.int32), mask=empty)
    nothing = jnp.int32(0), jnp.int32(0)
    if fits is not None:
        emit(0, nothing)
    else:
        every = -(-launch.span // launch.part) if launch.blocks else row.chunks(launch.part)
        lax.fori_loop(0, every, emit, nothing)


@dataclass(frozen=True)
class Selection:
    """The two operations on arrays.

    Attributes:
        config: launch parameters.
        interpret: run by the plain Pallas interpreter on CPU.
    """

    config: SelectConfig
    interpret: bool

    def topk(self, scores: jax.Array, count: jax.Array, k: int) -> jax.Array:
        """Returns ids int32 [m, k] of scores [m, n] with ``count`` int32 [m] visible ones."""
        config, ids = self.config, None
        entries = scores.shape[1]
        while entries > config.most and k * config.reduction <= config.tile:
            ids = self._run(scores, count, ids, min(k, config.tile), config.tile)
            entries = ids.shape[1]
        return self._run(scores, count, ids, k, entries)

    def blocks(self, maxima: jax.Array, count: jax.Array, k: int) -> jax.Array:
        """Returns which of [m, n] block maxima are kept, bool; ``count`` int32 [m] are visible."""
        return self._run(maxima, count, None, k, maxima.shape[1], blocks=True) != 0

    def _run(
        self,
        scores: jax.Array,
        count: jax.Array,
        ids: jax.Array | None,
        k: int,
        span: int,
        blocks: bool = False,
    ) -> jax.Array:
        """Returns one kernel's result: ids int32 [m, tiles * k], or int8 [m, n]."""
        rows, size = scores.shape
        entries = size if ids is None else ids.shape[1]
        listed, tiles = ids is not None, -(-entries // span)
        whole_row = span <= self.config.most
        chunk = _power(span) if whole_row else self.config.chunk
        part = chunk if whole_row and not listed else min(chunk, self.config.part)
        launch = _Launch(
            _Format(8 * scores.dtype.itemsize), k, entries, span, chunk, part, listed, blocks
        )
        whole = pl.BlockSpec((None, size), lambda i, j: (i, 0))
        if blocks:
            out, out_spec = jax.ShapeDtypeStruct((rows, size), jnp.int8), whole
        else:
            out = jax.ShapeDtypeStruct((rows, tiles, k), jnp.int32)
            out_spec = pl.BlockSpec((None, None, k), lambda i, j: (i, j, 0))
        warps = min(max(chunk // self.config.lanes, 4), self.config.most_warps)
        listing = [pl.BlockSpec((None, entries), lambda i, j: (i, 0))] if listed else []
        stage = "blocks" if blocks else "merge" if listed else "topk"
        found = pl.pallas_call(
            functools.partial(_body, launch=launch),
            out_shape=out,
            grid=(rows, tiles),
            in_specs=[whole, pl.BlockSpec((None,), lambda i, j: (i,)), *listing],
            out_specs=out_spec,
            interpret=self.interpret,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
            name=f"select_topk_{stage}",
        )(scores, count, *([ids] if listed else []))
        return found.reshape(rows, -1)


def build(config: SelectConfig, *, interpret: bool = False) -> Selection:
    """Returns the kernels for a configuration."""
    return Selection(config, interpret)
