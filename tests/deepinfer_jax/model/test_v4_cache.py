"""DeepSeek-V4 cached against recomputed, bit for bit: chunks, other rows, poison, taken-back rows.

All programs share one cache layout of many slots and permuted blocks; a plan length compiles once.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.step import Plan, logits, plan_length, step
from deepinfer_jax.model.v4.state import init_cache_v4
from tests.golden.ledger import Fixture
from tests.golden.test_tiny_v4 import SCORE, TILE, config, params

LENGTHS = (1, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257)
LONGEST = LENGTHS[-1] + 12
BUCKETS = (72, 272)  # plan lengths: one program each
WHOLE = BUCKETS[-1]  # the program that recomputes
SLOTS = 66
LAYOUT = CacheLayout(num_slots=SLOTS, num_blocks=SLOTS + 5, max_blocks=3)
BLOCKS = {1: (1, 2, 3), 9: (70, 12, 69)}  # long sequences; slot s elsewhere has block s + 3


@cache
def prompt():
    return np.asarray(Fixture("tiny_v4/golden_f32").input("B.ids"))[:LONGEST]


@partial(jax.jit, donate_argnums=1)
def advance(params, state, plan):
    state, hidden, _ = step(params, config(), state, plan)
    return state, logits(params, config(), hidden)


def empty(slots, fill=0.0):
    """Returns a cache whose float leaves hold `fill`, with the blocks of some slots.

    It lies where the parameters are: one from elsewhere would compile again.
    """
    state = init_cache_v4(config(), LAYOUT)
    state = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, fill) if leaf.dtype == jnp.float32 else leaf, state
    )
    table = np.zeros(state.block_table.shape, np.int32)
    for slot in slots:
        table[slot] = BLOCKS.get(slot, (slot + 3, 0, 0))
    state = replace(state, block_table=jnp.asarray(table))
    return jax.device_put(state, params().embed.sharding)


def run(state, rows, length=None):
    """Returns (state, logits) after rows of (id, position, slot), in a plan of `length` rows."""
    count = len(rows)
    length = length or next(size for size in BUCKETS if size >= count)
    columns = np.zeros((3, length), np.int32)
    columns[:, :count] = np.asarray(rows, np.int32).T
    state, got = advance(params(), state, Plan(*map(jnp.asarray, columns), jnp.int32(count)))
    return state, np.asarray(got)[:count]


def sequence(ids, start=0, slot=1):
    return [(token, start + i, slot) for i, token in enumerate(ids)]


def recomputed(count):
    """Returns the logits of a prefix, computed at once from an empty cache."""
    return run(empty([1]), sequence(prompt()[:count]), WHOLE)[1]


@cache
def reference():
    return recomputed(LONGEST)


def chunked(edges, *, tight=False):
    """Returns the logits of the prompt, processed in chunks that end at `edges`.

    In a poisoned cache. tight: plans of no more tiles than a chunk needs, so more programs.
    """
    state, found = empty([9], np.nan), []
    for start, stop in zip([0, *edges], edges, strict=False):
        rows = sequence(prompt()[start:stop], start, 9)
        length = plan_length(len(rows), TILE) if tight else None
        state, got = run(state, rows, length)
        found.append(got)
    return np.concatenate(found)


def steps(size, count):
    return [*range(size, count, size), count]


def same(got, want):
    differing = (got.view(np.uint32) != want.view(np.uint32)).any(axis=-1)
    assert not differing.any(), f"rows {np.flatnonzero(differing)[:10]} of {len(got)} differ"


@pytest.mark.accept(3)
@pytest.mark.parametrize("count", LENGTHS)
def test_recomputed_prefix(count):
    same(recomputed(count), reference()[:count])


@pytest.mark.accept(3)
@pytest.mark.parametrize("size", [1, 3, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_chunks_equal_recomputation(size):
    """In another slot, in permuted blocks of a poisoned cache; the rows cover every length."""
    same(chunked(steps(size, LONGEST)), reference())


@pytest.mark.accept(3)
@pytest.mark.parametrize("first", [3, 7])
def test_full_tiles_that_begin_with_a_closing_row(first):
    """Such a tile writes seven rows ahead of the oldest row it pools: the tails' capacity."""
    same(chunked([*range(first, LONGEST, 8), LONGEST]), reference())


@pytest.mark.accept(3)
@pytest.mark.parametrize("count", LENGTHS)
def test_prefill_then_decode(count):
    """The prompt at once, then twelve tokens one by one."""
    stop = count + 12
    same(chunked([count, *range(count + 1, stop + 1)]), reference()[:stop])


@pytest.mark.accept(3)
def test_ragged_chunks():
    generator, edges = np.random.default_rng(7), [0]
    while edges[-1] < LONGEST:
        edges.append(min(LONGEST, edges[-1] + int(generator.integers(1, 14))))
    same(chunked(edges[1:]), reference())


@pytest.mark.accept(3)
@pytest.mark.parametrize("fill", [np.nan, np.inf, 1e30])
def test_unused_cache_may_hold_anything(fill):
    same(run(empty([1], fill), sequence(prompt()), WHOLE)[1], reference())


@pytest.mark.accept(3)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 65])
def test_rows_of_other_sequences_change_nothing(rows):
    """`rows` sequences advance one token a step, at different positions; each alone is the rule."""
    slots = list(range(1, rows + 1))
    ids = {slot: np.roll(prompt(), -3 * slot) for slot in slots}
    held = {slot: slot % 7 for slot in slots}
    state = empty(slots, np.nan)
    for slot in slots:
        if held[slot]:
            state, _ = run(state, sequence(ids[slot][: held[slot]], 0, slot))
    found = []
    for turn in range(3):
        batch = [(ids[slot][held[slot] + turn], held[slot] + turn, slot) for slot in slots]
        state, got = run(state, batch)
        found.append(got)
    for place, slot in list(enumerate(slots))[:: max(1, rows // 8)]:
        alone = run(empty([1]), sequence(ids[slot][: held[slot] + 3]))[1][held[slot] :]
        same(np.stack([got[place] for got in found]), alone)


@pytest.mark.accept(3)
def test_prefill_and_decode_rows_in_one_step():
    """A decode row of one sequence stands between the prefill rows of another."""
    state, _ = run(empty([1, 9], np.nan), sequence(prompt()[:130], 0, 9))
    mine, other = sequence(prompt()[:12], 0, 1), sequence(prompt()[130:133], 130, 9)
    mixed = [*mine[:5], other[0], *mine[5:9], *other[1:], *mine[9:]]
    state, got = run(state, mixed)
    assert state.length[jnp.asarray([1, 9])].tolist() == [12, 133]
    order = np.asarray([slot for _, _, slot in mixed])
    same(got[order == 1], reference()[:12])
    same(got[order == 9], reference()[130:133])


@pytest.mark.accept(3)
@pytest.mark.parametrize("kept", [5, 8, 126, 127, 130])
def test_rows_taken_back(kept):
    """Up to `rollback` rows may be written and then overwritten by others."""
    wrong = [(int(t) ^ 1, kept + i, 9) for i, t in enumerate(prompt()[kept : kept + 6])]
    state, _ = run(empty([9], np.nan), sequence(prompt()[:kept], 0, 9))
    state, _ = run(state, wrong)
    _, got = run(state, sequence(prompt()[kept : kept + 9], kept, 9))
    same(got, reference()[kept : kept + 9])


@pytest.mark.slow
@pytest.mark.accept(3)
@pytest.mark.parametrize("count", LENGTHS)
def test_score_equals_cached(count):
    ids = jnp.asarray(prompt()[:count])
    same(np.asarray(SCORE(params(), config(), ids)), reference()[:count])


@pytest.mark.slow
@pytest.mark.accept(3)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 64])
@pytest.mark.parametrize("count", LENGTHS)
def test_chunked_prefill_then_decode(count, size):
    stop = count + 12
    edges = [*steps(size, count), *range(count + 1, stop + 1)]
    same(chunked(edges, tight=True), reference()[:stop])


@pytest.mark.slow
@pytest.mark.accept(3)
@pytest.mark.parametrize("count", range(1, 81))
def test_every_length_up_to_80(count):
    for size in (1, 16):
        edges = [*steps(size, count), *range(count + 1, count + 13)]
        same(chunked(edges), reference()[: count + 12])


@pytest.mark.accept(3)
def test_other_arithmetic_raises():
    rounded = replace(config(), execution=replace(config().execution, numerics="checkpoint"))
    with pytest.raises(ConfigError, match="float32"):
        init_cache_v4(rounded, LAYOUT)
    plan = Plan(*jnp.zeros((3, 16), jnp.int32), 1)
    with pytest.raises(ConfigError, match="no vectors of V4's own rounding points"):
        step(params(), rounded, empty([1]), plan)


@pytest.mark.accept(3)
def test_blocks_hold_whole_groups():
    with pytest.raises(ConfigError, match="multiple of 128"):
        init_cache_v4(config(), replace(LAYOUT, block_tokens=64))


@pytest.mark.accept(3)
def test_sizes_of_the_leaves():
    """model.md 10.5, with eight rows a tile in place of R."""
    state = init_cache_v4(config(), LAYOUT)
    assert [leaf.shape for leaf in state.tail] == [(2, SLOTS, 15, 2, 128), (2, SLOTS, 135, 2, 64)]
    assert state.index_tail.shape == (2, SLOTS, 15, 2, 64)
    assert [leaf.shape for leaf in state.main] == [(2, 71, 32, 64), (2, 71, 1, 64)]
    assert state.index_keys.shape == (2, 71, 32, 32)
    assert state.window.shape == (SLOTS, 6, 16, 64)
