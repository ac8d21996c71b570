"""Totals of verified rows against brute force, and what no curve may change."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.speculative.budget import (
    Budget,
    best_total,
    complete_survival,
)
from deepinfer_jax.speculative.cost import Corrections, StepCost
from deepinfer_jax.speculative.schedule import verify_lengths

MANY = 10_000  # a capacity that never binds


def curve(seconds):
    """A cost from the seconds of 0, 1, 2, ... rows."""
    return lambda rows: np.asarray(seconds, np.float64)[rows]


def staircase(draw, size, *, may_fall=False):
    """Seconds of 0..size-1 rows: steps of random width and height."""
    starts = draw.random(size) < draw.uniform(0.02, 0.9)
    heights = draw.exponential(1.0, size) - (0.5 if may_fall else 0.0)
    return np.maximum(draw.uniform(0.1, 5) + np.cumsum(starts * heights), 0.05)


def survivals(draw, sequences, drafts):
    """Decreasing survivals with some zeros, ones, equal ones and NaNs."""
    confidence = draw.random((sequences, drafts)).astype(np.float32) ** draw.uniform(0.1, 2)
    special = draw.choice([0.0, 0.5, 1.0, np.nan], confidence.shape).astype(np.float32)
    confidence = np.where(draw.random(confidence.shape) < 0.2, special, confidence)
    return np.cumprod(confidence, axis=1, dtype=np.float32)


def brute_force(survival, cost, *, capacity, prompt_rows, budget, draft_seconds):
    """The search of engine.md 3.6, entry by entry; rows of prompts count as tokens."""
    sequences = len(survival)
    rates = sorted((0.0 if np.isnan(s) else float(s) for s in survival.flat), reverse=True)

    def prompts(total):
        return max(0, min(prompt_rows, budget - total))

    def seconds(total):
        return float(cost(np.asarray([total + prompts(total)]))[0])

    tokens, total, best = float(sequences), sequences, None
    for rate in [None, *rates]:
        if rate is not None:
            tokens, total = tokens + rate, total + 1
            if total > capacity:
                break
        throughput = (tokens + prompts(total)) / (seconds(total) + draft_seconds)
        if best is None or throughput > best[0]:
            best = throughput, total, tokens
    assert best is not None
    plain = (sequences + prompts(sequences)) / seconds(sequences)
    return best[1], best[2], best[0] > plain, best[1] + prompts(best[1])


@pytest.mark.parametrize("may_fall", [False, True])
def test_equals_brute_force_on_random_staircases(may_fall):
    draw = np.random.default_rng(17)
    inner = 0
    for _ in range(300):
        sequences, drafts = int(draw.integers(1, 12)), int(draw.integers(0, 7))
        survival = survivals(draw, sequences, drafts)
        cost = curve(staircase(draw, 200, may_fall=may_fall))
        options = {
            "capacity": int(draw.integers(1, 120)),
            "prompt_rows": int(draw.integers(0, 30)) * int(draw.integers(0, 2)),
            "budget": int(draw.integers(0, 100)),
            "draft_seconds": float(draw.choice([0.0, 0.5, 3.0])),
        }
        found = best_total(survival, cost, **options)
        total, tokens, pays, rows = brute_force(survival, cost, **options)
        assert (found.total, found.tokens, found.drafting_pays) == (total, tokens, pays)
        assert found.seconds == cost(np.asarray([rows]))[0] + options["draft_seconds"]
        assert sequences <= found.total <= sequences * (1 + drafts)
        assert found.total <= options["capacity"] or total == sequences
        inner += sequences < total < sequences * (1 + drafts)
    assert inner > 50  # most totals would otherwise be trivial


def test_the_first_fall_is_not_the_end():
    seconds = [
        9.0,
        1.0,
        2.5,
        2.5,
        2.5,
        2.5,
        2.5,
    ]  # the second row costs much, the next ones nothing
    survival = np.asarray([[0.9, 0.9, 0.8, 0.7, 0.6]], np.float32)
    assert best_total(survival, curve(seconds), capacity=2).total == 1
    assert best_total(survival, curve(seconds), capacity=MANY).total == 6


def test_a_heavier_curve_never_raises_the_total():
    draw = np.random.default_rng(5)
    lower = 0
    for _ in range(300):
        survival = survivals(draw, int(draw.integers(1, 12)), 5)
        light = staircase(draw, 100)
        heavy = light * np.cumprod(1 + draw.exponential(0.05, 100))
        before = best_total(survival, curve(light), capacity=MANY)
        after = best_total(survival, curve(heavy), capacity=MANY)
        assert after.total <= before.total
        lower += after.total < before.total
    assert lower > 50


def test_seconds_that_all_sizes_share_never_lower_the_total():
    draw = np.random.default_rng(6)
    for _ in range(200):
        survival, light = survivals(draw, 8, 5), staircase(draw, 100)
        totals = [
            best_total(survival, curve(light), capacity=MANY, draft_seconds=shared).total
            for shared in (0.0, 0.3, 1.0, 10.0)
        ]
        assert totals == sorted(totals)


def test_more_sequences_get_fewer_rows_each_on_a_saturating_device():
    """Free rows up to 64, then proportional: the shape of engine.md 3.10's budgets."""
    seconds = np.maximum(1.0, np.arange(2000) / 64)
    row = np.cumprod(np.full(5, 0.7, np.float32), dtype=np.float32)
    each = [
        best_total(np.tile(row, (r, 1)), curve(seconds), capacity=MANY).total / r
        for r in (1, 8, 16, 32, 64, 128, 256)
    ]
    assert each == sorted(each, reverse=True)
    assert (each[0], each[-1]) == (6, 1)


def test_equal_throughput_takes_the_smallest_total():
    doubled = np.arange(20) * 0.5  # ones: tokens = rows, so every total is as good
    ones = np.ones((2, 3), np.float32)
    assert best_total(ones, curve(doubled), capacity=MANY).total == 2
    zeros = np.zeros((2, 3), np.float32)
    assert best_total(zeros, curve(np.ones(20)), capacity=MANY).total == 2
    one = np.asarray([[1, 0, 0], [1, 0, 0]], np.float32)
    assert best_total(one, curve(np.ones(20)), capacity=MANY).total == 4  # not the padding's 8


def test_certain_drafts_are_all_verified_and_hopeless_ones_never():
    rising = curve(1 + 0.1 * np.arange(60))
    ones = best_total(np.ones((4, 5), np.float32), rising, capacity=MANY)
    assert (ones.total, ones.tokens, ones.drafting_pays) == (24, 24.0, True)
    for hopeless in (0.0, np.nan):
        survival = np.full((4, 5), hopeless, np.float32)
        found = best_total(survival, rising, capacity=MANY, draft_seconds=0.1)
        assert (found.total, found.tokens, found.drafting_pays) == (4, 4.0, False)


def test_a_nan_counts_zero_and_harms_no_other():
    rising = curve(1 + 0.01 * np.arange(60))
    with_nan = np.asarray([[0.9, np.nan, np.nan], [0.8, 0.7, 0.6]], np.float32)
    found = best_total(with_nan, rising, capacity=MANY)
    assert found == best_total(np.nan_to_num(with_nan, nan=0.0), rising, capacity=MANY)
    assert found.total == 6


def test_one_sequence_and_none():
    rising = curve(1 + 0.2 * np.arange(60))
    survival = np.asarray([[0.9, 0.5, 0.1]], np.float32)
    assert best_total(survival, rising, capacity=MANY).total == 3
    nobody = best_total(np.zeros((0, 5), np.float32), rising, capacity=MANY)
    assert nobody == Budget(total=0, tokens=0.0, seconds=0.0, drafting_pays=False)
    undrafted = best_total(np.zeros((3, 0), np.float32), rising, capacity=MANY)
    assert (undrafted.total, undrafted.drafting_pays) == (3, False)


def test_the_capacity_binds_but_every_sequence_keeps_its_row():
    ones, flat = np.ones((4, 5), np.float32), curve(np.ones(100))
    rows = (24, 23, 10, 5, 4, 1, 0)
    wanted = [24, 23, 10, 5, 4, 4, 4]
    assert [best_total(ones, flat, capacity=c).total for c in rows] == wanted


def test_prompt_rows_move_the_stairs():
    steep = curve(np.repeat(np.arange(1.0, 30.0), 8))  # a step every 8 rows from row 8 on
    survival = np.full((2, 2), 0.5, np.float32)
    totals = [
        best_total(survival, steep, capacity=MANY, prompt_rows=p, budget=MANY).total
        for p in (0, 1, 4, 5, 6, 200)
    ]
    # up to row 7, or all where the next stair is reached anyway
    assert totals == [6, 6, 3, 2, 6, 6]


def test_where_prompts_wait_drafts_must_be_worth_the_rows_that_prompts_lose():
    """A full step: each draft takes the place of a row that a prompt waits for."""
    flat, ones = curve(np.ones(400)), np.full((10, 5), 0.9, np.float32)
    alone = best_total(ones, flat, capacity=MANY, draft_seconds=0.5)
    assert (alone.total, alone.drafting_pays) == (60, True)
    beside = best_total(ones, flat, capacity=MANY, prompt_rows=256, budget=256, draft_seconds=0.5)
    assert (beside.total, beside.drafting_pays) == (10, False)
    few = best_total(ones, flat, capacity=MANY, prompt_rows=20, budget=256, draft_seconds=0.5)
    assert (few.total, few.drafting_pays) == (60, True)  # 75 of both in 1.5 s, 30 in 1 s without


def test_drafting_pays_only_for_its_own_seconds():
    flat, survival = curve(np.ones(20)), np.asarray([[0.5, 0.25]], np.float32)
    gain = [
        best_total(survival, flat, capacity=MANY, draft_seconds=s).drafting_pays
        for s in (0.0, 0.5, 0.75, 1.0)  # 1.75 tokens against 1
    ]
    assert gain == [True, True, False, False]


def test_missing_survivals():
    survival = np.asarray([[0.9, 0.8], [0.3, 0.2], [np.nan, 0.4], [0.7, 0.6]], np.float32)
    known = np.asarray([True, False, True, True])
    usual = np.asarray([1, 0.5], np.float32)
    found = complete_survival(survival, known, np.asarray([2, 2, 2, 1]), usual)
    wanted = np.asarray([[0.9, 0.8], [1, 0.5], [0, 0.4], [0.7, 0]], np.float32)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.float32
    fresh = complete_survival(survival, known, np.asarray([0, 0, 0, 0]), usual)
    np.testing.assert_array_equal(fresh, np.zeros((4, 2), np.float32))


def test_a_measured_curve_with_corrections_is_a_cost():
    cost = StepCost(
        rows=np.asarray([8, 16, 32]),
        contexts=np.asarray([1]),
        step_seconds=np.asarray([[1.0], [1.1], [3.0]]),
        draft_rows=np.asarray([1]),
        draft_seconds=np.asarray([0.2]),
    )
    corrections = Corrections(cost)
    survival = np.full((4, 5), 0.5, np.float32)
    found = best_total(
        survival,
        lambda rows: corrections.seconds(rows, 100),
        capacity=MANY,
        draft_seconds=corrections.drafting_seconds(4),
    )
    assert found.total == 16
    rows = np.asarray([found.total])
    assert found.seconds == pytest.approx(corrections.expected(rows, 4, 100)[0])


def test_the_device_shares_out_every_total():
    draw = np.random.default_rng(8)
    confidence = draw.random((5, 3)).astype(np.float32)
    survival = np.cumprod(confidence, axis=1, dtype=np.float32)
    found = best_total(survival, curve(1 + 0.2 * np.arange(40)), capacity=MANY)
    lengths = np.asarray(verify_lengths(jnp.asarray(confidence), jnp.int32(found.total)))
    assert lengths.sum() == found.total
    chosen = sum(survival[i, : q - 1].sum() for i, q in enumerate(lengths))
    assert 5 + chosen == pytest.approx(found.tokens, rel=1e-6)
