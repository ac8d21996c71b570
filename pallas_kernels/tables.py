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


# Parts of the sm_90 forms have passed on an H200: benchmarks/results/kernels_h200_2026-11-30.jsonl.
# A form is verified when every tile of its table has, and the network with it.
_COMPILED = "pallas_kernels/compiled.txt"

#: Every implementation beside "xla", which exists for every op on every device.
ENTRIES: tuple[Entry, ...] = (
    Entry("block_scaled_matmul", "mosaic_sm90", "sm_90", "compiled", _COMPILED),
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
    Entry("grouped_matmul", "mosaic_sm90", "sm_90", "compiled", _COMPILED),
    Entry("rms_norm_quant", "triton", "sm_90", "compiled", _COMPILED),
    Entry("rms_norm_quant", "triton", "sm_100", "compiled", _COMPILED),
    *(
        Entry(op, "pallas_interpret", "cpu", "verified", f"tests/kernels/test_{op}.py", False)
        for op in ("block_scaled_matmul", "grouped_matmul", "rms_norm_quant")
    ),
)

#: Ops that have a Pallas form; `kernels="pallas"` runs one for each of them or raises.
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
