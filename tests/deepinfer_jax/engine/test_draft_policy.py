"""What the host decides about drafts: lengths, shared rows, and when drafting pauses (3.5, 3.6)."""

import numpy as np
import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.completion import CompletionBuilder
from deepinfer_jax.engine.draft_policy import DraftPolicy, assumed_cost, draft_policy
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.runners import runners_of
from deepinfer_jax.engine.sequence import Phase, Sequence
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.speculative.cost import Corrections
from tests.golden.network import tiny_config

pytestmark = pytest.mark.accept(6)
SIZE = 5
GOOD, BAD = np.full(SIZE, 0.99, np.float32), np.full(SIZE, 0.01, np.float32)


def sequence(*survivals, room=50, produced=10, **params) -> Sequence:
    """Returns a running sequence whose drafts had these survivals, newest first."""
    params = SamplingParams(**params)
    one = Sequence(
        number=0,
        child=0,
        params=params,
        prompt_len=4,
        ids=np.zeros(4 + room, np.int32),
        room=room,
        seed=0,
        root=b"",
        output=CompletionBuilder(0, params, None),
        submitted=0.0,
    )
    one.count, one.phase = 4 + produced, Phase.RUNNING
    one.survivals, one.planned = survivals, produced + 1  # the plan in the making included
    return one


def scheduled(**options) -> DraftPolicy:
    """Returns a policy that costs of rows decide."""
    return DraftPolicy(
        size=SIZE, most=SIZE, corrections=Corrections(assumed_cost(8, 64)), **options
    )


def spans_of(policy: DraftPolicy, sequences: list[Sequence]) -> list[int]:
    """Returns the rows that a round of each may have."""
    return runners_of(sequences, policy).spans()


def totals(policy: DraftPolicy, *steps: list[Sequence]) -> list[tuple[int, bool]]:
    """Returns (rows beside the anchors, whether drafts are made) of steps one after the other."""
    found = []
    for sequences in steps:
        spans = spans_of(policy, sequences)
        total, makes = policy.rows(sequences, spans)
        found.append((total - len(sequences), makes))
    return found


@pytest.mark.parametrize(
    ("most", "fields", "wanted"),
    [
        (5, {}, 5),
        (3, {}, 3),
        (0, {}, 0),
        (5, {"max_draft": 2}, 2),
        (3, {"max_draft": 5}, 3),
        (5, {"max_draft": 0}, 0),
        (5, {"produced": 46}, 3),
        (5, {"produced": 49}, 0),
        (5, {"produced": 50}, 0),
    ],
)
def test_drafts_of_a_sequence(most, fields, wanted):
    assert spans_of(DraftPolicy(size=SIZE, most=most), [sequence(**fields)]) == [1 + wanted]


def test_a_fixed_length_takes_all_rows():
    some = [sequence(), sequence(max_draft=1), sequence(produced=49)]
    assert totals(DraftPolicy(size=SIZE, most=4), some) == [(5, True)]
    assert totals(DraftPolicy(size=SIZE, most=0), some) == [(0, False)]


def test_a_schedule_begins_with_steps_that_make_drafts():
    assert totals(scheduled(), [], [sequence(), sequence()]) == [(0, True), (10, True)]


def test_a_schedule_takes_what_survives():
    _, (rows, _) = totals(scheduled(), [], [sequence(GOOD), sequence(GOOD, max_draft=2)])
    assert rows == 8 - 2  # a seventh draft would open another tile of 8 rows
    mixed = [sequence(np.asarray([1, 1, 0, 0, 0], np.float32)), *[sequence(GOOD)] * 3]
    _, (rows, _) = totals(scheduled(), [], mixed)
    assert rows == 2 + 3 * SIZE
    _, (rows, _) = totals(scheduled(), [], [sequence(BAD) for _ in range(8)])
    assert rows == 0


def test_a_schedule_pauses_while_drafts_do_not_pay_and_tries_again():
    poor, policy = [sequence(BAD) for _ in range(4)], scheduled()
    makes = [made for _, made in totals(policy, [], *[poor] * 200)]
    pauses = "".join("x" if made else "." for made in makes).strip("x").split("x")
    lengths = [len(pause) for pause in pauses if pause]
    assert lengths[:5] == [4, 8, 16, 32, 64]
    assert set(lengths[5:-1]) <= {64}
    found = totals(policy, *[[sequence(GOOD)]] * 200)
    assert [made for _, made in found][-100:] == [True] * 100
    assert found[-1] == (5, True)


def test_a_schedule_pauses_while_prompts_wait_for_its_rows():
    policy = scheduled(budget=64)
    policy.rows([], [])
    running, prompt = [sequence(GOOD) for _ in range(2)], sequence()
    spans = spans_of(policy, running)

    def expect(computed: int, waiting: int) -> None:
        prompt.phase, prompt.count, prompt.computed = Phase.PREFILL, 100, computed
        policy.expect([*running, prompt], [sequence()] * waiting)

    assert policy.rows(running, spans) == (12, True)  # nobody waits
    expect(computed=100, waiting=0)
    assert policy.rows(running, spans) == (12, True)  # nothing is left of the prompt
    expect(computed=52, waiting=0)
    assert policy.rows(running, spans) == (2, False)
    expect(computed=100, waiting=0)
    assert policy.rows(running, spans) == (2, True)  # at once: it was no pause
    assert policy.rows(running, spans) == (12, True)
    expect(computed=100, waiting=5)  # of 14 tokens each, and there are slots for them
    assert policy.rows(running, spans) == (2, False)


def test_what_a_schedule_may_know():
    """Rules other than "exact": not the survivals of the very drafts that the plan verifies."""
    at_once, later = sequence(BAD, GOOD), sequence(BAD, GOOD)
    later.planned += 1  # a plan in flight verifies the newest
    for policy, one, wanted in (
        (scheduled(), at_once, 0),
        (scheduled(exact_only=False), at_once, 5),
        (scheduled(exact_only=False), later, 0),
        (scheduled(exact_only=False), sequence(BAD), 5),  # nothing old enough is known
    ):
        one = [one] * 8
        rows = totals(policy, [], one)[1][0]
        assert rows == wanted * 8


def test_what_is_not_known_yet_is_what_usually_survives():
    fresh = [sequence() for _ in range(8)]
    policy = scheduled()
    assert totals(policy, [], fresh)[1] == (8 * SIZE, True)  # nothing was known before
    totals(policy, [sequence(BAD) for _ in range(8)])
    found = [step for step in totals(policy, *[fresh] * 20) if step[1]]
    assert found
    assert {rows for rows, _ in found} == {0}
    policy = scheduled()
    totals(policy, [], [sequence(GOOD)])
    assert totals(policy, fresh)[0][0] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_policy": "fixed", "draft_length": 6}, "draft_length must be at most the 5.*got 6"),
        ({"draft_policy": "fixed", "draft_length": 1, "size": 0}, "draft_length.* 0 drafts.*got 1"),
        ({"draft_policy": "threshold", "draft_threshold": 0.5, "size": 0}, "draft_threshold"),
    ],
)
def test_what_cannot_be_honoured_raises(options, words):
    size = options.get("size", SIZE)
    runtime = RuntimeConfig(**{name: v for name, v in options.items() if name != "size"})
    layouts = (PlanLayout(rows=16, slots=2, deltas=1, stop_ids=1, drafts=size),)
    with pytest.raises(ConfigError, match=words):
        draft_policy(runtime, size, tiny_config(), layouts)
