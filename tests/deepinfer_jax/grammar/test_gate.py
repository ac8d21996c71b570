"""Where a grammar begins to bind: after a sequence of ids, which one can force (engine.md 1.1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.grammar.gate import Gate, GateState

pytestmark = pytest.mark.accept(11)
IDS = st.integers(0, 2)


@given(st.lists(IDS, min_size=1, max_size=5), st.lists(IDS, max_size=30))
def test_it_opens_where_the_trigger_first_ends(trigger, tokens):
    gate, state = Gate(tuple(trigger)), GateState()
    for count, token in enumerate(tokens, 1):
        state = gate.step(state, token)
        seen = tokens[:count]
        is_there = seen[-len(trigger) :] == trigger
        assert gate.is_open(state) == is_there
        if is_there:
            return
        ends = (n for n in range(len(trigger) - 1, -1, -1) if n == 0 or seen[-n:] == trigger[:n])
        assert state.matched == next(ends)


def test_without_a_trigger_it_is_open():
    assert Gate().is_open(GateState())


@pytest.mark.parametrize(
    ("tokens", "matched"),
    [([9], 0), ([4, 9], 0), ([4, 5, 9], 0), ([9, 4], 1), ([9, 4, 5], 2)],
)
def test_the_bound_token_forces_the_whole_trigger(tokens, matched):
    gate, state = Gate((4, 5, 6), bound_token=9), GateState()
    for token in tokens:
        state = gate.step(state, token)
    assert state == GateState(matched, is_forced=True)


def test_a_bound_token_inside_the_trigger_forces_what_remains():
    gate = Gate((4, 5, 6), bound_token=4)
    state = gate.step(GateState(), 4)
    assert state == GateState(1, is_forced=True)
    state = gate.step(gate.step(state, 5), 6)
    assert gate.is_open(state)
