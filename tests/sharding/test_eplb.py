"""Expert placement: the published example, the reference trace, when to move, and what to copy."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.eplb.decide import decide, keep_in_place, plan_placement
from sharding.eplb.load import LoadWindow
from sharding.eplb.maps import check_layout, expert_maps, initial_layout, replica_counts
from sharding.eplb.moves import moved_layout, plan_moves
from sharding.eplb.score import busiest, imbalance, rank_loads
from sharding.eplb.steps import trace_layout
from sharding.eplb.totals import global_layout, hierarchical_layout
from sharding.eplb.trace import reference_trace
from sharding.errors import ShardingError

# The README of deepseek-ai/EPLB: 12 experts, 16 slots, 4 groups, 2 nodes, 8 ranks.
LOADS = (
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
)
HIERARCHICAL = (
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
)
GLOBAL = (
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_published_example(layer):
    load = np.array(LOADS[layer])
    assert hierarchical_layout(load, 16, 8, groups=4, nodes=2).tolist() == HIERARCHICAL[layer]
    assert global_layout(load, 16, 8).tolist() == GLOBAL[layer]


@pytest.mark.parametrize(("experts", "digest"), [(256, "1c60468bcf6c"), (384, "b567871dcecc")])
def test_the_reference_trace_is_exact(experts, digest):
    trace = reference_trace(experts, 1.0, 0).astype("<i4")
    assert trace.shape == (300, experts)
    assert hashlib.sha256(trace.tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize(
    ("experts", "ranks", "extras", "most"),
    [(256, 8, 8, 1.15), (256, 32, 32, 1.35), (384, 64, 64, 1.45)],
)
def test_held_out_imbalance_on_the_reference_trace(experts, ranks, extras, most):
    trace = reference_trace(experts, 1.0, 0)
    window, held_out = trace[:100], trace[100:200]
    slots = experts + extras
    plan = plan_placement(window, slots, ranks)
    check_layout(plan, experts, ranks)
    published = global_layout(window.sum(axis=0), slots, ranks)
    assert imbalance(held_out, plan, ranks) <= most
    assert busiest(window, plan, ranks) <= busiest(window, published, ranks)
    assert imbalance(held_out, plan, ranks) <= imbalance(held_out, published, ranks) + 0.02
    first = initial_layout(experts, extras, ranks)
    assert imbalance(held_out, plan, ranks) < imbalance(held_out, first, ranks) - 0.5


@pytest.mark.parametrize("seed", range(3))
def test_an_unchanged_load_moves_nothing_and_drift_does(seed):
    trace = reference_trace(384, 1.0, seed)
    first = decide(trace[:100], initial_layout(384, 64, 64), 64)
    assert first.gain > 0.5
    assert first.moved > 100
    again = decide(trace[100:200], first.layout, 64)
    assert again.gain < 0.05
    assert again.moved == 0
    assert again.layout is first.layout
    rng = np.random.default_rng(seed)
    drifted = np.rint(trace[200:300] * np.exp(rng.normal(size=384)))
    moved = decide(drifted, first.layout, 64)
    assert moved.gain > 0.2
    assert moved.after < moved.before - 0.5


def test_renaming_ranks_keeps_more_in_place_and_the_same_load():
    trace = reference_trace(256, 1.0, 1)
    old = plan_placement(trace[:100], 288, 32)
    new = plan_placement(trace[100:200], 288, 32)
    kept = keep_in_place(old, new, 32)
    assert (kept == old).sum() > 2 * (new == old).sum()
    loads = [np.sort(rank_loads(trace, layout, 32)) for layout in (new, kept)]
    np.testing.assert_allclose(*loads)


def test_steps_that_burst_apart_may_share_a_rank():
    # Experts 0 and 1 never burst at the same step: by totals all four look alike.
    trace = np.array([[9, 0, 9, 0], [0, 9, 0, 9]] * 4)
    by_step = trace_layout(trace, 4, 2)
    assert busiest(trace, by_step, 2) == 72
    assert {frozenset(by_step[:2]), frozenset(by_step[2:])} != {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }


def test_extras_are_rounded_up_and_never_refused():
    layout = initial_layout(4, 0, 8)
    assert layout.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    maps = expert_maps(layout, 4)
    assert maps.count.tolist() == [2, 2, 2, 2]
    assert maps.slots[:, :2].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert maps.slots.shape == (4, 5)


def test_an_idle_window_moves_nothing():
    layout = initial_layout(16, 0, 4)
    decision = decide(np.zeros((10, 16), np.int64), layout, 4)
    assert (decision.moved, decision.gain, decision.before) == (0, 0.0, 1.0)


def test_a_layout_without_an_expert_is_refused():
    with pytest.raises(ShardingError, match=r"experts without one \[3\]"):
        decide(np.ones((4, 4)), np.array([0, 1, 2, 2]), 2)


def test_the_hierarchical_form_refuses_groups_that_do_not_divide():
    with pytest.raises(ShardingError, match="use global_layout"):
        hierarchical_layout(np.ones(12), 16, 8, groups=5, nodes=2)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.integers(0, 12))
def test_moves_make_the_wanted_layout_of_the_present_one(seed, ranks, extras):
    rng = np.random.default_rng(seed)
    slots = len(initial_layout(10, extras, ranks))
    layouts = []
    for _ in range(2):
        more = rng.integers(0, 10, slots - 10)
        layouts.append(rng.permutation(np.concatenate([np.arange(10), more])).astype(np.int32))
    moves = plan_moves(*layouts, ranks)
    np.testing.assert_array_equal(moved_layout(layouts[0], moves), layouts[1])
    old, new = (layout.reshape(ranks, -1) for layout in layouts)
    missing = sum(len(set(new[r]) - set(old[r])) for r in range(ranks))
    assert moves.sent == missing  # an expert reaches a rank once


def test_the_load_window_forgets_old_steps_and_idle_ones_are_none():
    window = LoadWindow(3, 2, 4)
    assert not window.add(np.zeros((2, 4), int))
    assert len(window) == 0
    for step in range(5):
        assert window.is_full == (step >= 3)
        assert window.add(np.full((2, 4), step + 1))
    found = window.trace()
    assert found.shape == (3, 2, 4)
    assert found[:, 1, 3].tolist() == [3, 4, 5]  # oldest of the three steps first
    with pytest.raises(ShardingError):
        window.add(np.ones((2, 5), int))
    window.clear()
    assert (len(window), window.is_full, window.trace().shape) == (0, False, (0, 2, 4))


def test_replicas_of_an_expert_share_its_rows():
    layout = np.array([0, 1, 0, 2])
    assert replica_counts(layout, 3).tolist() == [2, 1, 1]
    np.testing.assert_array_equal(rank_loads(np.array([[8, 1, 2]]), layout, 2), [[5, 6]])
