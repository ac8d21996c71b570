"""F2: drafts change nothing: ids and log-probabilities are bitwise those without (engine.md 3.8 X).

Most drafts are the true continuation by hand (`forced`), so that all lengths are accepted and
rejected; the oracle is the same request alone in an engine that does not draft.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from tests.e2e.forced import accepted_per_round, drafting, force_drafts, mostly_right
from tests.e2e.lab import (
    assert_same,
    hit_blocks,
    lone_children,
    make_engine,
    model,
    run,
    small_cache,
)
from tests.e2e.traces import growing_pool, request_pool, run_trace

pytestmark = pytest.mark.accept(6)
DRAW = np.random.default_rng(11)
GREEDY = di.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, seed=0)
SAMPLED = replace(GREEDY, temperature=1, seed=2**63 + 5)
EDITED = {
    "presence_penalty": 0.8,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {9: 4.0, 30: -100, 77: 3.0},
    "allowed_token_ids": tuple(range(5, 120)),
    "bad_words": ("a",),
    "min_tokens": 7,
    "stop_token_ids": (17, 40, 55, 80, 101),
    "ignore_eos": False,
}
KINDS = (
    GREEDY,
    replace(GREEDY, logprobs_mode="processed", logprobs=3, **EDITED),
    SAMPLED,
    replace(SAMPLED, top_k=40, top_p=0.8, min_p=0.01, logprobs_mode="processed"),
    replace(SAMPLED, n=3, logprobs=0, max_tokens=13),
    replace(SAMPLED, temperature=0.6, **EDITED),
    replace(SAMPLED, temperature=1.3, prompt_logprobs=1, stop=("b", "th"), max_tokens=40),
    replace(SAMPLED, logprobs=None, max_tokens=2),
)
PROMPTS = tuple(DRAW.integers(3, 500, size).tolist() for size in (45, 60, 70, 33, 50, 47, 16, 1))


def truth(sequence) -> list[int]:
    """Returns the drafts of a sequence of `KINDS`: mostly the tokens of the run without drafts."""
    prompt = sequence.ids[: sequence.prompt_len].tolist()
    lone = lone_children(prompt, replace(sequence.params, stop=()))[sequence.child]
    return mostly_right(lone.token_ids, model().config.vocab_size, sequence.seed % 1000)


def check(engine, kinds=KINDS, prompts=PROMPTS) -> None:
    """Runs all kinds together and compares every completion."""
    requests = [engine.submit(ids, kind) for ids, kind in zip(prompts, kinds, strict=True)]
    engine.drain()
    for request, ids, kind in zip(requests, prompts, kinds, strict=True):
        for found, wanted in zip(request.output().outputs, lone_children(ids, kind), strict=True):
            assert_same(found, wanted)


def forced_engine(**changes):
    """Returns an engine of the small cache whose drafts are mostly right."""
    engine = make_engine(drafting(**changes))
    force_drafts(engine, truth)
    return engine


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_drafts_change_nothing_at_any_depth(depth):
    engine = forced_engine(async_depth=depth)
    check(engine)
    assert engine.stats().counters["preemptions"] > 0
    assert accepted_per_round(engine) > 1


@pytest.mark.parametrize("length", range(5))
def test_any_fixed_length(length):
    engine = forced_engine(draft_length=length)
    check(engine)
    stats = engine.stats()
    assert min(stats.accepted[:length], default=1) > 0
    assert not any(stats.verified[length:])


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("is_forced", [True, False])
def test_any_threshold(threshold, is_forced):
    policy = {"draft_policy": "threshold", "draft_length": None, "draft_threshold": threshold}
    engine = make_engine(drafting(**policy))
    if is_forced:
        force_drafts(engine, truth, confidence=0.8)
    check(engine)
    most = sum(count > 0 for count in engine.stats().verified)
    assert most == {0.0: 5, 0.5: 3, 1.0: 0}[threshold] or not is_forced  # 0.8 ** 3 > 0.5
    assert most < 5 or threshold < 1


@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_scheduled_length(depth, is_forced):
    engine = make_engine(drafting(draft_policy="scheduled", draft_length=None, async_depth=depth))
    if is_forced:
        force_drafts(engine, truth)
    check(engine)
    assert engine.stats().verified[0] > 0


def test_lengths_by_request():
    engine = forced_engine()
    lengths = (0, 1, 2, 3, 4, 5, None, 5)
    kinds = [replace(kind, max_draft=most) for kind, most in zip(KINDS, lengths, strict=True)]
    check(engine, kinds)
    lone = [run(engine, PROMPTS[0], replace(kinds[0], max_draft=most)) for most in lengths[:6]]
    for output in lone:
        assert_same(output, lone[0])


def test_the_engines_own_drafts_change_nothing():
    engine = make_engine(drafting(async_depth=2))
    check(engine)
    assert sum(engine.stats().accepted) > 0


@pytest.mark.parametrize("restore", ["checkpoint", "halo"])
def test_a_repeated_prompt(restore):
    engine = forced_engine(prefix_restore=restore)
    prompt = PROMPTS[1] + PROMPTS[3]
    lone = lone_children(prompt, SAMPLED)[0]
    cold, warm = (run(engine, prompt, SAMPLED) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 80)
    for output in (cold, warm):
        assert_same(output, lone)
    # Blocks of the output hold rows of accepted drafts, in the place of rejected ones.
    whole = prompt + list(warm.token_ids)
    blocks = hit_blocks(engine, whole)
    assert len(blocks) == (len(whole) - 1) // 16
    longer = whole + PROMPTS[0]
    again = run(engine, longer, SAMPLED)
    assert again.cached_tokens == (128 if restore == "halo" else 80)
    assert_same(again, lone_children(longer, SAMPLED)[0])
    assert accepted_per_round(engine) > 1


@pytest.mark.slow
def test_in_the_arithmetic_of_the_checkpoint():
    """Cache rows are bytes there; a draft that is rejected leaves some."""
    lone = run(make_engine(numerics="checkpoint"), PROMPTS[0], SAMPLED)
    engine = make_engine(drafting("checkpoint"), numerics="checkpoint")
    force_drafts(engine, lambda _: mostly_right(lone.token_ids, 512, 3))
    assert_same(run(engine, PROMPTS[0], SAMPLED), lone)
    assert accepted_per_round(engine) > 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_replay(mode):
    options = {"replay": mode, "replay_keep_tokens": 20}
    params = replace(SAMPLED, max_tokens=40)
    prompts = [DRAW.integers(3, 500, size).tolist() for size in (50, 90, 19, 21, 36, 60)]
    plain = make_engine(replace(small_cache(), **options, prefix_cache=False))
    lone = [run(plain, ids, params) for ids in prompts]
    by_prompt = {tuple(ids): output.token_ids for ids, output in zip(prompts, lone, strict=True)}
    for depth in (0, 2):
        engine = make_engine(drafting(**options, async_depth=depth))
        force_drafts(
            engine,
            lambda s: mostly_right(by_prompt[tuple(s.ids[: s.prompt_len].tolist())], 512, 3),
        )
        for _ in range(2):
            requests = [engine.submit(ids, params) for ids in prompts]
            engine.drain()
            for request, output in zip(requests, lone, strict=True):
                assert_same(request.output(), output)
        assert engine.stats().counters["preemptions"] > 0
        assert accepted_per_round(engine) > 1


# -- random traces --------------------------------------------------------------------------------

FAST, FULL, GROUP = 3, 200, 20
EVENTS = ("aborts", "forks", "preemptions", "evictions", "hits", "accepted", "rejected")
POLICIES = (
    *({"draft_length": length} for length in (1, 2, 3, 5, 5)),
    *(
        {"draft_policy": "threshold", "draft_length": None, "draft_threshold": least}
        for least in (0.0, 0.3, 0.8)
    ),
    *({"draft_policy": "scheduled", "draft_length": None} for _ in range(2)),
)


def mixed(pool: list, seed: int) -> list:
    """Returns a pool of which some requests limit their drafts."""
    rng = random.Random(seed)
    return [(ids, replace(p, max_draft=rng.choice([None, None, 0, 2, 5]))) for ids, p in pool]


def trace(pool: list, seed: int, count: int) -> Counter[str]:
    """Runs a random trace with drafts of one policy and compares it with lone runs without."""
    rng = random.Random(3000 + seed)
    engine = make_engine(
        drafting(
            async_depth=seed % 3,
            prefix_cache=seed % 4 != 3,
            prefix_restore="halo" if seed % 5 == 4 else "checkpoint",
            **rng.choice(POLICIES),
        )
    )
    if seed % 3 != 1:  # the engine's own in the others
        force_drafts(engine, truth, confidence=rng.choice([0.5, 0.9, 1.0]))
    met = run_trace(engine, pool, seed, count)
    stats = engine.stats()
    accepted = sum(stats.accepted)
    return met + Counter(accepted=accepted, rejected=sum(stats.verified) - accepted)


def test_random_traces_give_the_bits_of_lone_runs():
    pools = [mixed(request_pool(1, 12), 1), mixed(growing_pool(2, 6), 2)]
    met = sum((trace(pools[seed % 2], seed, 9) for seed in range(FAST)), Counter())
    assert min(met[event] for event in EVENTS) > 0


@pytest.mark.slow
@pytest.mark.parametrize("group", range(FULL // GROUP))
def test_two_hundred_traces(group):
    pools = [mixed(request_pool(100 + group, 60), group), mixed(growing_pool(200 + group, 20), 1)]
    seeds = range(group * GROUP, (group + 1) * GROUP)
    met = sum((trace(pools[seed % 2], seed, 12) for seed in seeds), Counter())
    print(f"traces with drafts {seeds[0]} to {seeds[-1]}: {dict(met)}")
    assert min(met[event] for event in EVENTS) > 0
