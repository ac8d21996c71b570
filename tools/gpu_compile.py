"""Compiles every GPU kernel to machine code without a GPU, and holds what ptxas says to a table.

    python tools/gpu_compile.py            one process per architecture; exits 1 on any failure
    python tools/gpu_compile.py --write    the same, then rewrites pallas_kernels/compiled.txt
    python tools/gpu_compile.py --arch sm_90 [--only TEXT]    one architecture; prints its rows

The environment needs jax and the wheels of the extra gpu-compile (kernels.md 2.2); `make
test-gpu-compile` makes it. A kernel fails when it does not compile, spills without a reason in
`MAY_SPILL` or more than the table says, takes more shared memory, brings a new compiler warning, or
is not in the table. One process serves one architecture only: ptxas refuses the second.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "pallas_kernels" / "compiled.txt"
ARCHS = {"sm_90": (9, 0), "sm_100": (10, 0)}
HEADER = ("arch", "op", "case", "kernel", "registers", "spills", "stack", "smem", "warnings")

_TARGET = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32
 shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
 core_count: {sms} fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: 1.98
 device_memory_size: {memory} shared_memory_per_block_optin: 232448
 cuda_compute_capability {{ major: {major} minor: 0 feature_extension: ACCELERATED_FEATURES }}
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "{name}" """
_DEVICES = {
    "sm_90": {
        "name": "NVIDIA H200",
        "major": 9,
        "sms": 132,
        "bandwidth": 4_800_000_000_000,
        "l2": 52_428_800,
        "memory": 150_000_000_000,
    },
    "sm_100": {
        "name": "NVIDIA B200",
        "major": 10,
        "sms": 148,
        "bandwidth": 8_000_000_000_000,
        "l2": 132_120_576,
        "memory": 190_000_000_000,
    },
}
#: (op, case) -> why this kernel may spill; any other kernel fails if it does.
MAY_SPILL: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """What ptxas says about one kernel of one case; bytes, and registers per thread at launch."""

    arch: str
    op: str
    case: str
    kernel: str
    registers: int
    spills: int
    stack: int
    smem: int
    warnings: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Returns what the row is about."""
        return self.arch, self.op, self.case, self.kernel


def faults(rows: list[Row], table: list[Row]) -> list[str]:
    """Returns why the rows of a run do not hold to the table, one sentence each."""
    known = {row.key: row for row in table}
    found = []
    for row in rows:
        where = f"{row.arch} {row.op} {row.case}: {row.kernel}"
        old = known.get(row.key)
        if old is None:
            found.append(f"{where}: not in {TABLE.name}: run tools/gpu_compile.py --write")
            continue
        found += [
            f"{where}: {name} {getattr(row, name)} bytes, the table has {getattr(old, name)}"
            for name in ("spills", "stack", "smem")
            if getattr(row, name) > getattr(old, name)
        ]
        if (row.spills or row.stack) and (row.op, row.case) not in MAY_SPILL:
            found.append(f"{where}: spills {row.spills} bytes, and MAY_SPILL has no reason for it")
        if set(row.warnings.split(",")) - set(old.warnings.split(",")):
            found.append(f"{where}: warnings {row.warnings}, the table has {old.warnings}")
    archs, keys = {row.arch for row in rows}, {row.key for row in rows}
    found += [
        f"{' '.join(key)}: in the table, not compiled any more: run tools/gpu_compile.py --write"
        for key in known
        if key[0] in archs and key not in keys
    ]
    return found


def parse_ptxas(text: str) -> list[dict[str, Any]]:
    """Returns what a ptxas report says about each kernel: name, registers, spills, stack, ..."""

    def last(pattern: str, block: str) -> int:
        return int((re.findall(pattern, block) or ["0"])[-1])

    found = []
    for block in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        name = re.search(r"Compiling entry function '([^']+)'", block)
        assert name is not None
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", block)]
        warnings = sorted(set(re.findall(r"\b(C7\d\d\d)\b", block)))
        found.append(
            {
                "kernel": name[1].removesuffix("_kernel").removesuffix("_mosaic_gpu"),
                "registers": last(r"Used (\d+) registers", block),
                "spills": sum(spills),
                "stack": last(r"(\d+) bytes stack frame", block),
                "static_smem": last(r"(\d+) bytes smem", block),
                "warnings": ",".join(warnings) or "none",
            }
        )
    return found


def read_table(text: str) -> list[Row]:
    """Returns the rows of the committed table."""
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    found = []
    for arch, op, case, kernel, *sizes, warnings in lines[1:]:
        registers, spills, stack, smem = map(int, sizes)
        found.append(Row(arch, op, case, kernel, registers, spills, stack, smem, warnings))
    return found


def write_table(rows: list[Row]) -> str:
    """Returns the table as text: tab-separated, sorted."""
    lines = ["# Written by tools/gpu_compile.py --write; gate of `make test-gpu-compile`."]
    lines.append("\t".join(HEADER))
    lines += ["\t".join(str(value) for value in astuple(row)) for row in sorted(rows, key=_order)]
    return "\n".join(lines) + "\n"


def _order(row: Row) -> tuple[str, str, str, str]:
    return row.key


def ops() -> list[str]:
    """Returns the folders of pallas_kernels that hold kernels."""
    return sorted({path.parent.name for path in ROOT.glob("pallas_kernels/*/arg_specs.py")})


def compile_arch(arch: str, only: str) -> tuple[list[Row], list[str]]:
    """Returns the rows of every case whose name contains `only`, and the errors."""
    rows, errors = [], []
    for op in ops():
        module = importlib.import_module(f"pallas_kernels.{op}.arg_specs")
        for case, fn, shapes in module.compile_cases(arch):
            if only not in f"{op} {case}":
                continue
            started = time.monotonic()
            try:
                found = _compile(arch, fn, shapes)
            except Exception as error:  # the report goes on: a run shows all broken kernels
                errors.append(f"{arch} {op} {case}: {type(error).__name__}: {error}")
                print(errors[-1], flush=True)
                continue
            rows += [Row(arch=arch, op=op, case=case, **kernel) for kernel in found]
            for kernel in found:
                print(
                    f"{arch} {op} {case}: {kernel} {time.monotonic() - started:.1f} s", flush=True
                )
            if not found:
                errors.append(f"{arch} {op} {case}: compiled no kernel: its function holds none")
    return rows, errors


def compile_for(arch: str, fn: Any, *arguments: Any) -> str:
    """Returns the optimised HLO text of a function compiled for `arch` without a device.

    Args:
        arch: one of `ARCHS`, the only one of this process.
        fn: a function of arrays.
        *arguments: trees of `jax.ShapeDtypeStruct`.
    """
    import jax
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils as mosaic_utils

    # without a device JAX takes every target for (9, 0)
    mosaic_utils._infer_arch = lambda: ARCHS[arch]
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=_TARGET.format(**_DEVICES[arch]), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), arguments
    )
    with _abstract_gpu(_DEVICES[arch]):
        return jax.jit(fn).lower(*placed).compile().as_text() or ""


def _compile(arch: str, fn: Any, shapes: list[Any]) -> list[dict[str, Any]]:
    with _dynamic_smem() as smem, _captured() as report:
        program = compile_for(arch, fn, *shapes)
    return _ours(parse_ptxas(report()), program, smem)


def _ours(
    kernels: list[dict[str, Any]], program: str, smem: dict[str, int]
) -> list[dict[str, Any]]:
    """Returns the reports of Pallas kernels: XLA's own fusions have one too."""
    triton = set(re.findall(r'op_name="[^"]*?(\w+)/pallas_call"', program))
    found = {}
    for kernel in kernels:
        name, static = kernel["kernel"], kernel.pop("static_smem")
        if name in smem or name in triton:
            found[name] = kernel | {"smem": static + smem.get(name, 0)}
    return list(found.values())


def _abstract_gpu(device: dict[str, Any]) -> Any:
    """Returns a context in which Pallas-Triton takes the target for the current device."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    kind = AbstractDevice(device_kind=device["name"], num_cores=device["sms"], platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    return jax.sharding.use_abstract_mesh(mesh)


@contextmanager
def _dynamic_smem() -> Iterator[dict[str, int]]:
    """Collects the shared memory that each Mosaic kernel asks for at launch, in bytes, by name."""
    import inspect

    from jax.experimental.mosaic.gpu import core

    launch, found = core._launch, {}

    def record(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(launch).bind(*args, **kwargs).arguments
        name = given["module"].operation.attributes["sym_name"].value
        found[name] = core._smem_tree_size(given["smem_buffers"])
        return launch(*args, **kwargs)

    core._launch = record
    try:
        yield found
    finally:
        core._launch = launch


@contextmanager
def _captured() -> Iterator[Any]:
    """Keeps what C++ prints on stdout and stderr; call the result afterwards for the text."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        text: list[str] = []
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text[0]
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), saved, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def main(arguments: list[str]) -> int:
    """Compiles, compares, prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", choices=ARCHS, help="one architecture, in this process")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--write", action="store_true", help=f"rewrite {TABLE.name}")
    options = parser.parse_args(arguments)
    if options.arch:
        rows, errors = compile_arch(options.arch, options.only)
        Path(os.environ.get("GPU_COMPILE_ROWS", os.devnull)).write_text(write_table(rows))
        return _conclude(rows, errors, check=not options.only and not options.write)
    started = time.monotonic()
    rows, status = [], 0
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for arch in ARCHS:
            path = Path(folder) / arch
            command = [sys.executable, __file__, "--arch", arch, "--only", options.only]
            command += ["--write"] if options.write else []
            environment = os.environ | {
                "GPU_COMPILE_ROWS": str(path),
                "JAX_PLATFORMS": "cpu",
                "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
                # the two places where ptxas reports are printed: Mosaic's, and XLA's for Triton
                "MOSAIC_GPU_DUMP_PTXAS": "1",
                "TF_CPP_MIN_LOG_LEVEL": "0",
                "TF_CPP_VMODULE": "subprocess_compilation=5",
                "PYTHONPATH": str(ROOT),
            }
            running.append((path, subprocess.Popen(command, env=environment)))
        for path, process in running:
            status |= process.wait()
            rows += read_table(path.read_text()) if path.exists() else []
    if options.write and not status:
        TABLE.write_text(write_table(rows))
    print(f"gpu_compile: {len(rows)} kernels in {time.monotonic() - started:.0f} s")
    return status


def _conclude(rows: list[Row], errors: list[str], check: bool) -> int:
    found = list(errors)
    if check:
        table = read_table(TABLE.read_text()) if TABLE.exists() else []
        found += faults(rows, table)
    print("\n".join(f"FAULT {line}" for line in found), end="\n" if found else "", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
