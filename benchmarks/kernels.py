"""How fast are the GPU kernels: against the ceilings of this GPU, against XLA, against a peer?

    python -m benchmarks.kernels --json OUT.jsonl [--peers FOLDER] [--only TEXT] [--seconds 240]
                                 [--lock FILE]
    python -m benchmarks.kernels --plot OUT.jsonl --png OUT.png

Correctness comes first: a case is timed after its output was compared with XLA's, three verdicts
apart (equal bits, largest error, NaN and infinities). Times are kernel times by CUPTI, never wall
times of a dispatch, with inputs rotated over buffers larger than the L2 cache; medians of
`--iterations`. `us` adds up all that a call launches, `mosaic_us` our kernels alone. The ceilings
are measured in the same run: a copy (bytes read plus written) and a BF16 product, both on random
data. Where JAX has an op for the purpose, `stock_us` is its time on the same arguments. FOLDER
holds a built DeepGEMM, which is timed in a process of its own (`benchmarks.kernel_peers`). A case
that fails prints its error, and the others go on. The lock FILE is held while something runs on the
GPU, and not while anything compiles, for several of these processes side by side.
"""

import argparse
import importlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.turns import turn

L2_BYTES = 60e6
COPY_BYTES = 2**31
PRODUCT = 8192


def kernel_times(fn: Callable[..., Any], args: tuple, iterations: int) -> list[list[tuple]]:
    """Returns, for every iteration, (kernel name, milliseconds) of all that was launched."""
    from jax.experimental.mosaic.gpu import profiler

    measured: Any = profiler.measure(fn, aggregate=False, iterations=iterations)
    _, times = measured(*args)
    if times is None:
        raise RuntimeError("CUPTI saw no kernel")
    return [times] if iterations == 1 else times


def microseconds(iterations: list[list[tuple]], repeats: int, name: str = "") -> dict[str, float]:
    """Returns median and 10/90 percentiles of kernels whose name contains `name`, per call."""
    spans = sorted(
        sum(span for kernel, span in one if name in kernel) * 1e3 / repeats for one in iterations
    )
    last = len(spans) - 1
    return {
        "us": statistics.median(spans),
        "us_p10": spans[round(0.1 * last)],
        "us_p90": spans[round(0.9 * last)],
    }


def ceilings() -> dict[str, float]:
    """Returns copy bandwidth in bytes/s and the BF16 rate in FLOP/s, on random data."""
    import jax
    import jax.numpy as jnp

    data = jax.random.bits(jax.random.key(0), (COPY_BYTES // 4,), jnp.uint32)
    copy = microseconds(kernel_times(lambda x: x ^ jnp.uint32(1), (data,), 10), 1)
    del data
    x, w = jax.random.normal(jax.random.key(1), (2, PRODUCT, PRODUCT), jnp.bfloat16)
    product = microseconds(kernel_times(lambda a, b: a @ b.T, (x, w), 10), 1)
    return {
        "copy": 2 * COPY_BYTES / copy["us"] * 1e6,
        "bf16": 2 * PRODUCT**3 / product["us"] * 1e6,
    }


def compare(found: Any, expected: Any) -> dict[str, Any]:
    """Returns the three verdicts over all leaves of two outputs."""
    import jax
    import jax.numpy as jnp

    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    equal, error, strange = True, 0.0, 0
    for one, other in pairs:
        equal &= one.dtype == other.dtype and bool(jnp.array_equal(one, other))
        one, other = (x.astype(jnp.float32) for x in (one, other))
        finite = jnp.isfinite(one) & jnp.isfinite(other)
        alike = finite | (jnp.isnan(one) & jnp.isnan(other)) | (one == other)
        strange += int((~alike).sum())
        scale = jnp.sqrt(jnp.mean(jnp.where(finite, other, 0.0) ** 2)) + 1e-30
        error = max(error, float(jnp.max(jnp.where(finite, abs(one - other), 0.0)) / scale))
    return {"equal_bits": equal, "max_error": error, "only_one_finite": strange}


def compiled(fn: Callable[..., Any], sets: list[tuple]) -> Any:
    """Returns the program (*sets) -> [fn(*one), ...]; fn is lowered once for all of them."""
    import jax

    one = jax.jit(fn)
    return jax.jit(lambda *sets: [one(*arguments) for arguments in sets]).lower(*sets).compile()


def run_case(
    op: str, case: Any, limits: dict[str, float], iterations: int, lock: Path | None
) -> dict[str, Any]:
    """Returns the record of one case: verdicts, times, fractions of the ceilings."""
    import jax

    sets = 1 if case.bytes > 4 * L2_BYTES else max(3, math.ceil(L2_BYTES / case.bytes))
    with turn(lock):
        data = [jax.block_until_ready(case.make(seed)) for seed in range(min(sets, 16))]
    record: dict[str, Any] = {"op": op, "case": case.name, "implementation": case.implementation}
    kernel = compiled(partial(case.run, case.implementation), data)
    stock = compiled(case.stock, data) if case.stock else None
    xla = None
    try:
        xla = compiled(partial(case.run, "xla"), data[:1])
    except Exception as error:  # XLA may need more memory than there is; the kernel does not
        record["xla_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    with turn(lock):
        return _timed(record, case, limits, iterations, (kernel, xla, stock), data)


def _timed(
    record: dict[str, Any],
    case: Any,
    limits: dict[str, float],
    iterations: int,
    programs: tuple[Any, Any, Any],
    data: list[tuple],
) -> dict[str, Any]:
    """Returns the record with verdicts, times and fractions; programs: kernel, xla, stock."""
    import jax

    kernel, xla, stock = programs
    found = jax.block_until_ready(kernel(*data))[0]
    expected = None
    if xla is not None:
        try:
            expected = jax.block_until_ready(xla(data[0]))[0]
        except Exception as error:  # as above
            record["xla_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    if expected is None:
        record["correct"] = None
    else:
        record |= compare(found, expected)
        within = record["equal_bits"] if case.tolerance == 0 else None
        if within is None:
            within = record["max_error"] <= case.tolerance
        record["correct"] = bool(within and not record["only_one_finite"])
    del expected, found
    times = kernel_times(kernel, tuple(data), iterations)
    record |= microseconds(times, len(data))
    record["mosaic_us"] = microseconds(times, len(data), "mosaic_gpu")["us"]
    record["kernels"] = sorted({name[:80] for name, _ in times[0]})
    if xla is not None and "xla_error" not in record:
        record["xla_us"] = microseconds(kernel_times(xla, tuple(data[:1]), 3), 1)["us"]
    if stock is not None:
        spans = kernel_times(stock, tuple(data), iterations)
        record["stock_us"] = microseconds(spans, len(data))["us"]
        record["times_as_fast"] = record["stock_us"] / record["us"]
    bound = max(case.bytes / limits["copy"], case.flop / limits["bf16"]) * 1e6
    return record | {
        "flop": case.flop,
        "bytes": case.bytes,
        "tflops": case.flop / record["us"] / 1e6,
        "gbs": case.bytes / record["us"] / 1e3,
        "of_copy": case.bytes / record["us"] * 1e6 / limits["copy"],
        "of_bf16": case.flop / record["us"] * 1e6 / limits["bf16"],
        "roofline_us": bound,
        "of_roofline": bound / record["us"],
        "tolerance": case.tolerance,
    }


def cases(only: str) -> Iterator[tuple[str, Any]]:
    """Yields (op, case) of every covered op, in the order of the tables."""
    from pallas_kernels import COVERED

    for op in sorted(COVERED):
        for case in importlib.import_module(f"pallas_kernels.{op}.arg_specs").bench_cases():
            if only in f"{op} {case.name}":
                yield op, case


def time_peers(folder: Path, shapes: list[tuple[int, int, int]]) -> dict[tuple, dict[str, Any]]:
    """Returns the peer's records by shape; empty where its process fails."""
    names = ["x".join(map(str, shape)) for shape in shapes]
    command = [sys.executable, "-m", "benchmarks.kernel_peers", str(folder), *names]
    # its extension crashes on that image unless the system's C++ library comes first
    preload = subprocess.run(
        ["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True
    ).stdout.strip()
    environment = os.environ | {"LD_PRELOAD": preload}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(json.dumps({"peer": "DeepGEMM", "error": done.stderr[-500:]}), flush=True)
    found = [json.loads(line) for line in lines]
    return {tuple(map(int, record["shape"].split("x"))): record for record in found}


def environment() -> dict[str, Any]:
    """Returns what the figures depend on."""
    import jax

    from deepinfer_jax.environment import code_hash
    from pallas_kernels import COVERED
    from pallas_kernels.tables import tile_hash

    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    return {
        "question": "kernels",
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "device": jax.devices()[0].device_kind,
        "clocks": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "code_sha256": code_hash(),
        "tiles_sha256": {op: tile_hash(op) for op in sorted(COVERED)},
        "data": "random normal",
    }


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Writes bars of each case: its fraction of the roofline, and the peer's time over ours."""
    from deepinfer_jax.pictures import new_picture, save_picture

    timed = [record for record in records if "of_roofline" in record]
    names = [f"{record['op']}: {record['case']}" for record in timed]
    figure, axis = new_picture((10, 1 + 0.28 * len(timed)))
    axis.barh(names, [record["of_roofline"] for record in timed], color="steelblue")
    for place, record in enumerate(timed):
        text = f"{record['us']:.1f} us"
        if record.get("peer_ratio"):
            text += f", {record['peer_ratio']:.2f}x the time of {record['peer']['peer']}"
        if record["correct"] is not True:
            text += ", NOT CORRECT" if record["correct"] is False else ", not compared"
        axis.text(0.01, place, text, va="center", fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.05 * max(1.0, *(record["of_roofline"] for record in timed)))
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("fraction of the roofline measured in the same run (copy, BF16 product)")
    save_picture(figure, path)


def main() -> None:
    """Prints one JSON line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="a built DeepGEMM")
    parser.add_argument("--only", default="", help="cases whose op and name contain this text")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no new case after these")
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    parser.add_argument("--lock", type=Path, help="a file to lock while the GPU runs something")
    parser.add_argument(
        "--plot", type=Path, metavar="JSONL", help="draw a run instead of making one"
    )
    parser.add_argument("--png", type=Path, help="where the picture goes")
    options = parser.parse_args()
    if options.plot:
        if options.png is None:
            parser.error("--plot needs --png")
        lines = options.plot.read_text(encoding="utf-8").splitlines()
        plot([json.loads(line) for line in lines], options.png)
        return
    if shutil.which("nvidia-smi") is None:
        parser.error("kernel times need an NVIDIA GPU, and this machine has none")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    started = time.monotonic()
    chosen = list(cases(options.only))
    shapes = [case.peer for _, case in chosen if case.peer]
    # before this process holds the GPU
    peers = time_peers(options.peers, shapes) if options.peers and shapes else {}
    about = environment()
    with turn(options.lock):
        limits = ceilings()
    records = []

    def put(record: dict[str, Any]) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(line + "\n")

    put(about | {"ceilings": limits})
    for op, case in chosen:
        if time.monotonic() - started > options.seconds:
            put({"op": op, "case": case.name, "skipped": "out of time"})
            continue
        try:
            record = run_case(op, case, limits, options.iterations, options.lock)
        except Exception as error:  # the other cases still count
            put({"op": op, "case": case.name, "error": f"{type(error).__name__}: {error}"[:600]})
            continue
        peer = peers.get(case.peer) if case.peer else None
        if peer:
            record["peer"] = peer
            if peer.get("kernel_us"):
                # its layout pass for the scales is left out on both sides
                record["peer_ratio"] = record["mosaic_us"] / peer["kernel_us"]
        records.append(record)
        put(record)
    put({"after": environment()["clocks"], "seconds": round(time.monotonic() - started)})
    if options.png:
        plot(records, options.png)


if __name__ == "__main__":
    main()
