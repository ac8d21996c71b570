"""F4: drafts are worth what they should be, and F2 on a model whose drafts are accepted (nano)."""

import json
from dataclasses import replace
from functools import cache

import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.training.corpus import TASKS
from deepinfer_jax.training.draft_calibration import corpus_prompts
from tests.e2e.forced import DRAFTS, NANO, accepted_per_round, force_drafts, nano
from tests.e2e.lab import assert_same, run, same_floats

pytestmark = pytest.mark.accept(6)
GREEDY = di.SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, logprobs=1, seed=5)
SAMPLED = replace(GREEDY, temperature=1)
SCHEDULED = {"draft_policy": "scheduled", "draft_length": None}
THRESHOLD = {"draft_policy": "threshold", "draft_length": None, "draft_threshold": 0.5}


@cache
def prompts(task: str, count: int = 1) -> list[list[int]]:
    """Returns prompts of a task of the test split."""
    return corpus_prompts(nano().tokenizer, task, split="test", seed=1, count=count)


@pytest.fixture(scope="module")
def undrafted():
    """Outputs of requests that forbid drafts, by (prompt, params)."""
    engine, known = Engine(nano(), replace(NANO, prefix_cache=False, async_depth=0)), {}

    def lone(ids, params) -> di.RequestOutput:
        key = (tuple(ids), params.temperature, params.max_tokens)
        if key not in known:
            known[key] = run(engine, ids, replace(params, max_draft=0))
            assert not sum(engine.stats().verified)
        return known[key]

    return lone


def sizes_of(engine, ids, params) -> tuple[di.RequestOutput, list[int]]:
    """Returns the output of a request, and how many tokens it got at a time."""
    sizes: list[int] = []
    output = run(engine, ids, params, sink=lambda delta: sizes.append(len(delta.token_ids)))
    return output, sizes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_right_drafts_give_six_tokens_a_round(undrafted, params):
    (ids,) = prompts("story")
    lone = undrafted(ids, params)
    engine = Engine(nano(), replace(NANO, async_depth=0, prefix_cache=False))
    force_drafts(engine, lambda _: lone.token_ids)
    output, sizes = sizes_of(engine, ids, replace(params, detokenize=False))
    assert output.token_ids == lone.token_ids
    assert same_floats(output.logprobs, lone.logprobs)
    assert sizes == [1, 6, 6, 6, 6]
    stats = engine.stats()
    assert (stats.rounds, stats.verified, stats.accepted) == (4, (4,) * 5, (4,) * 5)
    assert stats.counters["steps"] == stats.rounds + 1


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_wrong_drafts_cost_rows_and_nothing_else(undrafted, params):
    (ids,) = prompts("story")
    lone = undrafted(ids, params)
    engine = Engine(nano(), replace(NANO, async_depth=0))
    force_drafts(engine, lambda _: [(token + 1) % 2000 for token in lone.token_ids])
    output, sizes = sizes_of(engine, ids, replace(params, detokenize=False))
    assert output.token_ids == lone.token_ids
    assert same_floats(output.logprobs, lone.logprobs)
    assert sizes == [1] * 25
    assert (engine.stats().rounds, sum(engine.stats().accepted)) == (24, 0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("policy", "depth"), [({}, 0), (SCHEDULED, 1), (THRESHOLD, 1)])
def test_own_drafts_change_nothing(undrafted, policy, params, depth):
    engine = Engine(nano(), replace(NANO, async_depth=depth, **policy))
    some = [prompts(task)[0] for task in ("story", "question", "extraction", "arithmetic", "talk")]
    requests = [engine.submit(ids, params) for ids in some]
    engine.drain()
    for ids, request in zip(some, requests, strict=True):
        assert_same(request.output(), undrafted(ids, params))
    assert accepted_per_round(engine) > 0.5


def figures(engine, before) -> dict[str, float]:
    """Returns what drafts were worth since `before`."""
    after = engine.stats()
    rounds = after.rounds - before.rounds
    verified, accepted = (
        sum(getattr(after, name)) - sum(getattr(before, name)) for name in ("verified", "accepted")
    )
    return {
        "rounds": rounds,
        "rows_per_round": 1 + verified / rounds,
        "accepted_length": 1 + accepted / rounds,
        "steps": after.counters["steps"] - before.counters.get("steps", 0),
    }


def test_greedy_runs_take_as_many_steps_as_their_accepted_length_says():
    engine = Engine(nano(), replace(NANO, async_depth=0, prefix_cache=False, **SCHEDULED))
    before, emitted, prefills = engine.stats(), 0, 0
    for task in ("story", "question", "extraction", "list"):
        (ids,) = prompts(task)
        output = run(engine, ids, replace(GREEDY, ignore_eos=False, max_tokens=40))
        emitted += len(output.token_ids)
        prefills += -(-len(ids) // 64)
    found = figures(engine, before)
    assert found["rows_per_round"] > 2
    assert found["accepted_length"] > 2
    assert found["rounds"] <= 1.05 * emitted / found["accepted_length"]
    assert found["steps"] == found["rounds"] + prefills


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("task", TASKS)
def test_drafts_on_every_task(task, params):
    """Against an engine that does not draft; prints what the drafts are worth."""
    runtime = replace(NANO, max_len=768)
    plain = Engine(
        nano(), replace(runtime, drafting=False, draft_policy="scheduled", draft_length=None)
    )
    engine = Engine(nano(), runtime)
    params = replace(params, max_tokens=64, ignore_eos=False)
    some = [ids for ids in prompts(task, 8) if len(ids) < 700]
    requests = [engine.submit(ids, params) for ids in some]
    lone = [run(plain, ids, params) for ids in some]
    before = engine.stats()
    engine.drain()
    for request, output in zip(requests, lone, strict=True):
        assert_same(request.output(), output)
    found = figures(engine, before)
    print(json.dumps({"task": task, "temperature": params.temperature, **found}))
    assert found["accepted_length"] > 1
    assert found["rows_per_round"] <= 1 + DRAFTS
