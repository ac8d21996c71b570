"""Host time per step and the idle share of the device, decoding with nano (acceptance C5).

    python -m benchmarks.engine_idle [--requests 64 256] [--steps 100] [--determinism run]

Prompts of 32 ids, all requests of a point decode together at `async_depth` 1. First the tokens are
checked: at level "batch" four requests against lone runs, at the other levels that every request
gave all its tokens, and whether a second run gave the same ones (`same_again`). Then, over decode
steps in which every request has a row, without drafts, one JSON line a point:

    host_us       plan + dispatch + commit, medians of wall time; `*_us` are the parts and the wait,
                  `*_cpu_us` the same in CPU time of the loop's thread, `host_mean_us` the mean.
                  dispatch hands the step to the thread that launches it, whose time is not in it
    step_ms       wall time per step without the profiler; tokens_per_second from it
    fed_step_ms   the same step dispatched again and again with nothing read: what the device needs,
                  or launching its kernels; fed_dispatch_us is what such a call takes the loop
    busy_ms       union of the intervals in which the device ran something, per step, from a
                  profiler trace; host transfers do not count
    idle_share    1 - busy / window of the trace, first to last kernel, of which long_gap_share are
                  gaps above 50 us; profiling itself slows the host (profiled_step_ms)
    idle_share_unprofiled   1 - busy_ms / step_ms

On a GPU XLA switches command buffers off while it is profiled; to see them in the trace set
XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true. On a CPU the "device" is the threads
that run XLA's operations, and the figures say only that this file works.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import jax
import numpy as np

import deepinfer_jax as di
from benchmarks.traces import kernels_by_device, length_and_gaps
from benchmarks.turns import alone
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.sequence import Phase
from deepinfer_jax.loading import load

PROMPT = 32
CHECKED = 16  # output tokens of the first check
FED = 24  # steps dispatched without reading
SLACK = 64  # output tokens beyond the windows: some requests decode while others are prefilled
LONG_GAP_NS = 50_000


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Returns `count` seeded prompts."""
    return np.random.default_rng(0).integers(3, vocab // 2, (count, PROMPT)).tolist()


def rules(tokens: int) -> di.SamplingParams:
    """Returns greedy parameters for exactly `tokens` tokens."""
    return di.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def generate(engine: Engine, asked: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    """Returns the tokens of prompts that run together."""
    requests = [engine.submit(ids, rules(tokens)) for ids in asked]
    engine.drain()
    return [request.output().token_ids for request in requests]


def check(engine: Engine, asked: list[list[int]]) -> dict[str, bool]:
    """Compares the tokens of the load that is measured; compiles the programs it needs."""
    found = generate(engine, asked, CHECKED)
    for ids, tokens in zip(asked, found, strict=True):
        if len(tokens) != CHECKED or not all(0 <= t < engine.config.vocab_size for t in tokens):
            raise SystemExit(f"prompt {ids} gave {tokens}, not {CHECKED} tokens")
    if engine.config.execution.determinism == "batch":
        for ids, tokens in list(zip(asked, found, strict=True))[:4]:
            (alone,) = generate(engine, [ids], CHECKED)
            if alone != tokens:
                raise SystemExit(f"prompt {ids} gave {alone} alone and {tokens} with others")
    return {"same_again": generate(engine, asked, CHECKED) == found}


def settle(engine: Engine) -> None:
    """Waits for everything that was dispatched."""
    jax.block_until_ready(engine._device._leaves)


def window(
    engine: Engine, steps: int, count: int, clock: Callable[[], float]
) -> tuple[float, dict[str, list[float]]]:
    """Runs steps; returns wall seconds per step, and microseconds of every span by name.

    Raises:
        SystemExit: a step had no row for some request.
    """
    engine.trace.clock, engine.trace.is_on = clock, True
    engine.trace.spans.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = (time.perf_counter() - begin) / steps
    engine.trace.is_on = False
    spans: dict[str, list[float]] = {}
    for name, start, stop, details in engine.trace.spans:
        spans.setdefault(name, []).append((stop - start) * 1e6)
        if name == "dispatch" and details["tokens"] != count:
            raise SystemExit(f"a step of {details}, not of {count} decode rows")
    return seconds, spans


def host_times(engine: Engine, steps: int, count: int) -> dict[str, float]:
    """Returns medians of the spans on two clocks, and the wall time per step."""
    seconds, wall = window(engine, steps, count, time.perf_counter)
    _, busy = window(engine, steps, count, time.thread_time)
    work = [name for name in wall if name != "wait"]
    return {
        "host_us": sum(median(wall[name]) for name in work),
        "host_mean_us": sum(mean(wall[name]) for name in work),
        **{f"{name}_us": median(values) for name, values in wall.items()},
        **{f"{name}_cpu_us": median(values) for name, values in busy.items()},
        "step_ms": seconds * 1e3,
        "tokens_per_second": count / seconds,
    }


def fed(engine: Engine) -> dict[str, float]:
    """Dispatches one plan again and again. The host's books are wrong afterwards: abort then."""
    plan = engine.scheduler.plan()
    assert plan is not None, "requests ended too early"
    settle(engine)
    begin = time.perf_counter()
    for _ in range(FED):
        engine._device.dispatch(plan)
    called = time.perf_counter() - begin
    settle(engine)
    seconds = time.perf_counter() - begin
    return {"fed_step_ms": seconds / FED * 1e3, "fed_dispatch_us": called / FED * 1e6}


def profiled(engine: Engine, steps: int, count: int, folder: Path) -> dict[str, float]:
    """Returns how long the device was busy and idle in a trace of `steps` steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0 if jax.default_backend() != "cpu" else 2
    settle(engine)
    with jax.profiler.trace(folder, profiler_options=options):
        seconds, _ = window(engine, steps, count, time.perf_counter)
        settle(engine)
    kernels = next(kernels_by_device(folder), [])
    if not kernels:
        raise SystemExit(f"the trace in {folder} has no operations of the device")
    whole, gaps = length_and_gaps((start, stop) for _, start, stop in kernels)
    return {
        "profiled_step_ms": seconds * 1e3,
        "device_operations": len(kernels) / steps,
        "busy_ms": (whole - gaps.sum()) / steps / 1e6,
        "idle_share": gaps.sum() / whole,
        "long_gap_share": gaps[gaps > LONG_GAP_NS].sum() / whole,
    }


def measure(engine: Engine, count: int, steps: int, folder: Path) -> dict[str, object]:
    """Returns the figures of one point."""
    asked = prompts(count, engine.config.vocab_size)
    found: dict[str, object] = {**check(engine, asked)}
    requests = [engine.submit(ids, rules(output_tokens(steps))) for ids in asked]
    sequences = [sequence for request in requests for sequence in request.sequences]
    while not all(sequence.phase is Phase.RUNNING for sequence in sequences):
        if any(request.is_done for request in requests):
            raise SystemExit(f"{count} requests never ran together: {engine.stats()}")
        engine.step()
    for _ in range(4):
        engine.step()
    times = host_times(engine, steps, count) | profiled(engine, steps, count, folder)
    times["idle_share_unprofiled"] = 1 - times["busy_ms"] / times["step_ms"]
    times |= fed(engine)
    engine.abort_all()
    engine.drain()
    return found | {name: float(f"{value:.5g}") for name, value in times.items()}


def output_tokens(steps: int) -> int:
    """Returns the output tokens that the windows of a point need of every request."""
    return 3 * steps + FED + SLACK


def main() -> None:
    """Prints one line per point."""
    parser = argparse.ArgumentParser(description="Host time and idle share, issue 5 C5")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=100, help="decode steps of every window")
    parser.add_argument("--determinism", default="run", help="a level of `load`")
    parser.add_argument("--numerics", default="checkpoint")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--budget", type=int, default=1024, help="rows of a prompt step")
    parser.add_argument("--trace", type=Path, default=None, help="folder to keep the traces in")
    parser.add_argument("--lock", type=Path, help="a file to lock while something is timed")
    given = parser.parse_args()
    model = load(given.model, numerics=given.numerics, determinism=given.determinism)
    runtime = di.RuntimeConfig(
        max_seqs=max(given.requests),
        max_len=PROMPT + output_tokens(given.steps),
        max_tokens_per_step=given.budget,
        async_depth=given.depth,
        drafting=False,
    )
    engine = Engine(model, runtime)
    engine.warm_up()  # side by side: on a GPU a program takes a minute
    for count in given.requests:
        with tempfile.TemporaryDirectory() as scratch, alone(given.lock):
            folder = (given.trace or Path(scratch)) / f"{count}_requests"
            begin = time.perf_counter()
            figures = measure(engine, count, given.steps, folder)
        line = {
            "benchmark": "engine_idle",
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "model": Path(given.model).name,
            "numerics": given.numerics,
            "determinism": given.determinism,
            "depth": given.depth,
            "requests": count,
            "steps": given.steps,
            **figures,
            "load": round(os.getloadavg()[0], 2),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
