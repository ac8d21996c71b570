"""C2: the depth and the speed of the host change nothing; nothing compiles after the warm-up."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.e2e.lab import BASE, assert_same, lone_children, make_engine, run, small_cache
from tests.e2e.traces import request_pool

pytestmark = pytest.mark.accept(5)
COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Lists what this process compiles while `is_on`."""

    def __init__(self) -> None:
        self.found, self.is_on = [], False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **details: object) -> None:
        if self.is_on and event == COMPILED:
            self.found.append(details)


@pytest.fixture(scope="module")
def compiles():
    counter = CompileCounter()
    yield counter
    counter.is_on = False


@pytest.fixture(scope="module")
def pool():
    return request_pool(5, 14)


def _outputs(runtime, pool, pause) -> list:
    engine = make_engine(runtime)
    engine.warm_up()
    requests = []
    for ids, params in pool:
        requests.append(engine.submit(list(ids), params, sink=lambda _: pause()))
        engine.step()
        pause()
    engine.drain()
    return [request.output() for request in requests]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_and_host_sleeps_change_nothing(pool, depth):
    rng = random.Random(depth)
    runtime = replace(small_cache(), async_depth=depth)
    # A slow host is the point here: nothing is measured.
    outputs = _outputs(runtime, pool, lambda: time.sleep(rng.choice([0, 0, 0, 0.004])))
    for output, (ids, params) in zip(outputs, pool, strict=True):
        for found, lone in zip(output.outputs, lone_children(ids, params), strict=True):
            assert_same(found, lone)


@pytest.mark.parametrize("drafting", [False, True])
def test_nothing_compiles_after_the_warm_up(pool, compiles, drafting):
    """Preemption, eviction, hits, forks, copies, edits, scores and images included."""
    warmed = make_engine(replace(small_cache(), drafting=drafting))
    warmed.warm_up()
    compiles.is_on = True
    jax.jit(lambda x: x * 3.25)(1.5).block_until_ready()
    assert len(compiles.found) == 1, "the counter does not count"
    compiles.found.clear()
    requests = [warmed.submit(list(ids), params) for ids, params in pool * 2]
    seen = np.arange(16 * 20 * 3, dtype=np.uint8).reshape(16, 20, 3)
    warmed.submit([5, warmed.config.image_token_id, 6], pool[0][1], images=[seen])
    for number in range(12):
        warmed.step()
        if number == 3:
            warmed.abort(requests[1].request_id)
        if number == 6 and warmed.scheduler.active:
            name = next(r.request_id for r in requests if not r.is_done)
            warmed.fork(name, replace(pool[0][1], n=1, prompt_logprobs=None, max_tokens=3))
    warmed.drain()
    run(warmed, [5, 6, 7], pool[0][1])
    compiles.is_on = False
    stats = warmed.stats()
    assert min(stats.cache.hits, stats.cache.evictions) > 0
    assert compiles.found == []


def test_at_most_depth_results_are_outstanding():
    for depth in (0, 1, 2):
        engine = make_engine(replace(BASE, async_depth=depth))
        engine.submit([5, 6, 7], replace(request_pool(1, 1)[0][1], max_tokens=9, n=1))
        seen = []
        while engine.has_work:
            engine.step()
            seen.append(engine.stats().in_flight)
        assert max(seen) == depth
        assert seen[-1] == 0
        assert engine.stats().depth == depth


@pytest.mark.slow
def test_depth_is_real(root):
    """20 ms of host work and a device step of about 30 ms overlap at depth 1, and only there."""
    command = [sys.executable, "-m", "benchmarks.engine_depth"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    print(done.stdout)
    points = [json.loads(line) for line in done.stdout.splitlines()]
    by_depth = {point["depth"]: point for point in points}
    assert all(point["same_tokens"] for point in points)
    assert by_depth[1]["seconds"] <= 1.15 * by_depth[1]["longest"]
    assert by_depth[0]["seconds"] >= 0.9 * by_depth[0]["sum"]
