"""Does the engine work ahead of the device? (issue 5, C2: 20 ms of host sleep, a 30 ms step)

Prompts long enough to fill every step, on tiny_v41; rows of a step are chosen so that the device
needs about 30 ms for it. After every step the host sleeps 20 ms, as a slow reader would. At depth 1
the two overlap, at depth 0 they add up. Tokens are compared before anything is timed. One JSON line
per depth: seconds (best of the rounds), steps, longest = steps x max(device, host), sum.

    python -m benchmarks.engine_depth --rounds 3
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.loading import Model, load
from deepinfer_jax.sampling.params import SamplingParams

TINY = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "tiny_v41"
PROMPT = 250
STEP_S = 0.030
SLEEP_S = 0.020
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def make_engine(model: Model, rows: int, depth: int) -> Engine:
    """Returns a warmed-up engine without a prefix cache and without drafts."""
    runtime = RuntimeConfig(
        block_tokens=16,
        max_len=256,
        max_seqs=8,
        max_tokens_per_step=rows,
        prefix_cache=False,
        drafting=False,
        async_depth=depth,
    )
    engine = Engine(model, runtime)
    engine.warm_up()
    return engine


def run(
    engine: Engine, prompts: list[list[int]], sleep_s: float
) -> tuple[float, int, list[tuple[int, ...]]]:
    """Returns seconds, steps and the tokens of all prompts."""
    requests = [engine.submit(ids, PARAMS) for ids in prompts]
    steps, begin = 0, time.perf_counter()
    while engine.has_work:
        engine.step()
        steps += 1
        if sleep_s:
            time.sleep(sleep_s)
    seconds = time.perf_counter() - begin
    return seconds, steps, [request.output().token_ids for request in requests]


def rows_for(model: Model, prompts: list[list[int]]) -> int:
    """Returns the rows of a step that takes about `STEP_S`."""
    engine = make_engine(model, 64, 0)
    run(engine, prompts, 0.0)
    seconds, steps, _ = run(engine, prompts, 0.0)
    return max(64, 8 * round(64 * STEP_S / (seconds / steps) / 8))


def main() -> None:
    """Prints one line per depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    arguments = parser.parse_args()
    model = load(TINY, numerics="float32")
    draw = np.random.default_rng(0).integers(3, 500, (arguments.prompts, PROMPT))
    prompts = draw.tolist()
    rows = rows_for(model, prompts)
    engines = {depth: make_engine(model, rows, depth) for depth in (0, 1, 2)}
    tokens = {depth: run(engine, prompts, 0.0)[2] for depth, engine in engines.items()}
    best: dict[int, float] = {}
    steps: dict[int, int] = {}
    device_s = float("inf")
    for _ in range(arguments.rounds):  # interleaved, so that all meet the same neighbours
        seconds, count, _ = run(engines[0], prompts, 0.0)
        device_s = min(device_s, seconds / count)
        for depth, engine in engines.items():
            seconds, steps[depth], _ = run(engine, prompts, SLEEP_S)
            best[depth] = min(best.get(depth, seconds), seconds)
    for depth in engines:
        point = {
            "depth": depth,
            "rows": rows,
            "steps": steps[depth],
            "step_ms": round(1e3 * device_s, 2),
            "sleep_ms": 1e3 * SLEEP_S,
            "seconds": round(best[depth], 4),
            "longest": round(steps[depth] * max(device_s, SLEEP_S), 4),
            "sum": round(steps[depth] * (device_s + SLEEP_S), 4),
            "same_tokens": tokens[depth] == tokens[0],
        }
        print(json.dumps(point))


if __name__ == "__main__":
    main()
