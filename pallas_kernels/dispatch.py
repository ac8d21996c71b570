"""From `kernels=` to one implementation per op, decided once and never by trying.

Pure functions of names: a test passes any device kind. Environment variables have no say, nothing
is tuned at run time, and what was asked for runs or raises (kernels.md section 8).
"""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

from pallas_kernels.errors import KernelUnsupported
from pallas_kernels.tables import (
    COVERED,
    Entry,
    Widths,
    arch_of,
    entries_of,
    misfit,
    tile_hash,
)

#: What `kernels=` may be beside None and a mapping.
SWITCHES = ("xla", "pallas", "pallas_interpret")

Kernels = str | Mapping[str, str] | None


def resolve(
    kernels: Kernels,
    device_kind: str,
    *,
    checkpoint_arithmetic: bool = True,
    scale_block: int = 32,
    widths: Widths | None = None,
) -> Mapping[str, str]:
    """Returns the implementation of every covered op, sorted by op; read-only.

    Args:
        kernels: None (the best verified implementation, else "xla"), "xla", "pallas" (a verified
            one for every covered op), "pallas_interpret" (the same bodies under the CPU
            interpreter), or a mapping op -> implementation; ops that it leaves out resolve as
            under None. Only a mapping raises where an op has no form for the model's widths; the
            others leave such an op "xla".
        device_kind: the device's name as jax reports it, for example "NVIDIA H200" or "cpu".
        checkpoint_arithmetic: whether activations are rounded where the checkpoint rounds them.
            The kernels compute nothing else, so without it None is "xla" and naming one raises.
        scale_block: side of the scale blocks of the model's FP8 weights, 32 or 128.
        widths: sizes of the model's attention; None: every kernel has a form for it.

    Raises:
        KernelUnsupported: something was named that does not exist or cannot run there; says which
            mapping would work.
    """
    unfit = {op for op in COVERED if widths is not None and misfit(op, widths)}
    if isinstance(kernels, Mapping):
        for op in kernels:
            _require_op(op, kernels[op])
            _require_form(op, kernels[op], widths)
        named = dict(kernels)
    elif kernels is None or kernels == "xla":
        named = dict.fromkeys(COVERED, "xla") if kernels else {}
    elif kernels == "pallas":
        named = {op: _verified_or_raise(op, device_kind) for op in sorted(COVERED - unfit)}
    elif kernels == "pallas_interpret":
        named = dict.fromkeys(COVERED - unfit, "pallas_interpret")
    else:
        raise KernelUnsupported(
            "every op",
            str(kernels),
            f"kernels must be None, one of {SWITCHES} or a mapping op -> implementation",
            repr(kernels),
            "no other implementation exists",
        )
    suits = checkpoint_arithmetic and scale_block == 32
    default = device_kind if suits else None
    chosen = {
        op: named.get(op) or ("xla" if op in unfit else _best(op, default))
        for op in sorted(COVERED)
    }
    for op, implementation in chosen.items():
        _require(op, implementation, device_kind, checkpoint_arithmetic, scale_block)
    return MappingProxyType(chosen)


def report(device_kind: str) -> list[dict[str, object]]:
    """Returns one row per op for a device: what None and "pallas" pick, entries, tile table hash.

    Plain JSON types. `pallas` is None where `kernels="pallas"` raises.
    """
    arch = arch_of(device_kind)
    return [
        {
            "op": op,
            "default": _best(op, device_kind),
            "pallas": _verified(op, device_kind),
            "implementations": ["xla", *(entry.implementation for entry in entries_of(op, arch))],
            "entries": [asdict(entry) for entry in entries_of(op)],
            "tiles_sha256": tile_hash(op),
        }
        for op in sorted(COVERED)
    ]


def _verified(op: str, device_kind: str | None) -> str | None:
    arch = None if device_kind is None else arch_of(device_kind)
    if arch is None:
        return None
    for entry in entries_of(op, arch):
        if entry.status == "verified" and entry.default_arithmetic:
            return entry.implementation
    return None


def _best(op: str, device_kind: str | None) -> str:
    return _verified(op, device_kind) or "xla"


def _verified_or_raise(op: str, device_kind: str) -> str:
    found = _verified(op, device_kind)
    if found is None:
        raise KernelUnsupported(
            op,
            "pallas",
            'kernels="pallas" needs a verified Pallas implementation of every covered op',
            f"device {device_kind!r}, where {op} has {_listing(op, device_kind)}",
            f"pass kernels={_working(device_kind)}",
        )
    return found


def _require_op(op: str, implementation: str) -> None:
    if op not in COVERED:
        raise KernelUnsupported(
            op,
            implementation,
            f"an op must be one of {sorted(COVERED)}",
            repr(op),
            "no other implementation exists for other ops: leave it out",
        )


def _require_form(op: str, implementation: str, widths: Widths | None) -> None:
    rule = None if implementation == "xla" or widths is None else misfit(op, widths)
    if rule is not None:
        raise KernelUnsupported(
            op, implementation, rule, repr(widths), f'leave it out, or name "xla" for {op}'
        )


def _require(
    op: str, implementation: str, device_kind: str, checkpoint_arithmetic: bool, scale_block: int
) -> None:
    """Checks that a named implementation exists for the device and for the arithmetic."""
    if implementation == "xla":
        return
    entries = [entry for entry in entries_of(op) if entry.implementation == implementation]
    if not entries:
        raise KernelUnsupported(
            op,
            implementation,
            "no other implementation exists than "
            + ", ".join(["xla", *dict.fromkeys(e.implementation for e in entries_of(op))]),
            repr(implementation),
            "name one of them",
        )
    usable = [entry for entry in entries if entry.arch == arch_of(device_kind)]
    if not any(entry.status != "absent" for entry in usable):
        raise KernelUnsupported(
            op,
            implementation,
            f"it runs on {', '.join(entry.arch for entry in entries)}",
            f"device {device_kind!r}",
            f"pass kernels={_working(device_kind)}",
        )
    if not checkpoint_arithmetic:
        raise KernelUnsupported(
            op,
            implementation,
            "it computes products of BF16, FP8 and FP4 values only",
            "float32 arithmetic, which has no such values",
            'load with numerics="checkpoint", or pass kernels="xla"',
        )
    block = usable[0].scale_block
    if block != scale_block:
        raise KernelUnsupported(
            op,
            implementation,
            f"it computes FP8 weights with {block}x{block} scale blocks",
            f"a model with {scale_block}x{scale_block} blocks",
            f"pass kernels={_working(device_kind)}",
        )


def _listing(op: str, device_kind: str) -> str:
    entries: tuple[Entry, ...] = entries_of(op, arch_of(device_kind))
    if arch_of(device_kind) is None or not entries:
        return "none"
    return ", ".join(f"{entry.implementation} ({entry.status})" for entry in entries)


def _working(device_kind: str) -> str:
    """Returns, as text, a mapping that runs there: existing kernels where there are any."""
    arch = arch_of(device_kind)
    found = {}
    for op in sorted(COVERED):
        entries = entries_of(op, arch) if arch else ()
        usable = [e.implementation for e in entries if e.status != "absent" and e.scale_block == 32]
        found[op] = usable[0] if usable else "xla"
    return repr(found)
