"""Host time of the engine per decode step (acceptance C5): plan, dispatch, commit.

`python benchmarks/engine_overhead.py [--requests 64 256] [--steps 200] [--drafts off fixed
scheduled]` prints one JSON line a point; "off" does not draft, the others are draft policies. Host
times are CPU seconds of the loop's own thread while the CPU "device" is idle, which is the case on
a GPU; the time spent waiting for the device is left out. "planner" is the planning of a step alone,
one plan after the other. First the tokens are compared with lone runs.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.loading import Model, load

#: Options of `RuntimeConfig` by the name of a point.
DRAFTS: dict[str, dict[str, Any]] = {
    "off": {"drafting": False},
    "fixed": {"drafting": True, "draft_policy": "fixed", "draft_length": 5},
    "scheduled": {"drafting": True},
}


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Returns `count` seeded prompts of 4 to 12 ids."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, vocab // 2, draw.integers(4, 13)).tolist() for _ in range(count)]


def check(model: Model, runtime: di.RuntimeConfig) -> None:
    """Compares tokens of a batch with those of lone requests."""
    params = di.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine = Engine(model, runtime)
    some = prompts(5, model.config.vocab_size)
    together = [engine.submit(ids, params) for ids in some]
    engine.drain()
    for ids, request in zip(some, together, strict=True):
        alone = engine.submit(ids, params)
        engine.drain()
        assert alone.output().token_ids == request.output().token_ids, ids


def measure(
    model: Model, requests: int, steps: int, *, text: bool, drafts: str
) -> dict[str, object]:
    """Returns medians over decode steps in which every request has a row."""
    options = DRAFTS[drafts]
    longest = steps if drafts == "off" else 6 * steps  # whatever is accepted, all go on
    runtime = di.RuntimeConfig(
        max_seqs=requests, max_len=longest + 64, max_tokens_per_step=2048, **options
    )
    check(model, di.RuntimeConfig(max_seqs=8, max_len=64, max_tokens_per_step=64, **options))
    engine = Engine(model, runtime)
    engine.warm_up()
    engine.trace.clock = time.thread_time
    params = di.SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True, detokenize=text)
    for ids in prompts(requests, model.config.vocab_size):
        engine.submit(ids, params)
    engine.step()
    engine.step()
    engine.trace.is_on = True
    begin = time.perf_counter()
    for _ in range(steps - 8):
        # Here the device's threads would take the host's cores; on a GPU they do not.
        jax.block_until_ready(engine._device._leaves)
        engine.step()
    wall = (time.perf_counter() - begin) / (steps - 8)
    spans: dict[str, list[float]] = {}
    for name, start, stop, _ in engine.trace.spans:
        spans.setdefault(name, []).append(stop - start)
    engine.abort_all()
    engine.drain()
    parts = {name: median(values) * 1e6 for name, values in spans.items() if name != "wait"}
    return {
        "benchmark": "engine_overhead",
        "device": jax.devices()[0].device_kind,
        "requests": requests,
        "text": text,
        "drafts": drafts,
        "host_us": round(sum(parts.values()), 1),
        **{f"{name}_us": round(value, 1) for name, value in parts.items()},
        "step_ms": round(wall * 1e3, 3),
    }


def planner_us(model: Model, requests: int, drafts: str) -> float:
    """Returns the median microseconds of planning a decode step, one plan after the other."""
    longest = 200 if drafts == "off" else 700
    runtime = di.RuntimeConfig(max_seqs=requests, max_len=longest + 56, **DRAFTS[drafts])
    engine = Engine(model, runtime)
    params = di.SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
    for ids in prompts(requests, model.config.vocab_size):
        engine.submit(ids, params)
    engine.scheduler.plan()
    times = []
    for _ in range(100):
        begin = time.perf_counter()
        engine.scheduler.plan()
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6


def main() -> None:
    """Runs the points of the command line."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--drafts", nargs="+", default=["off"], choices=DRAFTS)
    arguments.add_argument("--model", default=None)
    given = arguments.parse_args()
    tiny = Path(__file__).parent.parent / "tests/fixtures/tiny_v41"
    model = load(given.model or tiny, numerics="float32")
    for requests, drafts in product(given.requests, given.drafts):
        line = {"benchmark": "planner", "requests": requests, "drafts": drafts}
        us = round(planner_us(model, requests, drafts), 1)
        print(json.dumps(line | {"plan_us": us}), flush=True)
        for text in (False, True):
            point = measure(model, requests, given.steps, text=text, drafts=drafts)
            print(json.dumps(point), flush=True)


if __name__ == "__main__":
    main()
