"""Cached forms: prefill in any chunks, then decode, has the bits of one-shot prefill (A9)."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.loading import load
from tests.golden.network import TINY

LENGTH = 92  # longest prompt 80 and twelve decoded tokens
PLAN = 96  # one plan length: one program for every chunking
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80)
RUNTIME = RuntimeConfig(max_seqs=3, max_len=128)


@cache
def setting(numerics):
    model = load(TINY, numerics=numerics)
    generator = np.random.default_rng(5)
    ids = generator.integers(3, 500, LENGTH).astype(np.int32)
    return model, ids


def fresh(numerics):
    """An empty state where the parameters are: one from elsewhere would compile again."""
    model, _ = setting(numerics)
    return jax.device_put(di.init_state(model.config, RUNTIME), model.params.embed.sharding)


@cache
def one_shot(numerics):
    model, ids = setting(numerics)
    state = fresh(numerics)
    rows = np.arange(LENGTH)
    plan = di.make_plan(model.config, ids, rows, np.full(LENGTH, 1), length=PLAN)
    _, out = di.prefill(model.params, model.config, state, plan)
    return bits(out.logits[:LENGTH])


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32)


def run(numerics, cuts, *, state=None, slot=2):
    """Logit bits of all tokens, computed in calls of the given lengths."""
    model, ids = setting(numerics)
    state = fresh(numerics) if state is None else state
    found, start = [], 0
    for count in cuts:
        rows = np.arange(start, start + count)
        plan = di.make_plan(model.config, ids[rows], rows, np.full(count, slot), length=PLAN)
        state, out = di.prefill(model.params, model.config, state, plan)
        found.append(bits(out.logits[:count]))
        start += count
    return np.concatenate(found)


def cuts_of(prompt, chunk):
    """A prompt in chunks, then twelve single tokens."""
    whole, rest = divmod(prompt, chunk)
    return [chunk] * whole + [rest] * (rest > 0) + [1] * 12


def check(numerics, prompt, chunk):
    found = run(numerics, cuts_of(prompt, chunk))
    expected = one_shot(numerics)[: len(found)]
    differing = np.unique((found != expected).nonzero()[0])
    assert not differing.size, f"prompt {prompt}, chunks of {chunk}: rows {differing[:10]} differ"


BOTH = pytest.mark.parametrize("numerics", ["float32", "checkpoint"])


@BOTH
@pytest.mark.parametrize("prompt", [1, 8, 9, 33])
def test_prefill_then_decode_equals_one_shot(prompt, numerics):
    for chunk in (prompt, 3):
        check(numerics, prompt, chunk)


# Every number of rows is a program: one row, a whole tile, one row more, many tiles and one row.
@pytest.mark.parametrize(
    ("numerics", "counts"), [("float32", (9, LENGTH)), ("checkpoint", (1, 65))]
)
def test_score_equals_prefill(numerics, counts):
    model, ids = setting(numerics)
    score = jax.jit(di.score, static_argnums=1)
    for count in counts:
        found = bits(score(model.params, model.config, ids[:count]))
        np.testing.assert_array_equal(found, one_shot(numerics)[:count])


@BOTH
def test_verify_rows_equal_decoded_rows_and_rejected_rows_are_overwritten(numerics):
    model, ids = setting(numerics)
    state, at, found = fresh(numerics), 0, {}
    wrong = np.full(LENGTH, 77, np.int32)
    generator = np.random.default_rng(0)
    while at < 60:
        accepted = min(int(generator.integers(1, 7)), LENGTH - at)
        rows = np.arange(at, min(at + 6, LENGTH))
        drafts = np.where(rows < at + accepted, ids[rows], wrong[rows])
        plan = di.make_plan(model.config, drafts, rows, np.full(len(rows), 1), length=PLAN)
        state, out = di.verify(model.params, model.config, state, plan)
        for row, value in zip(rows[:accepted], bits(out.logits), strict=False):
            found[int(row)] = value
        at += accepted
    for row, value in found.items():
        np.testing.assert_array_equal(value, one_shot(numerics)[row], err_msg=f"row {row}")


@BOTH
def test_poisoned_unused_cache_changes_nothing(numerics):
    state = fresh(numerics)

    def poison(leaf):
        if leaf.dtype == jnp.int32:  # lengths, limits and block table are in use
            return leaf
        return jnp.full_like(leaf, jnp.nan if leaf.dtype == jnp.float32 else 255)

    poisoned = jax.tree.map(poison, state)
    poisoned = replace(poisoned, engram_ids=jnp.full_like(state.engram_ids, 400))
    np.testing.assert_array_equal(run(numerics, [9, 1, 30, 52], state=poisoned), one_shot(numerics))


@BOTH
def test_neighbours_slots_and_row_order_change_nothing(numerics):
    model, ids = setting(numerics)
    lengths = {1: 40, 2: 17, 3: 92}
    starts = {1: 3, 2: 30, 3: 0}  # neighbours use other parts of the text
    rows = [(slot, p) for p in range(92) for slot in (3, 1, 2) if p < lengths[slot]]
    state, found = fresh(numerics), {}
    for begin in range(0, len(rows), 29):
        part = rows[begin : begin + 29]
        slot = np.array([s for s, _ in part])
        position = np.array([p for _, p in part])
        tokens = np.array([ids[(starts[s] + p) % LENGTH] for s, p in part])
        plan = di.make_plan(model.config, tokens, position, slot, length=PLAN)
        state, out = di.prefill(model.params, model.config, state, plan)
        found |= dict(zip(part, bits(out.logits), strict=False))
    mine = np.stack([found[3, p] for p in range(LENGTH)])
    np.testing.assert_array_equal(mine, one_shot(numerics))
    assert [int(n) for n in state.length] == [0, 40, 17, 92]


def test_plan_length_and_logit_rows_change_nothing():
    model, ids = setting("float32")
    rows = np.arange(20)
    for length in (24, 48):
        state = fresh("float32")
        plan = di.make_plan(
            model.config, ids[:20], rows, np.full(20, 1), length=length, rows=[19, 3, 3]
        )
        _, out = di.prefill(model.params, model.config, state, plan)
        np.testing.assert_array_equal(bits(out.logits), one_shot("float32")[[19, 3, 3]])


def test_vmap_over_states_keeps_bits():
    model, ids = setting("float32")
    states = jax.tree.map(lambda a: jnp.stack([a, a]), fresh("float32"))
    plans = [
        di.make_plan(model.config, ids[s : s + 9], np.arange(9), np.full(9, 1), length=PLAN)
        for s in (0, 30)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plans)
    mapped = jax.vmap(lambda s, p: di.prefill(model.params, model.config, s, p)[1].logits)
    together = mapped(states, stacked)
    for number, plan in enumerate(plans):
        state = fresh("float32")
        _, out = di.prefill(model.params, model.config, state, plan)
        np.testing.assert_array_equal(bits(together[number][:9]), bits(out.logits[:9]))


def test_the_checker_notices_rows_run_at_once(monkeypatch):
    """Positive control: without row tiles the same comparison fails."""
    model, ids = setting("float32")
    stock = replace(model.config, execution=replace(model.config.execution, determinism="off"))
    score = jax.jit(di.score, static_argnums=1)
    whole = bits(score(model.params, stock, ids))
    part = bits(score(model.params, stock, ids[:9]))
    assert (whole[:9] != part).any()


@pytest.mark.slow
@pytest.mark.accept(3)
@pytest.mark.parametrize(
    ("numerics", "counts"), [("float32", (1, 8, 65)), ("checkpoint", (8, 9, LENGTH))]
)
def test_score_equals_prefill_at_the_other_lengths(numerics, counts):
    test_score_equals_prefill(numerics, counts)


@pytest.mark.slow
@pytest.mark.accept(3)
@BOTH
@pytest.mark.parametrize("chunk", [1, 16])
def test_every_prompt_length(chunk, numerics):
    for prompt in range(1, 81):
        check(numerics, prompt, chunk)


@pytest.mark.slow
@pytest.mark.accept(3)
@BOTH
@pytest.mark.parametrize("chunk", [2, 3, 5, 7, 64])
def test_edge_lengths(chunk, numerics):
    for prompt in EDGES:
        check(numerics, prompt, chunk)
