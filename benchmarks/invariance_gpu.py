"""Does level "batch" hold on a GPU? 50 random compositions of nano, bit by bit (issue 7, V1).

Each composition runs a sequence in random chunks, beside 0 to 5 neighbours, now and then its twin,
with rows mixed, in any slot, in half of the runs behind a prefix hit with restored
windows, with 0 to 5 drafts a round of which some are rejected, mostly in a cache that began full of
NaN. The logits of every position are compared as integers with those of the lone run: one call,
nobody else, a clean cache. A control with one flipped weight bit must be noticed, or all is void.

    python -m benchmarks.invariance_gpu [--runs 50] [--seconds 140] [--row-tile 64] [--json OUT]
        [--kernels OP=NAME,OP=NAME]

One JSON line per seed and one for all of them, at the end or when the time is over: then `complete`
is false, and the counts are of what ran. On differing bits the first one's layer and operation are
looked for, which compiles once more, and the exit code is 1. Choices of kernels are pinned first
(--xla_gpu_autotune_level=0 is added to XLA_FLAGS if nothing pins them).
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

PIN = "--xla_gpu_autotune_level=0"
A_SEED = 5  # compositions of one seed, that is of one set of sequences


def pin_kernels() -> None:
    """Pins the choice of kernels, unless XLA_FLAGS does. Before JAX looks at its devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags and "load_autotune_results_from" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {PIN}".strip()


def kernels_of(text: str) -> str | dict[str, str]:
    """Returns what `load` takes for NAME or OP=NAME,OP=NAME."""
    if "=" not in text:
        return text
    pairs = (part.partition("=") for part in text.split(","))
    return {op: name for op, _, name in pairs}


def facts(model: Any) -> dict[str, Any]:
    """Returns what every line says of where it was measured."""
    import jax

    from deepinfer_jax.environment import code_hash

    return {
        "benchmark": "invariance_gpu",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "code_sha256": code_hash()[:16],
        "model": Path(model.source).name,
        "numerics": model.config.execution.numerics,
        "level": model.config.execution.determinism,
        "row_tile": model.config.execution.row_tile,
        "kernels": dict(model.config.execution.kernels),
    }


def figures(report: Any) -> dict[str, Any]:
    """Returns the counts of a report, its control apart."""
    rows = [row for row in report.rows if not row.expects_difference]
    found: dict[str, Any] = {
        name: sum(getattr(row, name) for row in rows) for name in ("runs", "positions", "differing")
    }
    controls = [row for row in report.rows if row.expects_difference]
    if controls:
        found["control_noticed"] = all(row.differing > 0 for row in controls)
    first = next((str(row.first) for row in rows if row.first is not None), None)
    return found | ({} if first is None else {"first": first})


def measure(model: Any, given: argparse.Namespace, say: Any) -> bool:
    """Prints the lines; returns whether all bits were equal and the control was noticed."""
    from deepinfer_jax.invariance.control import CONTROL
    from deepinfer_jax.invariance.runner import verify_invariance

    begin, common = time.perf_counter(), facts(model)
    total = {"runs": 0, "positions": 0, "differing": 0}
    noticed, failed = False, []
    for number, start in enumerate(range(0, given.runs, A_SEED)):
        if number and time.perf_counter() - begin > given.seconds:
            break
        cases = [f"random={min(A_SEED, given.runs - start)}"]
        cases += [] if number else [CONTROL]
        report = verify_invariance(model, cases=cases, seed=given.seed + number, locate=False)
        found = figures(report)
        noticed |= found.get("control_noticed", False)
        total = {name: total[name] + found[name] for name in total}
        failed += [given.seed + number] if found["differing"] else []
        say({"seed": given.seed + number, **found, "seconds": round(report.seconds, 1)})
    for name in given.also.split(";") if given.also else []:
        if time.perf_counter() - begin > given.seconds:
            say({"case": name, "skipped": f"the {given.seconds:g} s were over"})
            continue
        report = verify_invariance(model, cases=[name], seed=given.seed, locate=False)
        found = figures(report)
        total["differing"] += found["differing"]
        say({"case": name, **found, "seconds": round(report.seconds, 1)})
    is_equal = noticed and not total["differing"] and total["positions"] > 0
    summary = {**common, **total, "control_noticed": noticed, "is_equal": is_equal}
    summary |= {"complete": total["runs"] >= given.runs}
    say(summary | {"seconds": round(time.perf_counter() - begin, 1)})
    if failed and time.perf_counter() - begin < given.seconds:
        where = verify_invariance(model, cases=[f"random={A_SEED}"], seed=failed[0])
        say({"seed": failed[0], "located": figures(where).get("first")})
    return is_equal


def main(arguments: list[str] | None = None) -> None:
    """Runs the compositions and prints their lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--numerics", default="checkpoint")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="begin nothing after that time"
    )
    parser.add_argument("--row-tile", type=int, help="rows of a tile, instead of load's choice")
    parser.add_argument(
        "--kernels", type=kernels_of, help="as of `load`, whose default it has: NAME or OP=NAME,..."
    )
    parser.add_argument("--also", default="", help="further cases of `verify`, 'NAME;NAME=RUNS'")
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    given = parser.parse_args(arguments)
    pin_kernels()
    from deepinfer_jax.loading import load

    def say(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if given.json is not None:
            with given.json.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    begin = time.perf_counter()
    model = load(given.model, numerics=given.numerics, determinism="batch", kernels=given.kernels)
    if given.row_tile is not None:
        execution = replace(model.config.execution, row_tile=given.row_tile)
        model = replace(model, config=replace(model.config, execution=execution))
    given.seconds -= time.perf_counter() - begin
    if not measure(model, given, say):
        sys.exit(1)


if __name__ == "__main__":
    main()
