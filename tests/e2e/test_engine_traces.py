"""C1: random traces on caches down to the smallest give the bits of lone runs (engine.md 7.2)."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.e2e.lab import BASE, make_engine, small_cache
from tests.e2e.traces import request_pool, run_trace

pytestmark = pytest.mark.accept(5)
FAST = 12
FULL = 200


def _runtime(seed: int):
    rng = random.Random(1000 + seed)
    return replace(
        small_cache() if seed % 3 else BASE,
        async_depth=seed % 3 if seed % 2 else rng.randrange(3),
        prefix_cache=seed % 4 != 3,
        prefix_restore="halo" if seed % 5 == 4 else "checkpoint",
    )


@pytest.fixture(scope="module")
def met() -> Counter[str]:
    """What the fast traces met together."""
    pool, total = request_pool(1, 24), Counter()
    for seed in range(FAST):
        total += run_trace(make_engine(_runtime(seed)), pool, seed, 9)
    return total


def test_random_traces_give_the_bits_of_lone_runs(met):
    assert met["requests"] >= FAST * 9


@pytest.mark.parametrize("event", ["aborts", "forks", "preemptions", "evictions", "hits"])
def test_the_traces_meet(met, event):
    assert met[event] > 0


@pytest.mark.slow
def test_two_hundred_traces():
    total = Counter()
    for seed in range(FULL):
        pool = request_pool(100 + seed // 20, 60)
        total += run_trace(make_engine(_runtime(seed)), pool, seed, 12)
    print(f"{FULL} traces: {dict(total)}")
    assert min(total[name] for name in ("aborts", "forks", "preemptions", "evictions")) > 0
