"""Rows of a step: prompt rows, then rounds whose drafts share what is left (engine.md 2.8, 3.6)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine.layout import HEADER, PlanLayout, blank, unpack
from deepinfer_jax.engine.rows import step_rows
from deepinfer_jax.engine.slots import init_slots

pytestmark = pytest.mark.accept(6)
SLOTS, DRAFTS = 4, 3
LAYOUT = PlanLayout(rows=24, slots=SLOTS, deltas=2, stop_ids=2, drafts=DRAFTS)
LENGTH = np.asarray([0, 10, 20, 30, 40], np.int32)
#: Of each slot: drafts 100 * slot + 1, ...; the newest token is 100 * slot.
CONFIDENCE = np.asarray(
    [[0, 0, 0], [0.9, 0.9, 0.9], [0.5, 1.0, 1.0], [0.95, 0.1, 1.0], [1.0, 1.0, 1.0]], np.float32
)


OF_DRAFTS = ("is_made", "confidence")


@jax.jit
def rows_of(vector, slots):
    return step_rows(LAYOUT, unpack(LAYOUT, vector), slots, jnp.asarray(LENGTH))


def slot_state(**changes):
    """Returns slots 1 to 4 in the middle of sequences with much room; changes: of their leaves."""
    slots = init_slots(SLOTS + 1, 8, 2, drafts=DRAFTS)
    number = jnp.arange(SLOTS + 1, dtype=jnp.int32)
    drafting = replace(
        slots.drafting,
        token=100 * number[:, None] + jnp.arange(1, DRAFTS + 1, dtype=jnp.int32),
        confidence=jnp.asarray(CONFIDENCE),
        is_made=number > 0,
        most=jnp.full(SLOTS + 1, DRAFTS, jnp.int32),
    )
    new = {name: jnp.asarray(leaf) for name, leaf in changes.items()}
    drafting = replace(drafting, **{name: new.pop(name) for name in OF_DRAFTS if name in new})
    known = {"last": 100 * number, "alive": number > 0, "most": jnp.full_like(number, 50)}
    return replace(slots, drafting=drafting, **{**known, **new})


def run(slots, rounds, verify_rows, *, ends=(), prompt=(), most=DRAFTS, threshold=0.0):
    """Returns (ids, positions and slots of the rows that count, emitters)."""
    vector, parts = blank(LAYOUT)
    words = {"prompt_rows": len(prompt), "rounds": len(rounds), "ends": len(ends)}
    words |= {"most_drafts": most, "verify_rows": verify_rows}
    words["threshold"] = np.float32(threshold).view(np.int32)
    parts.header[:] = [words.get(name, 0) for name in HEADER]
    parts.rounds[: len(rounds)], parts.ends[: len(ends)] = rounds, ends
    for row, (token, position, slot) in enumerate(prompt):
        parts.ids[row], parts.position[row], parts.slot[row] = token, position, slot
    plan, emitters = rows_of(jnp.asarray(vector), slots)
    count = int(plan.count)
    rows = [tuple(np.asarray(leaf)[:count].tolist()) for leaf in (plan.ids, plan.position)]
    return [*rows, tuple(np.asarray(plan.slot)[:count].tolist())], emitters


def test_rounds_without_spare_rows_are_anchors():
    (ids, position, slot), emitters = run(slot_state(), [2, 1, 4], 3)
    assert ids == (200, 100, 400)
    assert position == (20, 10, 40)
    assert slot == (2, 1, 4)
    assert np.asarray(emitters.rows).tolist() == [1, 1, 1, 0]


def test_the_likeliest_drafts_share_the_spare_rows():
    # Survivals: 0.9 0.81 0.73 | 0.5 0.5 0.5 | 0.95 0.095 0.095 | 1 1 1.
    (ids, position, slot), emitters = run(slot_state(), [1, 2, 3, 4], 4 + 6)
    assert np.asarray(emitters.rows).tolist() == [3, 1, 2, 4]
    assert ids == (100, 101, 102, 200, 300, 301, 400, 401, 402, 403)
    assert position == (10, 11, 12, 20, 30, 31, 40, 41, 42, 43)
    assert np.asarray(emitters.first).tolist() == [0, 3, 4, 6]
    assert np.asarray(emitters.base).tolist() == [10, 20, 30, 40]
    assert slot == (1, 1, 1, 2, 3, 3, 4, 4, 4, 4)


@pytest.mark.parametrize(
    ("changes", "options", "rows"),
    [
        ({}, {"most": 2}, [3, 3, 3, 3]),
        ({}, {"threshold": 0.5}, [4, 4, 2, 4]),
        ({}, {"threshold": 1.0}, [1, 1, 1, 4]),
        ({"is_made": [False, True, False, True, True]}, {}, [4, 1, 4, 4]),
        ({"produced": [0, 47, 48, 49, 0]}, {}, [3, 2, 1, 4]),
        ({"alive": [False, True, True, False, True]}, {}, [4, 4, 0, 4]),
        ({"confidence": np.where(CONFIDENCE == 0.5, np.nan, CONFIDENCE)}, {"threshold": 0.1}, None),
    ],
)
def test_what_limits_the_drafts_of_a_round(changes, options, rows):
    _, emitters = run(slot_state(**changes), [1, 2, 3, 4], 16, **options)
    assert np.asarray(emitters.rows).tolist() == (rows or [4, 1, 2, 4])


def test_rows_of_the_dead_go_to_the_living():
    slots = slot_state(alive=[False, True, False, True, True])
    (ids, _, slot), emitters = run(slots, [1, 2, 3], 3)
    assert np.asarray(emitters.rows).tolist() == [1, 0, 2, 0]
    assert (ids, slot) == ((100, 300, 301), (1, 3, 3))
    assert np.asarray(emitters.is_live).tolist() == [True, False, True, False]


def test_prompts_come_first_and_emit_last():
    prompt = [(7, 5, 3), (8, 6, 3), (9, 40, 4)]
    (ids, position, slot), emitters = run(slot_state(), [1, 2], 4, prompt=prompt, ends=[1, 2])
    assert ids == (7, 8, 9, 100, 101, 102, 200)
    assert position == (5, 6, 40, 10, 11, 12, 20)
    assert slot == (3, 3, 4, 1, 1, 1, 2)
    assert np.asarray(emitters.slot).tolist() == [1, 2, 3, 4]
    assert np.asarray(emitters.rows).tolist() == [3, 1, 1, 1]
    assert np.asarray(emitters.row).tolist() == [3, 6, 1, 2]
    assert np.asarray(emitters.base).tolist() == [10, 20, 6, 40]
    assert np.asarray(emitters.is_round).tolist() == [True, True, False, False]
