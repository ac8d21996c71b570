"""From `load(kernels=...)` to the implementations a model runs with, decided once.

Two kinds of names: ops of `pallas_kernels.COVERED` with their kernels, and `VARIANTS`, parts of the
network that exist in a second arithmetic. What is named runs or raises (kernels.md section 8).
"""

from collections.abc import Mapping
from typing import Any

import pallas_kernels
from deepinfer_jax.config.model import ExecutionConfig, ModelConfig
from deepinfer_jax.errors import KernelSelectionError
from pallas_kernels.tables import tile_hash

Kernels = str | Mapping[str, str] | None

#: Parts of the network with a second arithmetic, which only its name picks.
VARIANTS: Mapping[str, tuple[str, ...]] = {"output_projection": ("xla", "fp8")}


def choose_kernels(
    kernels: Kernels,
    *,
    numerics: str,
    scale_block: int,
    device_kind: str,
    widths: pallas_kernels.Widths | None = None,
) -> tuple[tuple[str, str], ...]:
    """Returns (op or variant, implementation) for everything that is not "xla", sorted.

    Args:
        kernels: as in `load`.
        numerics: the mode the model is loaded with.
        scale_block: side of the model's FP8 scale blocks.
        device_kind: the device's name as jax reports it.
        widths: `attention_widths` of the model; None: every kernel has a form for it.

    Raises:
        KernelSelectionError: something was named that does not exist or cannot run.
    """
    variants, ops = {}, kernels
    if isinstance(kernels, Mapping):
        variants = {name: kernels[name] for name in kernels if name in VARIANTS}
        ops = {name: kernels[name] for name in kernels if name not in VARIANTS}
    for name, value in variants.items():
        _require_variant(name, value, numerics)
    try:
        chosen = pallas_kernels.resolve(
            ops,
            device_kind,
            checkpoint_arithmetic=numerics != "float32",
            scale_block=scale_block,
            widths=widths,
        )
    except pallas_kernels.KernelUnsupported as error:
        raise KernelSelectionError(*error.fields) from error
    found = dict(chosen) | variants
    return tuple(sorted((op, name) for op, name in found.items() if name != "xla"))


def attention_widths(config: ModelConfig) -> pallas_kernels.Widths:
    """Returns the sizes of a model that decide which kernels have a form for it."""
    attention, index = config.attention, config.indexer
    return pallas_kernels.Widths(
        heads=attention.num_attention_heads,
        head_dim=attention.head_dim,
        window=attention.sliding_window,
        index_heads=index.index_n_heads,
        index_dim=index.index_head_dim,
    )


def kernel_table(execution: ExecutionConfig) -> dict[str, str]:
    """Returns the implementation of every op and variant, each "xla" included.

    Of a network on an Ascend device "network" alone: none of the others runs.
    """
    if execution.on_ascend:
        return dict(execution.kernels)
    names = sorted({*pallas_kernels.COVERED, *VARIANTS})
    return {name: execution.kernel(name) for name in names}


def kernel_tiles(execution: ExecutionConfig) -> dict[str, str]:
    """Returns the hash of the tile table of every op that runs a kernel."""
    return {op: tile_hash(op) for op, _ in execution.kernels if op in pallas_kernels.COVERED}


def kernel_report() -> dict[str, Any]:
    """Returns what there is on the first device of this process, as plain JSON types."""
    import jax

    kind = jax.devices()[0].device_kind
    return {"device_kind": kind, "ops": pallas_kernels.report(kind)}


def _require_variant(name: str, value: str, numerics: str) -> None:
    if value not in VARIANTS[name]:
        raise KernelSelectionError(
            name,
            value,
            f"it must be one of {VARIANTS[name]}",
            repr(value),
            "no other implementation exists",
        )
    if value != "xla" and numerics == "float32":
        raise KernelSelectionError(
            name,
            value,
            "it differs in its quantisers only",
            'numerics="float32", which has none',
            'use numerics="checkpoint"',
        )
