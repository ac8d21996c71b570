"""Does the sharded step hold, and scale, on several GPUs of one host? (issue 15)

    python -m benchmarks.multi_gpu --json OUT.jsonl [--parts a,b,c,d] [--seconds 540] [--small]
    python -m benchmarks.multi_gpu --figure OUT.jsonl PICTURE.png
    python -m benchmarks.multi_gpu --support OUT.jsonl

On all visible GPUs; with --small, where there is none, on `--devices` emulated CPU devices.
a: the collectives of a decode and a prefill step alone, found in the traced step, beside NVLink.
b: nano whole, and eight layers at real sizes with 64 experts and random weights, on every mesh:
   bits of the logits against one GPU at level "batch". One weight bit flipped must be noticed.
c: four such layers, decode (rows per device fixed, 16,384 tokens each) and prefill (8,192 tokens a
   replica) per mesh at level "off": efficiency against one GPU, share of collectives, and `plan`'s
   prediction, as it is and given the time of one GPU.
d: EPLB under a skewed router: imbalance and step time before and after, bits unchanged.

Every point runs in a process of its own. All compile side by side from shapes; what runs on the
devices does so under one lock, so that measurements are alone. One JSON line a point, appended as
it comes. Nothing new is begun after --seconds, and what is left 20 s later is ended.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu_report import derived, draw, write_support

PIN = "--xla_gpu_autotune_level=0"
#: Multicast can put GPUs of a host that others share out of service.
KEPT_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
GRACE = 20.0
#: Of `multi_gpu_times.cases_of`, at real sizes and in a dry run.
CASES = {
    False: ("decode 128 a device", "prefill", "decode 32 a device"),
    True: ("decode 8 a device", "prefill"),
}
Task = dict[str, Any]


def meshes(devices: int) -> list[dict[str, int]]:
    """Returns every (er, dp, cp) over all devices or a divisor of them, the most wanted first."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [
        {"er": er, "dp": dp, "cp": cp}
        for er, dp, cp in product(sizes, repeat=3)
        if er * dp * cp > 1 and devices % (er * dp * cp) == 0
    ]

    named = [{axis: size for axis, size in mesh.items() if size > 1} for mesh in found]
    order = ("dp", "cp", "er")

    def wanted(mesh: dict[str, int]) -> tuple[Any, ...]:
        used = prod(mesh.values())
        return (-used, len(mesh), order.index(next(iter(mesh))), str(mesh))

    return sorted(named, key=wanted)


def tasks_of(parts: str, devices: int, *, small: bool = False) -> list[Task]:
    """Returns the points, those that take longest to compile and matter most first."""
    every = meshes(devices)
    pure = [mesh for mesh in every if len(mesh) == 1 and devices in mesh.values()]
    apart = [mesh for mesh in pure if "er" not in mesh]
    nano: list[Task] = [
        {"run": "nano_bits", "what": f"nano {kind}", "kind": kind, "mesh": mesh, "part": "b"}
        for mesh in ({}, *every)
        for kind in ("engine", "cached", "forms")
    ]

    def points(part: str, run: str, level: str, kernels: str, some: Any) -> list[Task]:
        return [
            {"part": part, "run": run, "what": "slice", "level": level, "kernels": kernels}
            | {"mesh": mesh}
            for mesh in some
        ]

    def steps(level: str, some: Any) -> list[Task]:
        found = points("c", "throughput", level, "fast", some)
        return [one | {"case": case} for one in found for case in CASES[small]]

    first: list[Task] = [
        {"part": "c", "run": "warm", "what": "slice", "level": "off", "kernels": "fast"}
        | {"mesh": {}, "meshes": [{}, *pure]}
    ]
    first += steps("off", ({}, *pure))
    first += points("a", "collectives", "off", "fast", apart)
    first += points("b", "slice_bits", "batch", "load", ({}, *every))
    first += points("d", "eplb_times", "off", "fast", pure[:1])
    nano = [one | {"level": "batch", "kernels": "load"} for one in nano]
    first += points("b", "bucket_bits", "batch", "load", ({},))
    later = points("d", "eplb_bits", "batch", "load", pure[:1])
    later += steps("off", [mesh for mesh in every if mesh not in pure])
    later += steps("batch", ({}, *pure[:1]))
    every_task: list[Task] = [*first, *nano, *later]
    found = [task for task in every_task if task["part"] in parts.split(",")]
    for task in found:
        shape = "-".join(f"{axis}{size}" for axis, size in task["mesh"].items()) or "one"
        kind = task.get("kind") or task.get("case", "").replace(" ", "-") or task["what"]
        task["name"] = "_".join((task["run"], kind, task["kernels"], task["level"], shape))
    return found


def run_task(given: argparse.Namespace) -> None:
    """Runs one point in this process; its lines go to a file beside the others'."""
    task = json.loads(given.task)
    out = given.scratch / f"{task['name']}.jsonl"
    begin = time.time()
    from benchmarks import multi_gpu_bits, multi_gpu_times, turns

    def put(line: dict[str, Any]) -> None:
        took = {"since_start": round(time.time() - begin, 1), "phase_seconds": work.took}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | took) + "\n")

    lock = given.scratch / "lock"
    work = turns.Work(put=put, folder=given.scratch, lock=lock, until=given.until,
                               small=given.small, devices=given.devices)  # fmt: skip
    try:
        kind = multi_gpu_times if hasattr(multi_gpu_times, task["run"]) else multi_gpu_bits
        getattr(kind, task["run"])(work, task)
    except Exception as error:  # recorded: the other points still count
        traceback.print_exc()
        put({"point": task["run"], "error": f"{type(error).__name__}: {error}"[:900]})


def about(small: bool, devices: int) -> dict[str, Any]:
    """Returns the machine as a process of its own sees it; this one takes no device memory."""
    asked = (
        "import json, jax; d = jax.devices(); "
        "from deepinfer_jax.environment import code_hash; "
        "print(json.dumps({'device': d[0].device_kind, 'devices': len(d), "
        "'platform': jax.default_backend(), 'jax': jax.__version__, "
        "'code_sha256': code_hash()[:16]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env=environment(small, devices),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"no device answers: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def environment(emulated: bool, devices: int) -> dict[str, str]:
    """Returns the environment of the points: what is set stays as it is."""
    found = dict(os.environ)
    for name, value in KEPT_OFF.items():
        found.setdefault(name, value)
    flags = found.get("XLA_FLAGS", "")
    if emulated:
        found["JAX_PLATFORMS"] = "cpu"
        flags += f" --xla_force_host_platform_device_count={devices}"
    elif "xla_gpu_autotune_level" not in flags:
        flags += f" {PIN}"
    return found | {"XLA_FLAGS": flags.strip()}


def lines_of(path: Path, seen: dict[Path, int]) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a file that were not seen yet."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    for line in whole[seen.get(path, 0) :].splitlines():
        yield json.loads(line)
    seen[path] = len(whole)


def run_all(given: argparse.Namespace) -> None:
    """Runs all points and appends their lines, and what follows from two of them."""
    begin = time.time()
    has_gpu = Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()
    emulated = given.small and not has_gpu
    machine = about(emulated, given.devices)
    env = environment(emulated, given.devices)
    common = {"benchmark": "multi_gpu"} | machine
    common |= {"small": given.small, "xla_flags": env["XLA_FLAGS"]}
    common |= {name: env[name] for name in KEPT_OFF if name.startswith("NCCL")}
    chosen = given.only.split(",")
    waiting = [
        task
        for task in tasks_of(given.parts, machine["devices"], small=given.small)
        if any(part in task["name"] for part in chosen)
    ]
    records: list[dict[str, Any]] = []
    told: set[str] = set()
    seen: dict[Path, int] = {}

    def put(line: dict[str, Any]) -> None:
        took = {"seconds": round(time.time() - begin, 1)}
        text = json.dumps(common | line | took)
        print(json.dumps(line | took)[:400], flush=True)
        with given.json.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    with contextlib.ExitStack() as stack:
        scratch = Path(given.scratch or stack.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(exist_ok=True, parents=True)
        (scratch / "lock").touch()
        running: list[tuple[Task, subprocess.Popen[bytes]]] = []
        while waiting or running:
            now = time.time() - begin
            if now > given.seconds:
                for task in waiting:
                    put({"part": task["part"], "mesh": task["mesh"], "point": task["name"],
                         "skipped": "out of time"})  # fmt: skip
                waiting = []
            while waiting and len(running) < given.processes:
                task = waiting.pop(0)
                running.append((task, _start(given, scratch, env, task, begin)))
            for task, process in list(running):
                ended = process.poll() is not None
                for line in lines_of(scratch / f"{task['name']}.jsonl", seen):
                    keys = ("part", "mesh", "kernels", "level", "name")
                    line = {key: task[key] for key in keys} | line
                    records.append(line)
                    put({key: value for key, value in line.items() if key != "file"})
                if not ended and now > given.seconds + GRACE:
                    process.kill()
                    process.wait()
                    put({"part": task["part"], "mesh": task["mesh"], "point": task["name"],
                         "error": "not done in time, ended"})  # fmt: skip
                    running.remove((task, process))
                elif ended:
                    running.remove((task, process))
                    if process.returncode:
                        log = (scratch / f"{task['name']}.log").read_text(errors="replace")
                        put({"part": task["part"], "mesh": task["mesh"], "point": task["name"],
                             "error": f"exit {process.returncode}: {log[-700:]}"})  # fmt: skip
            for name, line in derived(records):
                if name not in told:
                    told.add(name)
                    put(line)
            time.sleep(0.5)


def _start(
    given: argparse.Namespace, scratch: Path, env: dict[str, str], task: Task, begin: float
) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.multi_gpu"]
    words += ["--task", json.dumps(task), "--scratch", str(scratch)]
    words += ["--until", str(begin + given.seconds), "--devices", str(given.devices)]
    words += ["--small"] if given.small else []
    with (scratch / f"{task['name']}.log").open("wb") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


def main(arguments: list[str] | None = None) -> None:
    """Runs the points, draws the figure, or updates support.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--parts", default="a,b,c,d")
    parser.add_argument("--only", default="", help="points whose name holds one of these")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing after these")
    parser.add_argument("--small", action="store_true", help="nano's sizes")
    parser.add_argument("--devices", type=int, default=2, help="to emulate with --small")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    parser.add_argument("--scratch", type=Path, help="a folder for logs and digests, kept")
    parser.add_argument("--figure", type=Path, nargs=2, metavar=("JSONL", "PNG"))
    parser.add_argument("--support", type=Path, metavar="JSONL", help="update support.json")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.task:
        run_task(given)
    elif given.figure:
        draw(*given.figure)
    elif given.support:
        print(write_support(given.support))
    elif given.json:
        run_all(given)
    else:
        parser.error("--json, --figure or --support is needed")


if __name__ == "__main__":
    main()
