"""Does speculation pay, and does the schedule know when? (issue 6, F5)

Requests of nano's corpus, 1, 8, 64 or 256 at a time, at temperature 0 and 1: without drafts, with 1
to 5 drafts verified in every round, and scheduled. All policies of an engine share its programs, so
that only the plans differ. At level "batch" the tokens of every policy are compared with those
without drafts before anything is timed. One JSON line per point, then one per load:

    python -m benchmarks.speculation [--loads 1,8,64,256] [--determinism batch] [--tokens 64]

tokens_per_s: of the best of the rounds. verified, accepted: per position of the round, of all
rounds. ratio: to drafts off at the same load. best_fixed: the best fixed length; scheduled may be
3 % slower at most.
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from benchmarks.turns import alone
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.draft_policy import DraftPolicy
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.loading import Model, load
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.training.corpus import make_item, prompt_text

TASKS = ("story", "extraction", "arithmetic", "question", "talk")


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of a load."""

    seconds: float
    tokens: list[tuple[int, ...]]
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    rounds: int


def prompts_of(model: Model, count: int) -> list[list[int]]:
    """Returns prompts of the test split, tasks in turn."""
    assert model.tokenizer is not None
    items = [make_item(TASKS[i % len(TASKS)], split="test", seed=41, index=i) for i in range(count)]
    texts = [prompt_text(item) for item in items]
    return [e.ids for e in model.tokenizer.encode_batch(texts, add_special_tokens=False)]


def run(engine: Engine, prompts: list[list[int]], load: int, params: SamplingParams) -> Run:
    """Runs all prompts, `load` at a time."""
    before = engine.stats()
    waiting = [(i, ids) for i, ids in enumerate(prompts)][::-1]
    requests, running = [], 0
    begin = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and running < load:
            number, ids = waiting.pop()
            requests.append(engine.submit(ids, replace(params, seed=number)))
            running += 1
        running -= len(engine.step())
    seconds = time.perf_counter() - begin
    after = engine.stats()
    return Run(
        seconds=seconds,
        tokens=[request.output().token_ids for request in requests],
        verified=_difference(after.verified, before.verified),
        accepted=_difference(after.accepted, before.accepted),
        rounds=after.rounds - before.rounds,
    )


def _difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.subtract(after, before).tolist())


def compile_all(engines: Sequence[Engine]) -> float:
    """Compiles all programs of the engines side by side; returns seconds."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        pairs = [(one, layout) for one in engines for layout in one.layouts]
        list(pool.map(lambda pair: pair[0].device.compile(pair[1]), pairs))
    for engine in engines:
        engine.warm_up()
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> None:
    """Runs all loads and prints their lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--loads", default="1,8,64,256")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--determinism", default="batch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=0, help="of a load; 0: max(16, 2 x load)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", type=Path, default=None, help="folder of measured step times")
    parser.add_argument("--lock", type=Path, help="a file to lock while something is timed")
    chosen = parser.parse_args(arguments)
    loads = [int(n) for n in chosen.loads.split(",")]
    model = load(chosen.model, determinism=chosen.determinism)
    for count in loads:
        measure_load(model, count, chosen)


def measure_load(model: Model, count: int, chosen: argparse.Namespace) -> None:
    """Prints the lines of one load: an engine without drafts, one with, of the same size."""
    runtime = RuntimeConfig(
        max_seqs=count, max_tokens_per_step=max(256, count), max_len=512, prefix_cache=False
    )
    engines = {on: Engine(model, replace(runtime, drafting=on)) for on in (False, True)}
    compile_s = compile_all(list(engines.values()))
    with alone(chosen.lock):
        compare(model, engines, count, compile_s, chosen)


def compare(
    model: Model,
    engines: dict[bool, Engine],
    count: int,
    compile_s: float,
    chosen: argparse.Namespace,
) -> None:
    """Times all policies of one load. engines: by whether they draft."""
    note = engines[True].profile(chosen.profile)
    scheduled = engines[True].scheduler.policy
    size = scheduled.size
    policies = {"off": (False, engines[False].scheduler.policy)}
    policies |= {f"fixed {n}": (True, DraftPolicy(size=size, most=n)) for n in range(1, size + 1)}
    policies["scheduled"] = (True, scheduled)
    prompts = prompts_of(model, chosen.requests or max(16, 2 * count))
    common = {
        "benchmark": "speculation",
        "model": chosen.model,
        "determinism": chosen.determinism,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "load": count,
        "requests": len(prompts),
    }
    for temperature in map(float, chosen.temperatures.split(",")):
        params = SamplingParams(temperature=temperature, max_tokens=chosen.tokens)
        best: dict[str, Run] = {}
        for turn in range(chosen.rounds):
            for name, (on, policy) in policies.items():
                engines[on].scheduler.policy = policy
                found = run(engines[on], prompts, count, params)
                if chosen.determinism == "batch" and name != "off":
                    assert found.tokens == best["off"].tokens, f"{name} changed tokens"
                if turn == 0 or found.seconds < best[name].seconds:
                    best[name] = found
        rates = {k: sum(map(len, r.tokens)) / r.seconds for k, r in best.items()}
        for name, found in best.items():
            line = common | {"temperature": temperature, "policy": name}
            line |= {"tokens_per_s": round(rates[name], 1), "rounds": found.rounds}
            line |= {"ratio": round(rates[name] / rates["off"], 3)}
            line |= {"verified": found.verified, "accepted": found.accepted}
            print(json.dumps(line), flush=True)
        fixed = max((k for k in rates if k.startswith("fixed")), key=lambda k: rates[k])
        print(
            json.dumps(
                common
                | {
                    "temperature": temperature,
                    "best_fixed": fixed,
                    "scheduled_to_best_fixed": round(rates["scheduled"] / rates[fixed], 3),
                    "scheduled_to_off": round(rates["scheduled"] / rates["off"], 3),
                    "compile_s": round(compile_s, 1),
                    "step_times": note.split(" ")[2],
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
