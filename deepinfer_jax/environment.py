"""Versions, devices, the flags that change numerics, and what each extra lacks."""

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DISTRIBUTION = "deepinfer-jax"
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "ml_dtypes",
    "jaxtyping",
    "safetensors",
    "tokenizers",
    "orbax-checkpoint",
    "optax",
    "huggingface_hub",
    "deepseek-recipe",
    "llguidance",
    "rich",
    "typer",
)
#: Packages whose code decides bits.
CODE = ("deepinfer_jax", "pallas_kernels", "sharding", "native_ascend")
ENVIRONMENT_VARIABLES = (
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsFlag:
    """A setting that can change bits; `against` lists the values that contradict level "batch"."""

    name: str
    against: tuple[str, ...]
    why: str


# determinism.md 4.4. Values are compared after `_normalise`.
XLA_FLAGS = (
    NumericsFlag(
        name="xla_cpu_enable_fast_math",
        against=("true",),
        why="fast math reorders sums, so a row's bits depend on how the compiler vectorised it",
    ),
    NumericsFlag(
        name="xla_gpu_experimental_enable_split_k_rewrite",
        against=("true",),
        why="split-K changes the order of a sum with the number of rows",
    ),
    NumericsFlag(
        name="xla_gpu_enable_split_k_autotuning",
        against=("true",),
        why="autotuning may choose split-K: the order of a sum then depends on the number of rows",
    ),
    NumericsFlag(
        name="xla_gpu_unsupported_use_all_reduce_one_shot_kernel",
        against=("true",),
        why="the all-reduce algorithm is then chosen by size",
    ),
    NumericsFlag(
        name="xla_gpu_deterministic_ops",
        against=("false",),
        why="scatters may use atomics, whose order differs between runs",
    ),
    NumericsFlag(
        name="xla_gpu_exclude_nondeterministic_ops",
        against=("false",),
        why="library algorithms that differ between runs are allowed",
    ),
    NumericsFlag(
        name="xla_gpu_enable_scatter_determinism_expander",
        against=("false",),
        why="scatter-add then has no fixed order",
    ),
    NumericsFlag(
        name="xla_gpu_autotune_level",
        against=(),
        why="above 0 without saved results, another process may choose other kernels",
    ),
    NumericsFlag(
        name="xla_gpu_load_autotune_results_from",
        against=(),
        why="names the saved kernel choices",
    ),
    NumericsFlag(
        name="xla_gpu_require_complete_aot_autotune_results",
        against=(),
        why="true refuses a program whose kernel choices were not saved",
    ),
    NumericsFlag(
        name="xla_allow_excess_precision",
        against=(),
        why="false keeps bf16 rounding points; our programs round explicitly and do not need it",
    ),
    NumericsFlag(
        name="xla_cpu_max_isa",
        against=(),
        why="the vector width changes bits between machines; pin it to share results",
    ),
    NumericsFlag(
        name="xla_cpu_prefer_vector_width",
        against=(),
        why="the vector width changes bits between machines; pin it to share results",
    ),
)
JAX_FLAGS = (
    NumericsFlag(
        name="jax_default_matmul_precision",
        against=(
            "bfloat16",
            "default",
            "fastest",
            "tensorfloat32",
            "high",
            "bfloat16_3x",
        ),
        why="float32 products outside our primitives then lose bits",
    ),
    NumericsFlag(
        name="jax_enable_x64",
        against=("true",),
        why="untyped constants become 64-bit, so programs and bits differ",
    ),
    NumericsFlag(
        name="jax_numpy_dtype_promotion",
        against=(),
        why="strict refuses implicit promotion; results are equal where both run",
    ),
    NumericsFlag(
        name="jax_disable_jit",
        against=("true",),
        why="operations run one by one, and loops are not the compiled ones",
    ),
    NumericsFlag(
        name="jax_default_prng_impl",
        against=(),
        why="changes jax.random; sampling here does not use it",
    ),
    NumericsFlag(
        name="jax_threefry_partitionable",
        against=(),
        why="changes jax.random; sampling here does not use it",
    ),
)


def _normalise(value: object) -> str:
    text = str(value).strip().lower()
    return {"1": "true", "0": "false"}.get(text, text)


def parse_xla_flags(text: str) -> dict[str, str]:
    """Returns the flags of an XLA_FLAGS string; no value is "true", the last of several wins."""
    flags = {}
    for word in text.split():
        name, _, value = word.lstrip("-").partition("=")
        flags[name] = value if "=" in word else "true"
    return flags


def numerics_flags(xla_flags: str, jax_config: dict[str, object]) -> list[dict[str, object]]:
    """Returns each setting, its value (None: not set) and whether it contradicts batch."""
    given = parse_xla_flags(xla_flags)
    values: list[tuple[NumericsFlag, object]] = [(flag, given.get(flag.name)) for flag in XLA_FLAGS]
    values += [(flag, jax_config.get(flag.name)) for flag in JAX_FLAGS]
    return [
        {
            "name": flag.name,
            "value": value,
            "contradicts_batch": value is not None and _normalise(value) in flag.against,
            "why": flag.why,
        }
        for flag, value in values
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def extras() -> dict[str, dict[str, object]]:
    """Returns, for each extra, its requirements and those that are not installed."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return {}
    wanted: dict[str, list[str]] = {
        name: [] for name in distribution.metadata.get_all("Provides-Extra") or []
    }
    for requirement in distribution.requires or []:
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if extra:
            wanted[extra.group(1)].append(requirement.partition(";")[0].strip())
    return {
        name: {"requires": lines, "missing": [line for line in lines if not _is_met(line)]}
        for name, lines in sorted(wanted.items())
    }


def _is_met(requirement: str) -> bool:
    parts = re.match(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?", requirement)
    if parts is None:
        return False
    name, options = parts.groups()
    if _version(name) is None:
        return False
    if not options:
        return True
    marks = [option.strip() for option in options.split(",")]
    lines = [line.partition(";") for line in metadata.distribution(name).requires or []]
    return all(
        _is_met(line)
        for line, _, marker in lines
        if any(re.search(rf"extra\s*==\s*['\"]{re.escape(mark)}['\"]", marker) for mark in marks)
    )


def _devices() -> list[dict[str, object]]:
    import jax

    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "process": device.process_index,
            "compute_capability": getattr(device, "compute_capability", None),
        }
        for device in jax.devices()
    ]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _nvidia_driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\d+\.\d+(\.\d+)?", file.readline())
    except OSError:
        return None
    return found.group(0) if found else None


def _usable_cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def collect() -> dict[str, object]:
    """Returns the record as plain JSON types. Initialises the JAX backend, to name its devices."""
    import jax

    config: dict[str, object] = dict(jax.config.values)
    flags = numerics_flags(os.environ.get("XLA_FLAGS", ""), config)
    directory = config.get("jax_compilation_cache_dir")
    return {
        "versions": {
            "python": platform.python_version(),
            DISTRIBUTION: _version(DISTRIBUTION),
            **{package: _version(package) for package in PACKAGES},
        },
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": _usable_cores(),
            "nvidia_driver": _nvidia_driver(),
        },
        "backend": jax.default_backend(),
        "devices": _devices(),
        "environment_variables": {name: os.environ.get(name) for name in ENVIRONMENT_VARIABLES},
        "numerics_flags": flags,
        "compilation_cache": {
            "directory": None if directory is None else str(directory),
            "enabled": bool(config.get("jax_enable_compilation_cache")) and directory is not None,
        },
        "extras": extras(),
        "warnings": [
            f'{flag["name"]}={flag["value"]} contradicts determinism "batch": {flag["why"]}'
            for flag in flags
            if flag["contradicts_batch"]
        ],
    }


def provenance() -> dict[str, Any]:
    """Returns where bits come from besides the model, as plain JSON types, for run records.

    Two processes on one machine with the same code and flags give the same. Initialises the JAX
    backend.
    """
    import jax

    device = jax.devices()[0]
    flags = numerics_flags(os.environ.get("XLA_FLAGS", ""), dict(jax.config.values))
    return {
        "code": {"version": _version(DISTRIBUTION), "sha256": code_hash()},
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "numpy", "ml_dtypes")},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "cpu": _cpu_model(),
            "nvidia_driver": _nvidia_driver(),
        },
        "environment_variables": {name: os.environ.get(name) for name in ENVIRONMENT_VARIABLES},
        "numerics_flags": {
            str(flag["name"]): str(flag["value"]) for flag in flags if flag["value"] is not None
        },
    }


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Returns the SHA-256 of the Python files of `CODE`, names included; read once a process."""
    digest = hashlib.sha256()
    for package in CODE:
        spec = find_spec(package)
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(folder.rglob("*.py")):
                data = path.read_bytes()
                name = f"{package}/{path.relative_to(folder).as_posix()}"
                digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()
