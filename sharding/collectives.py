"""The collectives of a compiled program, read from its HLO: what moves, and how many bytes."""

import re
from dataclasses import dataclass
from math import prod

_KINDS = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute|ragged-all-to-all"
_LINE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({_KINDS})(?:-start)?\((.*)$")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')
_BITS = {"pred": 8, "bf16": 16}
_ADDS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a program: kind, element types and shapes of its result, bytes of it.

    where: the operation that it was traced from. An operation inside a loop stands here once.
    """

    kind: str
    result: tuple[tuple[str, tuple[int, ...]], ...]
    where: str

    @property
    def bytes(self) -> int:
        """Bytes that one execution leaves on every device, its own part among them."""
        return sum(prod(shape) * _bits(dtype) // 8 for dtype, shape in self.result)

    @property
    def adds_floats(self) -> bool:
        """Says whether it sums floats, in an order that is the backend's (parallelism.md R1)."""
        return self.kind in _ADDS and any(_is_float(dtype) for dtype, _ in self.result)

    @property
    def label(self) -> str:
        """Kind and result in a few characters: "all-gather u8[32,528]", "all-to-all 64 x ..."."""
        first = self.result[0]
        times = f"{len(self.result)} x " if len(self.result) > 1 else ""
        return f"{self.kind} {times}{first[0]}[{','.join(map(str, first[1]))}]"


def collectives_of(text: str) -> list[Collective]:
    """Returns the collectives of optimised HLO, in the order of the text."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        shapes = tuple(
            (dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in _SHAPE.findall(match[1])
        )
        name = _NAME.search(line)
        found.append(Collective(kind=match[2], result=shapes, where=name[1] if name else ""))
    return found


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf", "c"))


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
