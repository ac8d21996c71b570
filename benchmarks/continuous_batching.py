"""Continuous against static batches, and one request in a wide engine (acceptance C6, CPU).

`python benchmarks/continuous_batching.py [--model nano] [--requests 256] [--slots 64]` prints JSON
lines. Nothing is drafted, so that a step gives one token. All schedules produce the same tokens,
which is checked. "static": batches of fixed shape, as a plain generate loop runs them: every
sequence has a row in every step until the last one of its batch has ended. "waves": the same
batches in the engine, which drops the rows of ended sequences. Output lengths are Zipf distributed
between 8 and 256, from the seed in this file.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.request import Request
from deepinfer_jax.loading import Model, load
from deepinfer_jax.model.cached import make_plan

SEED = 7
Job = tuple[list[int], di.SamplingParams]


def jobs(count: int, vocab: int, shortest: int = 8, longest: int = 256) -> list[Job]:
    """Returns greedy requests with Zipf distributed output lengths."""
    draw = np.random.default_rng(SEED)
    weight = 1.0 / np.arange(shortest, longest + 1)
    lengths = draw.choice(np.arange(shortest, longest + 1), count, p=weight / weight.sum())
    return [
        (
            draw.integers(3, vocab // 2, draw.integers(8, 65)).tolist(),
            di.SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True, detokenize=False),
        )
        for n in lengths
    ]


def continuous(engine: Engine, work: list[Job]) -> list[Request]:
    """Queues all requests at once."""
    requests = [engine.submit(ids, params) for ids, params in work]
    engine.drain()
    return requests


def waves(engine: Engine, work: list[Job]) -> list[Request]:
    """Runs batch after batch."""
    slots, requests = engine.runtime.max_seqs, []
    for start in range(0, len(work), slots):
        requests += continuous(engine, work[start : start + slots])
    return requests


def static(model: Model, slots: int, work: list[Job]) -> tuple[list[tuple[int, ...]], dict]:
    """Returns tokens and figures of batches of fixed shape over the pure functions."""
    config, runtime = model.config, di.RuntimeConfig(max_seqs=slots, max_len=512)
    image = config.image_token_id  # the engine never emits it either

    @jax.jit
    def choose(logits: jax.Array) -> jax.Array:
        if image is not None:
            logits = logits.at[:, image].set(-jnp.inf)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    tokens: list[tuple[int, ...]] = []
    steps = rows = 0
    seconds = 0.0
    for timed in (False, True):  # the first round compiles
        tokens, steps, rows, begin = [], 0, 0, time.perf_counter()
        for start in range(0, len(work) if timed else slots, slots):
            batch = work[start : start + slots]
            state = di.init_state(config, runtime)
            flat = [(t, i, s) for s, (ids, _) in enumerate(batch, 1) for i, t in enumerate(ids)]
            last = np.cumsum([len(ids) for ids, _ in batch]) - 1
            ids, position, slot = (list(column) for column in zip(*flat, strict=True))
            plan = make_plan(config, ids, position, slot, length=slots * 64 + 8, rows=last)
            state, out = di.prefill(model.params, config, state, plan)
            newest = [np.asarray(choose(out.logits))]
            where = np.asarray([len(ids) for ids, _ in batch])
            longest = max(params.max_tokens for _, params in batch) if timed else 4
            for _ in range(longest - 1):
                order = np.arange(1, len(batch) + 1)
                plan = make_plan(config, newest[-1], where, order, rows=order - 1)
                state, out = di.decode(model.params, config, state, plan)
                newest.append(np.asarray(choose(out.logits)))
                where = where + 1
            columns = np.stack(newest, axis=1)
            tokens += [
                tuple(row[: p.max_tokens].tolist())
                for row, (_, p) in zip(columns, batch, strict=True)
            ]
            steps += longest
            rows += len(flat) + (longest - 1) * len(batch)
        seconds = time.perf_counter() - begin
    used = sum(len(ids) + p.max_tokens - 1 for ids, p in work)
    return tokens, {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(map(len, tokens)) / seconds, 1),
        "steps": steps,
        "rows_computed_over_used": round(rows / used, 3),
    }


def run(
    schedule: Callable[[Engine, list[Job]], list[Request]],
    model: Model,
    slots: int,
    work: list[Job],
) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Returns tokens and figures of one schedule in a fresh engine without a prefix cache."""
    runtime = di.RuntimeConfig(max_seqs=slots, max_len=512, prefix_cache=False, drafting=False)
    engine = Engine(model, runtime)
    engine.warm_up()
    begin = time.perf_counter()
    requests = schedule(engine, work)
    seconds = time.perf_counter() - begin
    tokens = [request.output().token_ids for request in requests]
    counters = engine.stats().counters
    used = sum(len(ids) + len(out) - 1 for (ids, _), out in zip(work, tokens, strict=True))
    return tokens, {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(map(len, tokens)) / seconds, 1),
        "steps": counters["steps"],
        "rows_computed_over_used": round(counters["tile_rows"] / used, 3),
    }


def lone_latency(model: Model, slots: tuple[int, ...], rounds: int = 5) -> list[float]:
    """Returns the milliseconds a token of one request in engines of so many slots.

    The engines take turns, so that a busy machine slows all of them; the median of all steps.
    """
    runtimes = [di.RuntimeConfig(max_seqs=n, max_len=512, drafting=False) for n in slots]
    engines = [Engine(model, runtime) for runtime in runtimes]
    times: list[list[float]] = [[] for _ in slots]
    params = di.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for engine in engines:
        engine.warm_up()
    for _ in range(rounds):
        for engine, found in zip(engines, times, strict=True):
            stamps: list[float] = []
            engine.submit(
                list(range(5, 21)), params, sink=lambda _, s=stamps: s.append(time.perf_counter())
            )
            engine.drain()
            found += np.diff(stamps).tolist()
    return [float(median(found)) * 1e3 for found in times]


def main() -> None:
    """Runs the points of the command line."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", default="nano")
    arguments.add_argument("--numerics", default="checkpoint")
    arguments.add_argument("--requests", type=int, default=256)
    arguments.add_argument("--slots", type=int, default=64)
    given = arguments.parse_args()
    model = load(given.model, numerics=given.numerics)
    work = jobs(given.requests, model.config.vocab_size)
    found: dict[str, tuple[list[tuple[int, ...]], dict[str, float]]] = {}
    found["static"] = static(model, given.slots, work)
    found["waves"] = run(waves, model, given.slots, work)
    found["continuous"] = run(continuous, model, given.slots, work)
    tokens, best = found["continuous"]
    for name, (ids, figures) in found.items():
        assert ids == tokens, f"{name} gave other tokens"
        ratio = best["tokens_per_second"] / figures["tokens_per_second"]
        line = {"schedule": name, **figures, "continuous_over_this": round(ratio, 3)}
        print(json.dumps({"benchmark": "continuous_batching", "model": given.model, **line}))
    one, many = lone_latency(model, (1, given.slots))
    line = {"ms_max_seqs_1": round(one, 3), f"ms_max_seqs_{given.slots}": round(many, 3)}
    print(json.dumps({"benchmark": "lone_request", **line, "ratio": round(many / one, 3)}))


if __name__ == "__main__":
    main()
