"""How evenly experts are placed: imbalance on held-out steps, what moves when, and planning time.

`python -m benchmarks.eplb [--seeds 5]`: one JSON line for each setting of parallelism.md 4.4, with
the mean and the worst seed; then what an unchanged and a drifted load make `decide` do (4.5).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np

from sharding.eplb.decide import decide, plan_placement
from sharding.eplb.maps import initial_layout
from sharding.eplb.score import imbalance
from sharding.eplb.steps import trace_layout
from sharding.eplb.totals import global_layout, hierarchical_layout
from sharding.eplb.trace import reference_trace

#: Experts, ranks, nodes, exponent, extras.
SETTINGS = (
    (256, 8, 1, 1.0, 0),
    (256, 8, 1, 1.0, 8),
    (256, 8, 1, 1.0, 32),
    (256, 32, 4, 1.0, 32),
    (256, 32, 4, 1.5, 32),
    (384, 64, 8, 0.6, 64),
    (384, 64, 8, 1.0, 0),
    (384, 64, 8, 1.0, 64),
    (384, 64, 8, 1.0, 128),
    (384, 64, 8, 1.5, 64),
)
GROUPS = 8
WINDOW, HELD_OUT = slice(0, 100), slice(100, 200)


def quality(seeds: int) -> Iterator[dict[str, object]]:
    """Yields the held-out imbalance of every policy."""
    for experts, ranks, nodes, exponent, extras in SETTINGS:
        slots = experts + extras
        policies: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "initial": lambda _, e=experts, x=extras, r=ranks: initial_layout(e, x, r),
            "global": lambda t, s=slots, r=ranks: global_layout(t.sum(axis=0), s, r),
            "hierarchical": lambda t, s=slots, r=ranks, n=nodes: hierarchical_layout(
                t.sum(axis=0), s, r, groups=GROUPS, nodes=n
            ),
            "by step": lambda t, s=slots, r=ranks: trace_layout(t, s, r),
            "committed": lambda t, s=slots, r=ranks: plan_placement(t, s, r),
        }
        record: dict[str, object] = {
            "experts": experts,
            "ranks": ranks,
            "exponent": exponent,
            "extras": extras,
        }
        traces = [reference_trace(experts, exponent, seed) for seed in range(seeds)]
        for name, plan in policies.items():
            begin = time.perf_counter()
            layouts = [plan(trace[WINDOW]) for trace in traces]
            seconds = (time.perf_counter() - begin) / seeds
            found = [imbalance(t[HELD_OUT], p, ranks) for t, p in zip(traces, layouts, strict=True)]
            record[name] = {
                "mean": round(float(np.mean(found)), 3),
                "worst": round(max(found), 3),
                "first_seed": round(found[0], 3),
                "plan_ms": round(1e3 * seconds, 2),
            }
        yield record


def decisions(seeds: int) -> Iterator[dict[str, object]]:
    """Yields what `decide` does with an unchanged load, and after the popularity has drifted."""
    experts, ranks, extras = 384, 64, 64
    for seed in range(seeds):
        trace = reference_trace(experts, 1.0, seed)
        rng = np.random.default_rng(seed)
        first = decide(trace[:100], initial_layout(experts, extras, ranks), ranks)
        for load, drift in (("unchanged", 0.0), ("drift 0.3", 0.3), ("drift 1.0", 1.0)):
            rows = np.rint(trace[100:200] * np.exp(drift * rng.normal(size=experts)))
            found = decide(rows, first.layout, ranks)
            yield {
                "seed": seed,
                "load": load,
                "held_out_gain": round(found.gain, 4),
                "moved_slots": found.moved,
                "slots": experts + extras,
                "before": round(found.before, 3),
                "after": round(found.after, 3),
            }


def main() -> None:
    """Prints the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    for record in (*quality(seeds), *decisions(seeds)):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
