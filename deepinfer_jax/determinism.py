"""What each level of determinism promises here, and why not where it does not (determinism.md 1).

D0 run to run, D1 whatever else is in the batch, D2 however a prompt is cut into steps, D3 whatever
is cached, D4 with drafts as without, D5 on every mesh. Portability to another device or another
version of the compiler (D6) is never promised.

On a CPU the network runs in a loop over tiles of rows, on a GPU its products do; every sum has a
fixed order on both. That this gives equal bits is on a GPU a measurement, not a theorem
(determinism.md 8): per kind of device, made by `benchmarks.invariance_gpu` and entered in
`PROVEN_GPUS`. On other kinds the level runs, and the report says that nothing is proven.
"""

import os
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from deepinfer_jax.config.model import ExecutionConfig, ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.environment import numerics_flags, parse_xla_flags
from deepinfer_jax.errors import ConfigError

PROMISES = ("D0", "D1", "D2", "D3", "D4", "D5")
#: Promise -> (whether it is held, the reason).
Report = dict[str, tuple[bool, str]]
GPU_PLATFORMS = ("gpu", "cuda")
#: Kind of GPU -> the measurement that shows D0 to D4 there.
PROVEN_GPUS: Mapping[str, str] = {
    "NVIDIA H200": "benchmarks/results/invariance_h200_2026-11-30.jsonl"
}
#: What shows D5 on two of them.
SEVERAL_GPUS = "benchmarks/results/multi_gpu_h200_2026-11-30.jsonl"
#: Why nothing is promised there. Sequences run one after the other, so that neighbours, chunks and
#: slots change nothing that the bridge does; what its operators do has never been seen.
ON_ASCEND = "no CANN operator has been verified on Ascend hardware, not even from run to run"
#: Rows of the network's tiles at "batch", on a GPU of the blocks of its products: part of the
#: arithmetic, one height for all programs of a device.
ROW_TILES = {"cpu": 8, "gpu": 256}


@runtime_checkable
class HasConfig(Protocol):
    """What is asked for its promises: a `Model`."""

    @property
    def config(self) -> ModelConfig:
        """Its config, with how it is run."""
        ...


def determinism_report(model: HasConfig, runtime: RuntimeConfig | None = None) -> Report:
    """Returns what holds for a model as it was loaded, on the devices of this process.

    Args:
        model: what `load` returned.
        runtime: how it is run; None is `RuntimeConfig()`.

    Raises:
        RuntimeError: JAX finds no device (from JAX).

    Examples:
        >>> list(di.determinism_report(model))
        ['D0', 'D1', 'D2', 'D3', 'D4', 'D5']
    """
    has_drafts = model.config.draft is not None
    return report(model.config.execution, runtime or RuntimeConfig(), has_drafts=has_drafts)


def report(
    execution: ExecutionConfig, runtime: RuntimeConfig, *, has_drafts: bool = True
) -> Report:
    """Returns the same without a model. Initialises the JAX backend, to know its platform.

    Args:
        execution: how `load` decides to run a model.
        runtime: capacities and policies of the engine.
        has_drafts: whether the model has draft stages.
    """
    import jax

    return promises(
        execution,
        runtime,
        has_drafts=has_drafts,
        platform=jax.default_backend(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        device_kind=jax.devices()[0].device_kind,
    )


def row_tile(determinism: str) -> int:
    """Returns the rows of the network's tiles at a level here. Initialises the JAX backend."""
    import jax

    on_gpu = determinism == "batch" and jax.default_backend() in GPU_PLATFORMS
    return ROW_TILES["gpu" if on_gpu else "cpu"]


def promises(
    execution: ExecutionConfig,
    runtime: RuntimeConfig,
    *,
    has_drafts: bool,
    platform: str,
    xla_flags: str,
    device_kind: str = "",
) -> Report:
    """Returns the same for a given platform ("cpu", "gpu", ...) and value of XLA_FLAGS; pure.

    device_kind: as JAX names it; decides on a GPU whether the promises of "batch" are proven.
    """
    found = _designed(execution, runtime, has_drafts, platform, xla_flags)
    if execution.determinism != "batch" or platform not in GPU_PLATFORMS:
        return found
    evidence = PROVEN_GPUS.get(device_kind)
    if evidence is None:
        unproven = (
            f"built to be held, but not proven on {device_kind!r}: run `python -m "
            "benchmarks.invariance_gpu` there"
        )
        return {name: (False, unproven if held else why) for name, (held, why) in found.items()}
    measured = f"; measured on {device_kind} ({evidence})"
    return {
        name: (held, why + measured if held and name != "D5" else why)
        for name, (held, why) in found.items()
    }


def _designed(
    execution: ExecutionConfig,
    runtime: RuntimeConfig,
    has_drafts: bool,
    platform: str,
    xla_flags: str,
) -> Report:
    """Returns what the programs are built to hold, proven on this device or not."""
    level = execution.determinism
    if level == "off":
        return dict.fromkeys(PROMISES, (False, 'determinism="off" promises nothing'))
    if execution.on_ascend:
        return dict.fromkeys(PROMISES, (False, ON_ASCEND))
    if level == "run":
        stock = (False, "at level run products and sums are XLA's, in an order that follows shapes")
        return {"D0": _run_to_run(platform, xla_flags), **dict.fromkeys(PROMISES[1:], stock)}
    fault = _batch_fault(platform, xla_flags)
    if fault is not None:
        return dict.fromkeys(PROMISES, (False, fault))
    return {
        "D0": (True, _ordered(platform)),
        "D1": (True, _arithmetic(execution)),
        "D2": (True, _chunks(runtime)),
        "D3": _cache(runtime),
        "D4": _drafts(runtime, has_drafts),
        "D5": _meshes(platform, execution),
    }


def require_level(execution: ExecutionConfig, runtime: RuntimeConfig | None = None) -> None:
    """Checks that level "batch", if it is asked for, can be held: D0 to D4.

    At "run" nothing raises: on an accelerator D0 depends on flags, and the report says which. Nor
    does a GPU on which the level is not proven yet: `verify` and the benchmark have to run there.

    Args:
        execution: how a model is to be run.
        runtime: how sequences are to be run; None judges the model alone.

    Raises:
        ConfigError: a promise of the level does not hold; says which and why.
    """
    if execution.determinism != "batch":
        return
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    found = _designed(execution, runtime or RuntimeConfig(), True, jax.default_backend(), flags)
    for promise in PROMISES[:5]:
        held, reason = found[promise]
        if not held:
            raise ConfigError(
                f'determinism="batch" cannot be held ({promise}): {reason}. Change that, or ask '
                'for determinism="run" or "off".'
            )


def _ordered(platform: str) -> str:
    if platform == "cpu":
        return "compiled programs on CPU run in one order; random bits come from counters"
    return "no float scatter-add, pinned kernels, random bits from counters"


def _is_pinned(xla_flags: str) -> bool:
    """Says whether every process chooses the same kernels for its products."""
    flags = parse_xla_flags(xla_flags)
    return flags.get("xla_gpu_autotune_level") == "0" or bool(
        flags.get("xla_gpu_load_autotune_results_from")
    )


def _run_to_run(platform: str, xla_flags: str) -> tuple[bool, str]:
    if platform == "cpu":
        return True, _ordered(platform)
    flags = parse_xla_flags(xla_flags)
    is_ordered = any(
        flags.get(name, "").lower() in ("true", "1")
        for name in ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    )
    if is_ordered and _is_pinned(xla_flags):
        return True, "XLA_FLAGS exclude atomics and pin the choice of kernels"
    return False, (
        f"on {platform!r} kernels are chosen by timing in every process and may use atomics, "
        "unless XLA_FLAGS has --xla_gpu_deterministic_ops=true and --xla_gpu_autotune_level=0"
    )


def _batch_fault(platform: str, xla_flags: str) -> str | None:
    """Returns why level "batch" cannot be held at all, or None."""
    if platform != "cpu" and platform not in GPU_PLATFORMS:
        return f"it exists on CPU and on NVIDIA GPUs, this process runs on {platform!r}"
    if platform in GPU_PLATFORMS and not _is_pinned(xla_flags):
        return (
            "kernels of products are chosen by timing in every process, unless XLA_FLAGS has "
            "--xla_gpu_autotune_level=0 when JAX starts"
        )
    against = [flag for flag in numerics_flags(xla_flags, {}) if flag["contradicts_batch"]]
    if against:
        named = (f"{flag['name']}={flag['value']} ({flag['why']})" for flag in against)
        return "XLA_FLAGS has " + "; ".join(named)
    return None


def _meshes(platform: str, execution: ExecutionConfig) -> tuple[bool, str]:
    exchanged = "devices of a mesh exchange rows, and add no floats of each other"
    if platform == "cpu":
        return True, exchanged
    if execution.kernels:
        return False, (
            f'{exchanged}, but on GPUs bits were compared with kernels="xla" only, not with '
            f"{_named(execution)}"
        )
    return True, f"{exchanged}; er, dp and cp of two were run, larger meshes not ({SEVERAL_GPUS})"


def _named(execution: ExecutionConfig) -> str:
    return ", ".join("=".join(pair) for pair in execution.kernels)


def _arithmetic(execution: ExecutionConfig) -> str:
    kernels = _named(execution) or "xla"
    unit = "row is" if execution.is_tiled else "product is"
    return (
        f"every {unit} computed in tiles of {execution.row_tile} rows, each sum in a fixed order "
        f"(numerics {execution.numerics}, kernels {kernels})"
    )


def _chunks(runtime: RuntimeConfig) -> str:
    reason = "a row reads all of its history from the cache, in blocks that follow its position"
    if runtime.replay == "off":
        return reason
    return (
        f"{reason}; replay={runtime.replay} with replay_keep_tokens={runtime.replay_keep_tokens} "
        "is part of the model: its outputs differ from those without"
    )


def _cache(runtime: RuntimeConfig) -> tuple[bool, str]:
    if not runtime.prefix_cache:
        return True, "no prefix is reused; rows of a preempted sequence are computed again"
    if runtime.prefix_restore == "bounded":
        return False, (
            'prefix_restore="bounded" recomputes one window only, so outputs depend on what is '
            'cached: use "checkpoint" or "halo"'
        )
    return True, f"cached rows are those of a cold run, windows too ({runtime.prefix_restore})"


def _drafts(runtime: RuntimeConfig, has_drafts: bool) -> tuple[bool, str]:
    if not has_drafts or runtime.drafting is False:
        return True, "nothing is drafted"
    return True, 'a draft is kept only if it is what the target draws: verify="exact" is enforced'
