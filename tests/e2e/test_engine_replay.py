"""C4, engine side: mask and compact agree bit for bit, warm or cold, in any chunks."""

from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from tests.e2e.lab import BASE, assert_same, make_engine, run, small_cache

pytestmark = pytest.mark.accept(5)
KEEP = 20  # window 8 + rollback 6 is the least
PARAMS = di.SamplingParams(temperature=1, seed=9, max_tokens=4, ignore_eos=True, logprobs=1)
LENGTHS = (1, KEEP - 1, KEEP, KEEP + 1, KEEP + 15, KEEP + 16, KEEP + 17, 90, 161)


def runtime(mode: str, **changes) -> di.RuntimeConfig:
    """Returns the small cache with a replay mode."""
    return replace(small_cache(), replay=mode, replay_keep_tokens=KEEP, **changes)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns random ids."""
    return np.random.default_rng([length, seed]).integers(3, 500, length).tolist()


@pytest.fixture(scope="module")
def masked() -> dict[int, di.RequestOutput]:
    """Cold outputs in mode "mask", by prompt length."""
    engine = make_engine(runtime("mask", prefix_cache=False))
    return {length: run(engine, prompt(length), PARAMS) for length in LENGTHS}


@pytest.mark.parametrize("length", LENGTHS)
def test_compact_equals_mask_cold_and_warm(masked, length):
    engine = make_engine(runtime("compact"))
    cold, warm = (run(engine, prompt(length), PARAMS) for _ in range(2))
    assert_same(cold, masked[length])
    assert_same(warm, masked[length])
    assert warm.cached_tokens == 16 * (max(length - KEEP, 0) // 16)
    assert (warm.metrics.cache_reason is None) == (warm.cached_tokens > 0)


@pytest.mark.parametrize("restore", ["checkpoint", "halo"])
def test_mask_is_the_same_warm_and_cold(masked, restore):
    engine = make_engine(runtime("mask", prefix_restore=restore))
    for length in LENGTHS:
        cold, warm = (run(engine, prompt(length), PARAMS) for _ in range(2))
        assert_same(cold, masked[length])
        assert_same(warm, masked[length])


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("compact", 24),
        *(pytest.param("compact", rows, marks=pytest.mark.slow) for rows in (16, 40)),
        *(pytest.param("mask", rows, marks=pytest.mark.slow) for rows in (16, 24, 40)),
    ],
)
def test_chunks_do_not_matter(masked, mode, rows):
    engine = make_engine(runtime(mode, max_tokens_per_step=rows))
    for length in LENGTHS:
        assert_same(run(engine, prompt(length), PARAMS), masked[length])
    requests = [engine.submit(prompt(length), PARAMS) for length in LENGTHS]
    engine.drain()
    for length, request in zip(LENGTHS, requests, strict=True):
        assert_same(request.output(), masked[length])


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_preemption_recovers(mode):
    params = replace(PARAMS, max_tokens=40)
    prompts = [prompt(50, seed) for seed in range(4)]
    engine = make_engine(runtime(mode))
    requests = [engine.submit(ids, params) for ids in prompts]
    engine.drain()
    assert engine.stats().counters.get("preemptions", 0) > 0
    lone = make_engine(runtime("mask", prefix_cache=False))
    for ids, request in zip(prompts, requests, strict=True):
        assert_same(request.output(), run(lone, ids, params))


def test_replay_is_another_model_option_where_the_prompt_is_longer(masked):
    engine = make_engine(BASE)
    full = {length: run(engine, prompt(length), PARAMS) for length in LENGTHS}
    differs = [n for n in LENGTHS if full[n].logprobs.tolist() != masked[n].logprobs.tolist()]
    assert differs
    assert min(differs) > KEEP


def test_what_replay_excludes_is_refused():
    with pytest.raises(di.ConfigError, match="replay_keep_tokens must be >= 14"):
        make_engine(replace(runtime("mask"), replay_keep_tokens=13))
    engine = make_engine(runtime("mask"))
    with pytest.raises(di.InputError, match=r"prompt_logprobs.*replay"):
        engine.submit([5, 6, 7], replace(PARAMS, prompt_logprobs=0))
