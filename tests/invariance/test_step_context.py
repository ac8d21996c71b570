"""A row's bits depend on its own sequence only: company, slot, pages, chunking, unused cache.

The reference is one pass over the whole sequence, alone (`tests.golden.tiny`).
"""

from functools import lru_cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.registry import single_sequence
from deepinfer_jax.model.state import CacheLayout, init_cache
from deepinfer_jax.model.step import Plan, sequence_plan, step
from tests.golden.network import TILE, tiny_config, tiny_params
from tests.golden.tiny import run_prompt
from tests.invariance.checker import PROMPT, differing

#: Three sequences of unequal length: slices of prompt C.
SEQUENCES = {1: PROMPT[:41], 2: PROMPT[50:61], 3: PROMPT[100:137]}
NUMERICS = ("float32", "checkpoint")
STEP_ROWS = 48
pytestmark = pytest.mark.accept(2)


@lru_cache(maxsize=4)
def alone(numerics, slot):
    """Final hidden rows of one sequence."""
    return run_prompt(SEQUENCES[slot], numerics).normed


@lru_cache(maxsize=2)
def program(numerics):
    """One compiled step; the state's shapes decide whether it is compiled again."""
    return jax.jit(partial(_step, tiny_config(numerics)))


def _step(config, params, state, plan):
    return step(params, config, state, plan)[:2]


def plan_of(rows, length):
    """Returns a plan of (slot, position) rows, padded to `length` with garbage that is invalid."""
    slots = np.array([slot for slot, _ in rows], np.int32)
    positions = np.array([position for _, position in rows], np.int32)
    ids = np.array([SEQUENCES[slot][position] for slot, position in rows], np.int32)
    padding = (0, length - len(rows))
    return Plan(
        ids=jnp.asarray(np.pad(ids, padding, constant_values=7)),
        position=jnp.asarray(np.pad(positions, padding, constant_values=3)),
        slot=jnp.asarray(np.pad(slots, padding, constant_values=1)),
        count=jnp.int32(len(rows)),
    )


def poisoned(state):
    """Returns the state with NaN (as bytes: 0xFF) or garbage wherever nothing was written."""

    def poison(leaf):
        if leaf.dtype == jnp.uint8:
            return jnp.full_like(leaf, 0xFF)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.full_like(leaf, jnp.nan)
        return leaf

    rows = jax.tree.map(poison, state.replace(block_table=None, length=None, engram_ids=None))
    return rows.replace(
        block_table=state.block_table,
        length=state.length,
        engram_ids=jnp.full_like(state.engram_ids, 77),
    )


def three_slots(numerics):
    """Returns a poisoned cache of three sequences whose pages lie out of order."""
    config = tiny_config(numerics)
    layout = CacheLayout(num_slots=4, num_blocks=10, max_blocks=3, block_tokens=16)
    state = poisoned(init_cache(config, layout))
    table = np.zeros((4, 3), np.int32)
    table[1], table[2], table[3] = (9, 2, 5), (1, 0, 0), (4, 8, 3)
    return state.replace(block_table=jnp.asarray(table))


def interleaved(seed):
    """Returns all rows of the sequences in a random order that keeps each ascending."""
    owners = np.concatenate([np.full(len(ids), slot) for slot, ids in SEQUENCES.items()])
    order = np.random.default_rng(seed).permutation(owners)
    following = dict.fromkeys(SEQUENCES, 0)
    rows = []
    for slot in order:
        rows.append((int(slot), following[int(slot)]))
        following[int(slot)] += 1
    return rows


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("seed", [0, 1])
def test_company_slot_and_pages_do_not_matter(numerics, seed):
    rows, state = interleaved(seed), three_slots(numerics)
    found = {slot: np.zeros_like(alone(numerics, slot)) for slot in SEQUENCES}
    cuts = (0, 30, 37, 38, 86, len(rows))  # prefill, mixtures and single rows
    for start, stop in pairwise(cuts):
        part = rows[start:stop]
        plan = plan_of(part, STEP_ROWS)
        state, hidden = program(numerics)(tiny_params(numerics), state, plan)
        for row, (slot, position) in zip(np.asarray(hidden), part, strict=False):
            found[slot][position] = row
    report = [
        line
        for slot in SEQUENCES
        for line in differing(f"sequence {slot}", found[slot], alone(numerics, slot))
    ]
    assert report == []


@pytest.mark.accept(3)
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_give_the_bits_of_one_pass_and_unused_cache_is_never_read(numerics, chunk):
    ids, found = SEQUENCES[1], []
    state = poisoned(single_sequence(tiny_config(numerics), 64, row_tile=TILE, block_tokens=32))
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        plan = sequence_plan(jnp.asarray(np.pad(part, (0, 16 - len(part)))), TILE, start=start)
        plan = plan.replace(count=jnp.int32(len(part)))
        state, hidden = program(numerics)(tiny_params(numerics), state, plan)
        found.append(np.asarray(hidden)[: len(part)])
    assert differing(f"chunks of {chunk}", np.concatenate(found), alone(numerics, 1)) == []


def test_checker_notices_two_sequences_that_share_pages():
    rows, state = interleaved(0)[:STEP_ROWS], three_slots("float32")
    table = np.asarray(state.block_table).copy()
    table[3] = table[1]
    state = state.replace(block_table=jnp.asarray(table))
    plan = plan_of(rows, STEP_ROWS)
    _, hidden = program("float32")(tiny_params(), state, plan)
    report = []
    for slot in (1, 3):
        picked = [row for row, (owner, _) in enumerate(rows) if owner == slot]
        want = alone("float32", slot)[: len(picked)]
        report += differing(f"sequence {slot}", np.asarray(hidden)[picked], want)
    assert report != []
