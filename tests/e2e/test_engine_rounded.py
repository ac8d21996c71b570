"""The engine in "checkpoint" numerics, whose cache rows are bytes: warm, preempted, poisoned."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from tests.e2e.lab import alone, assert_same, hit_blocks, make_engine, run, small_cache

pytestmark = pytest.mark.accept(5)
PARAMS = di.SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True, logprobs=2)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns random ids."""
    return np.random.default_rng([length, seed]).integers(3, 500, length).tolist()


def lone(ids: list[int]) -> di.RequestOutput:
    """Returns the oracle's output."""
    return alone(ids, PARAMS, runtime=small_cache("checkpoint"), numerics="checkpoint")


@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_and_repeated_requests_give_the_bits_of_lone_runs(depth):
    engine = make_engine(
        replace(small_cache("checkpoint"), async_depth=depth), numerics="checkpoint"
    )
    prompts = [prompt(60, 1), prompt(60, 2), prompt(77), prompt(60, 1)[:50] + prompt(9)]
    for _ in range(2):
        requests = [engine.submit(ids, PARAMS) for ids in prompts]
        engine.drain()
        for ids, request in zip(prompts, requests, strict=True):
            assert_same(request.output(), lone(ids))
    stats = engine.stats()
    assert stats.counters.get("preemptions", 0) > 0
    assert min(stats.cache.hits, stats.cache.evictions) > 0


def test_hit_bytes_are_read():
    engine, ids = make_engine(small_cache("checkpoint"), numerics="checkpoint"), prompt(161)
    cold = run(engine, ids, PARAMS)
    blocks = jnp.asarray(hit_blocks(engine, ids)[:10])
    state = engine._device._state
    main = jax.tree.map(lambda leaf: leaf.at[:, blocks].set(0xFF), state.cache.main)
    engine._device._state = replace(state, cache=replace(state.cache, main=main))
    broken = run(engine, ids, PARAMS)
    assert broken.cached_tokens == 160
    assert broken.finish_reason == "numerical" or not np.array_equal(broken.logprobs, cold.logprobs)
