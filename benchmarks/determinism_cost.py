"""What do equal bits cost? Levels off, run and batch, end to end and per operation (issue 7, V5).

End to end is the engine on nano without drafts: decoding 64 requests at once, and 64 prompts of 256
tokens. Correctness first: at "batch" tokens of requests that ran alone, per operation the bits of
three rows alone, and every level against stock values. Then one JSON line a point, and at the end
one `ratio` line a point: time at "batch" (or "run") over time at "off".

    python -m benchmarks.determinism_cost [--json OUT] [--png OUT.png] [--seconds 190]

On a CPU one process measures both levels in turn; "run" is there the program of "off". On a GPU
flags decide how kernels are chosen, so every level has a process of its own with the flags that it
needs: none at off, --xla_gpu_deterministic_ops and --xla_gpu_autotune_level=0 at run, the latter at
batch, for each of --row-tiles, and off with that too: ratios are to the faster one. All compile at
once and measure one after the other. --graphs 1 adds processes in which loops and conditions run
inside command buffers (XLA on a GPU waits for the host at every condition otherwise). A process
that fails or is late is reported and left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.turns import alone

REQUESTS, PROMPT, CONTEXT = 64, 256, 96  # CONTEXT: prompt tokens of requests that decode
BUDGET = 2048  # rows of a step
STEPS, WINDOWS = 12, 3  # decode steps of a measurement, measurements
TOKENS = (WINDOWS + 1) * STEPS + 64  # of a decoding request: some wait for others' prompts
CHECKED = 2  # requests that also run alone
POLL_S = 0.2
PIN = "--xla_gpu_autotune_level=0"
ORDERED = f"--xla_gpu_deterministic_ops=true {PIN}"
GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"


@dataclass(frozen=True, slots=True)
class Setting:
    """What one process measures: levels as "off", "run" or "batch:ROWS OF A TILE".

    ops: whether it measures operations too, which takes as long to compile as all the rest.
    """

    name: str
    levels: tuple[str, ...]
    flags: str = ""
    ops: bool = False


def settings(platform: str, tiles: list[int], graphs: bool) -> list[Setting]:
    """Returns the processes of a platform, the most valuable first."""
    if platform == "cpu":
        return [Setting("plain", ("off", "batch:8"), ops=True)]
    ends = (tiles[0], tiles[-1])
    found = [Setting("pinned_off", ("off",), PIN, ops=True)]
    found += [Setting(f"pinned_{one}", (f"batch:{one}",), PIN, ops=one in ends) for one in tiles]
    if graphs:
        flags = f"{PIN} {GRAPHS}"
        found.append(Setting("graphs_off", ("off",), flags))
        found += [Setting(f"graphs_{one}", (f"batch:{one}",), flags) for one in ends]
    return [*found, Setting("plain", ("off",)), Setting("ordered", ("run",), ORDERED)]


class Bench:
    """One level in a child process: model, engine and compiled operations."""

    def __init__(
        self, level: str, source: str, kernels: str | None, counts: tuple[int, ...]
    ) -> None:
        """Compiles everything."""
        from benchmarks.determinism_ops import prepare
        from benchmarks.invariance_gpu import kernels_of
        from deepinfer_jax.config.runtime import RuntimeConfig
        from deepinfer_jax.engine.engine import Engine
        from deepinfer_jax.loading import load

        begin = time.perf_counter()
        self.name, _, tile = level.partition(":")
        self.model = load(source, determinism=self.name, kernels=kernels and kernels_of(kernels))
        if tile:
            execution = replace(self.model.config.execution, row_tile=int(tile))
            config = replace(self.model.config, execution=execution)
            self.model = replace(self.model, config=config)
        self.tile = self.model.config.execution.row_tile
        runtime = RuntimeConfig(
            max_seqs=REQUESTS,
            max_tokens_per_step=BUDGET,
            max_len=max(PROMPT, CONTEXT + TOKENS) + 16,
            prefix_cache=False,
            drafting=False,
            record=None,
        )
        self.engine = Engine(self.model, runtime)
        layouts = [one for one in self.engine.scheduler.limits.layouts if one.rows >= REQUESTS]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.engine._device.compile, layouts))
        self.points = prepare(self.model, self.engine._device.params, counts) if counts else []
        self.compile_s = time.perf_counter() - begin

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
        """Returns the tokens of prompts that run together, greedy."""
        requests = [self.engine.submit(ids, greedy(tokens)) for ids in prompts]
        self.engine.drain()
        return [request.output().token_ids for request in requests]

    def prefill(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Returns seconds of wall and of CPU for prompts of which each gives one token."""
        begin, cpu = time.perf_counter(), time.process_time()
        self.run(prompts, 1)
        return time.perf_counter() - begin, time.process_time() - cpu

    def start_decoding(self, prompts: list[list[int]]) -> None:
        """Runs steps until all requests decode."""
        from deepinfer_jax.engine.sequence import Phase

        requests = [self.engine.submit(ids, greedy(TOKENS)) for ids in prompts]
        sequences = [sequence for request in requests for sequence in request.sequences]
        while not all(sequence.phase is Phase.RUNNING for sequence in sequences):
            self.engine.step()
        self.window(2)

    def window(self, steps: int) -> tuple[float, float]:
        """Returns seconds of wall and of CPU of one step, mean of `steps`."""
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.engine.step()
        self.engine._device.wait()
        return (time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps

    def stop(self) -> None:
        """Ends all requests."""
        self.engine.abort_all()
        self.engine.drain()


def greedy(tokens: int) -> Any:
    """Returns parameters for exactly `tokens` greedy tokens."""
    from deepinfer_jax.sampling.params import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def child(given: argparse.Namespace) -> None:
    """Measures the levels of one process, when it is told to; one line a point."""
    import jax
    import numpy as np

    from deepinfer_jax.environment import code_hash

    folder, name = Path(given.folder), given.child
    counts = tuple(int(one) for one in given.op_rows.split(",") if one)
    levels = given.levels.split(",")
    benches = [Bench(level, given.model, given.kernels, counts) for level in levels]
    common = {
        "benchmark": "determinism_cost",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "code_sha256": code_hash()[:16],
        "model": Path(given.model).name,
        "process": name,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "kernels": dict(benches[0].model.config.execution.kernels),
    }

    def say(bench: Bench, point: str, figures: dict[str, Any]) -> None:
        line = common | {"level": bench.name, "row_tile": bench.tile, "point": point} | figures
        print(json.dumps(line), flush=True)
        with (folder / "lines.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(POLL_S)
    most = benches[0].model.config.vocab_size // 2
    draw = np.random.default_rng(0).integers(3, most, (REQUESTS, PROMPT)).tolist()
    end_to_end(benches, draw, say)
    per_operation(benches, say)


def end_to_end(benches: list[Bench], prompts: list[list[int]], say: Any) -> None:
    """Prints the points of the engine; levels of one process take turns."""
    short, tokens = [ids[:CONTEXT] for ids in prompts], {}
    for bench in benches:
        tokens[bench.name] = bench.run(short, 4)
        lone = [bench.run([ids], 4)[0] for ids in short[:CHECKED]]
        if bench.name == "batch" and lone != tokens["batch"][:CHECKED]:
            raise SystemExit(f"tokens alone {lone} differ from those in company")
        bench.start_decoding(short)
    times: dict[str, list[tuple[float, float]]] = {bench.name: [] for bench in benches}
    for _ in range(WINDOWS):
        for bench in benches:
            times[bench.name].append(bench.window(STEPS))
    for bench in benches:
        bench.stop()
        wall, cpu = (min(column) for column in zip(*times[bench.name], strict=True))
        same = None
        if "off" in tokens:
            pairs = zip(tokens[bench.name], tokens["off"], strict=True)
            same = round(sum(one == other for one, other in pairs) / REQUESTS, 3)
        figures = {"ms": 1e3 * wall, "cpu_ms": 1e3 * cpu, "tokens_per_s": REQUESTS / wall}
        middle = 1e3 * median(one for one, _ in times[bench.name])
        figures = {key: round(value, 2) for key, value in (figures | {"median_ms": middle}).items()}
        figures |= {"compile_s": round(bench.compile_s, 1), "same_tokens_as_off": same}
        say(bench, f"decode {REQUESTS}", figures)
    rounds: dict[str, list[tuple[float, float]]] = {bench.name: [] for bench in benches}
    for bench in benches:
        bench.run(prompts[: BUDGET // PROMPT], 1)
    for _ in range(2):
        for bench in benches:
            rounds[bench.name].append(bench.prefill(prompts))
    for bench in benches:
        wall, cpu = (min(column) for column in zip(*rounds[bench.name], strict=True))
        figures = {"ms": round(1e3 * wall, 1), "cpu_ms": round(1e3 * cpu, 1)}
        figures |= {"tokens_per_s": round(REQUESTS * PROMPT / wall)}
        say(bench, f"prefill {REQUESTS} x {PROMPT}", figures)


def per_operation(benches: list[Bench], say: Any) -> None:
    """Prints the points of operations; levels of one process take turns."""
    import numpy as np

    from benchmarks.determinism_ops import fault, seconds

    for place in range(len(benches[0].points)):
        stock = None
        for bench in benches:
            count, operation, run, alone = bench.points[place]
            params = bench.engine._device.params
            values = np.asarray(run(params, *operation.rows))
            wrong = fault(params, operation, values, stock, alone)
            stock = values if bench.name == "off" else stock
            if wrong is not None:
                say(bench, f"{operation.name}; {count} rows", {"wrong": wrong})
                continue
            took = seconds(lambda run=run, p=params, o=operation: run(p, *o.rows))
            say(bench, f"{operation.name}; {count} rows", {"ms": round(1e3 * took, 4)})


def ratios(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one line a point and setting: its time over that of "off" in the same setting."""

    def graphs(line: dict[str, Any]) -> bool:
        return "COND" in line["xla_flags"]

    lines = [one for one in lines if "ms" in one]
    off: dict[Any, dict[str, Any]] = {}
    for one in (one for one in lines if one["level"] == "off"):
        key = (one["point"], graphs(one))
        off[key] = min(one, off.get(key, one), key=lambda line: line["ms"])
    found = []
    for line in lines:
        base = off.get((line["point"], graphs(line)))
        if line["level"] == "off" or base is None:
            continue
        kept = ("benchmark", "device", "level", "row_tile", "process", "point")
        one = {name: line[name] for name in kept} | {"off_ms": base["ms"], "ms": line["ms"]}
        one["ratio"] = round(line["ms"] / base["ms"], 3)
        if "cpu_ms" in line:
            one["cpu_ratio"] = round(line["cpu_ms"] / base["cpu_ms"], 3)
        found.append(one)
    return found


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: the ratio of every point, one mark a setting."""
    from deepinfer_jax.pictures import new_picture, save_picture

    points = list(dict.fromkeys(line["point"] for line in lines))
    figure, axis = new_picture((8, 1 + 0.25 * len(points)))
    for name in dict.fromkeys((one["level"], one["process"]) for one in lines):
        chosen = [one for one in lines if (one["level"], one["process"]) == name]
        places = [points.index(one["point"]) for one in chosen]
        axis.plot([one["ratio"] for one in chosen], places, "o", label=" ".join(name))
    axis.axvline(1.0, color="0.7", linewidth=0.8)
    axis.set_yticks(range(len(points)), points, fontsize=7)
    axis.set(xlabel='time over that of "off"', xscale="log", ylim=(len(points) - 0.5, -0.5))
    axis.legend(fontsize=7)
    save_picture(figure, path)


def parent(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the processes; returns the lines of all points. What is late is ended."""
    end = time.monotonic() + given.seconds
    module = [sys.executable, "-m", "benchmarks.determinism_cost"]
    with tempfile.TemporaryDirectory() as scratch:
        folder, running = Path(scratch), []
        for one in settings(given.platform, given.row_tiles, bool(given.graphs)):
            if given.only and one.name not in given.only:
                continue
            flags = f"{os.environ.get('XLA_FLAGS', '')} {one.flags}".strip()
            command = [*module, "--child", one.name, "--levels", ",".join(one.levels)]
            command += ["--folder", scratch, "--model", given.model]
            command += ["--kernels", given.kernels] if given.kernels else []
            command += ["--op-rows", given.op_rows if one.ops else ""]
            environment = os.environ | {
                "XLA_FLAGS": flags,
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            }
            running.append((one.name, subprocess.Popen(command, env=environment)))

        def is_compiling(name: str, process: subprocess.Popen) -> bool:
            return process.poll() is None and not (folder / f"{name}.ready").exists()

        patience = time.monotonic() + 0.6 * given.seconds
        while time.monotonic() < patience and any(is_compiling(*one) for one in running):
            time.sleep(POLL_S)
        for name, process in sorted(running, key=lambda one: is_compiling(*one)):
            with alone(given.lock):
                (folder / f"{name}.go").touch()
                try:
                    code = process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    code = "late"
            if code != 0:
                print(json.dumps({"process": name, "failed": code}), flush=True)
        path = folder / "lines.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(arguments: list[str] | None = None) -> None:
    """Prints all lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument(
        "--kernels", help="of every level: NAME or OP=NAME,OP=NAME; without it, those of `load`"
    )
    parser.add_argument(
        "--row-tiles", type=int, nargs="+", default=[64, 512, 2048], help="GPU only"
    )
    parser.add_argument("--op-rows", default="64,2048", help="rows of the operations, with commas")
    parser.add_argument("--only", nargs="+", help="names of processes: the others are left out")
    parser.add_argument("--graphs", type=int, default=1, help="GPU only: 0 leaves them out")
    parser.add_argument("--seconds", type=float, default=190.0, help="processes are ended then")
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--lock", type=Path, help="a file to lock while something is timed")
    for name in ("--child", "--folder", "--levels"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is not None:
        child(given)
        return
    ask = "import jax; print(jax.default_backend())"  # here it would hold the device
    given.platform = subprocess.check_output([sys.executable, "-c", ask], text=True).strip()
    lines = parent(given)
    found = ratios(lines)
    for line in found:
        print(json.dumps(line), flush=True)
    if given.json is not None:
        with given.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in (*lines, *found))
    if given.png is not None:
        plot(found, given.png)


if __name__ == "__main__":
    main()
