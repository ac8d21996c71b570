"""Which implementation of which op exists on which architecture, and how far it is proven.

Data only (kernels.md section 8, rule 2). Nothing here imports jax: the tables are read at load, by
`deepinfer-jax env` and by `support.json`. Tiles are chosen from `<op>/configs.py`, tables keyed on
shapes of weights and never on rows; `tile_hash` names their content in run records.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Literal

Status = Literal["verified", "compiled", "absent"]
Arch = Literal["cpu", "sm_90", "sm_100"]

#: What the statuses mean, in the words of the environment report.
STATUSES: Mapping[Status, str] = MappingProxyType(
    {
        "verified": "numerics and row invariance passed on that architecture",
        "compiled": "compiles to machine code for it; not all has passed there: only when named",
        "absent": "does not exist for it",
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """How far one implementation of one op is proven on one architecture.

    Attributes:
        op: name of the op, which is the name of its folder.
        implementation: its name in `kernels=`.
        arch: where it runs.
        status: see `STATUSES`.
        evidence: the committed file that shows it.
        default_arithmetic: whether `None` and `"pallas"` may pick it; a suffix in the name
            ("mosaic_sm90_fp8") means another arithmetic, which runs only when it is named.
        scale_block: side of the FP8 weight's scale blocks that it computes: 32 (V4.1) or 128.
    """

    op: str
    implementation: str
    arch: Arch
    status: Status
    evidence: str
    default_arithmetic: bool = True
    scale_block: int = 32


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of a model's attention that decide which kernels have a form for it.

    Attributes:
        heads: query heads.
        head_dim: channels of a cache row.
        window: window ranks of a key list.
        index_heads: heads of the indexer.
        index_dim: channels of an index key.
    """

    heads: int
    head_dim: int
    window: int
    index_heads: int
    index_dim: int


def misfit(op: str, widths: Widths) -> str | None:
    """Returns the rule that a model's sizes break, None where the op's kernels have a form."""
    config = import_module(f"pallas_kernels.{op}.configs")
    if op == "sparse_mla_decode":
        heads, window = widths.heads % config.HEADS, widths.window % config.BLOCK
        if widths.head_dim != config.DIM or heads or window or not widths.heads:
            return (
                f"it takes rows of {config.DIM} channels, a multiple of {config.HEADS} heads and "
                f"a window of whole blocks of {config.BLOCK}"
            )
    if op == "indexer_logits":
        heads = widths.index_heads
        many = heads % config.HEAD_STEP or not 0 < heads <= config.MOST_HEADS
        if widths.index_dim != config.CHANNELS or many:
            return (
                f"it takes keys of {config.CHANNELS} channels and {config.HEAD_STEP} to "
                f"{config.MOST_HEADS} heads in steps of {config.HEAD_STEP}"
            )
    return None


# A form is verified when it has passed alone on the device, near XLA (kernels_h200) and with the
# bits of lone rows (kernel_bits_h200), and rows kept their bits in a network with it at level
# "batch": in 50 compositions of nano, or in four layers of real sizes if nano's do not suit it.
_COMPILED = "pallas_kernels/compiled.txt"
_NANO = "benchmarks/results/invariance_h200_2026-11-30.jsonl"
_SLICE = "benchmarks/results/network_slice_h200_2026-11-30.jsonl"

#: Every implementation beside "xla", which exists for every op on every device.
ENTRIES: tuple[Entry, ...] = (
    Entry("block_scaled_matmul", "mosaic_sm90", "sm_90", "verified", _NANO),
    Entry(
        "block_scaled_matmul",
        "mosaic_sm90_fp8",
        "sm_90",
        "compiled",
        _COMPILED,
        default_arithmetic=False,
        scale_block=128,
    ),
    Entry("block_scaled_matmul", "mosaic_sm100", "sm_100", "compiled", _COMPILED),
    Entry("grouped_matmul", "mosaic_sm90", "sm_90", "verified", _NANO),
    Entry("rms_norm_quant", "triton", "sm_90", "verified", _NANO),
    Entry("rms_norm_quant", "triton", "sm_100", "compiled", _COMPILED),
    Entry("sparse_mla_decode", "mosaic_sm90", "sm_90", "verified", _SLICE),
    Entry("indexer_logits", "mosaic_sm90", "sm_90", "verified", _SLICE),
    Entry("select_topk", "triton", "sm_90", "verified", _NANO),
    Entry("mhc_pre", "triton", "sm_90", "verified", _NANO),
    Entry("mhc_pre", "triton", "sm_100", "compiled", _COMPILED),
    *(
        Entry(op, "pallas_interpret", "cpu", "verified", f"tests/kernels/test_{op}.py", False)
        for op in (
            "block_scaled_matmul",
            "grouped_matmul",
            "rms_norm_quant",
            "sparse_mla_decode",
            "indexer_logits",
            "select_topk",
            "mhc_pre",
        )
    ),
)

#: Ops that have a Pallas form; `kernels="pallas"` runs one for each of them that has a form for
#: the model's sizes, or raises.
COVERED: frozenset[str] = frozenset(entry.op for entry in ENTRIES)

#: Parts of a device's name, as jax reports it, that tell its architecture.
_DEVICE_ARCHS: tuple[tuple[str, Arch], ...] = (
    ("cpu", "cpu"),
    ("H200", "sm_90"),
    ("H100", "sm_90"),
    ("H800", "sm_90"),
    ("H20", "sm_90"),
    ("GH200", "sm_90"),
    ("B200", "sm_100"),
    ("GB200", "sm_100"),
)


def arch_of(device_kind: str) -> Arch | None:
    """Returns the architecture of a device by the name jax gives it, None for another device."""
    words = device_kind.replace("-", " ").split()
    return next((arch for name, arch in _DEVICE_ARCHS if name in words), None)


def entries_of(op: str, arch: Arch | None = None) -> tuple[Entry, ...]:
    """Returns the entries of one op, all architectures or one."""
    return tuple(
        entry for entry in ENTRIES if entry.op == op and (arch is None or entry.arch == arch)
    )


def tile_hash(op: str) -> str:
    """Returns the SHA-256 of an op's tile table, 64 hexadecimal digits."""
    table = import_module(f"pallas_kernels.{op}.configs").TABLE
    lines = sorted(f"{key!r}: {value!r}" for key, value in table.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
