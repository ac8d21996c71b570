"""C1: random traces on caches down to the smallest give the bits of lone runs (engine.md 7.2)."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.e2e.lab import BASE, make_engine, small_cache
from tests.e2e.traces import growing_pool, request_pool, run_trace

pytestmark = pytest.mark.accept(5)
FAST = 12
FULL = 200
GROUP = 20
EVENTS = ("aborts", "forks", "preemptions", "evictions", "hits")


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
    pools, total = (request_pool(1, 24), growing_pool(2, 6)), Counter()
    for seed in range(FAST):
        total += run_trace(make_engine(_runtime(seed)), pools[seed % 2], seed, 9)
    return total


def test_random_traces_give_the_bits_of_lone_runs(met):
    assert met["requests"] >= FAST * 9


@pytest.mark.parametrize("event", EVENTS)
def test_the_traces_meet(met, event):
    assert met[event] > 0


@pytest.mark.slow
@pytest.mark.parametrize("group", range(FULL // GROUP))
def test_two_hundred_traces(group):
    pools, total = (request_pool(100 + group, 60), growing_pool(200 + group, 20)), Counter()
    for seed in range(group * GROUP, (group + 1) * GROUP):
        total += run_trace(make_engine(_runtime(seed)), pools[seed % 2], seed, 12)
    print(f"traces {group * GROUP} to {seed}: {dict(total)}")
    assert min(total[name] for name in EVENTS) > 0
