"""From FP8 and FP4 codes to bfloat16 pairs in 32-bit registers of a Mosaic kernel on sm_90.

Integer moves and exact multiplies, which take fewer issue slots than the conversions that the
hardware has. A lane of a warp holds 16 consecutive channels of a row: its codes and the one scale
byte that covers them. Every function takes and returns MLIR values of type i32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


def _twice(power: int) -> int:
    """Returns 2^power as both bfloat16 of a register."""
    return (power + 127 << 7) * 0x10001


def i32() -> Any:
    """Returns the type of a 32-bit register."""
    from jaxlib.mlir import ir

    return ir.IntegerType.get_signless(32)


def const(value: int) -> Any:
    """Returns a 32-bit constant."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(i32(), ir.IntegerAttr.get(i32(), int(np.uint32(value).astype(np.int32))))


def asm(text: str, constraints: str, *args: Any, effects: bool = False) -> Any:
    """Returns the register that one inline PTX instruction writes."""
    from jaxlib.mlir.dialects import llvm

    return llvm.inline_asm(i32(), list(args), text, constraints, has_side_effects=effects)


@dataclass(frozen=True)
class Word:
    """A non-negative i32 register with the operators of an int."""

    value: Any

    def _with(self, op: str, other: Any) -> "Word":
        from jaxlib.mlir.dialects import arith

        right = other.value if isinstance(other, Word) else const(other)
        return Word(getattr(arith, op)(self.value, right))

    def __add__(self, other: Any) -> "Word":
        return self._with("addi", other)

    def __mul__(self, other: int) -> "Word":
        return self._with("muli", other)

    def __floordiv__(self, other: int) -> "Word":
        return self._with("divui", other)

    def __mod__(self, other: int) -> "Word":
        return self._with("remui", other)

    def __and__(self, other: int) -> "Word":
        return self._with("andi", other)

    def __xor__(self, other: int) -> "Word":
        return self._with("xori", other)


def thread_parts() -> tuple[Any, Any]:
    """Returns (warp of the warpgroup, lane) of the running thread."""
    from jaxlib.mlir.dialects import arith, gpu

    thread = arith.remui(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)), const(128))
    return arith.divui(thread, const(32)), arith.remui(thread, const(32))


def _times(a: Any, b: Any) -> Any:
    return asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", a, b)


def _permute(a: Any, b: Any, selector: int) -> Any:
    return asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", a, b, const(selector))


@dataclass(frozen=True)
class Recipe:
    """How the codes of a word become pairs of bfloat16 bits, a power of two too small.

    Attributes:
        raised: how far left the first operand of a move is shifted; the second operand is the word
            itself.
        moves: a byte selector (prmt.b32) a pair: the low byte of each half is a code, or begins
            with one, and its high byte repeats the code's sign.
        shift: how far left both move from there.
        mask: the bits of a half that are its sign and its magnitude.
        power: exponent of the power of two that is missing.
    """

    raised: int
    moves: tuple[int, ...]
    shift: int
    mask: int
    power: int


#: Four E4M3 codes a word.
Q8 = Recipe(0, (0x9180, 0xB3A2), 4, 0x87F0, 120)
#: Eight E2M1 codes a word; even channels are raised into high nibbles, where odd ones are.
Q4N = Recipe(4, (0xC480, 0xD591, 0xE6A2, 0xF7B3), 2, 0x81C0, 126)


def _pairs(word: Any, factor: Any, recipe: Recipe) -> list[Any]:
    """Returns the pairs of a word of codes, each times ``factor``."""
    from jaxlib.mlir.dialects import arith

    first = arith.shli(word, const(recipe.raised)) if recipe.raised else word
    pairs = []
    for selector in recipe.moves:
        moved = arith.shli(_permute(first, word, selector), const(recipe.shift))
        bits = arith.andi(moved, const(recipe.mask * 0x10001))
        # two products: that of both factors may be too large
        pairs.append(_times(_times(bits, const(_twice(recipe.power))), factor))
    return pairs


def _q8_factor(byte: Any) -> Any:
    """Returns 2^(byte - 127) twice; byte 0 is the subnormal 2^-127, byte 255 reads as infinity."""
    from jaxlib.mlir.dialects import arith

    power = arith.muli(byte, const(0x00800080))
    lowest = arith.cmpi(arith.CmpIPredicate.eq, byte, const(0))
    return arith.select(lowest, const(0x00400040), power)


def _q4n_factor(byte: Any) -> Any:
    """Returns the E4M3 scale twice; it has no sign, and code 0x7f reads as 480."""
    from jaxlib.mlir.dialects import arith

    return _times(arith.muli(byte, const(0x00100010)), const(_twice(Q8.power)))


def decode_lane(words: list[Any], byte: Any) -> list[Any]:
    """Returns the eight pairs of a lane's 16 channels, in the order of its words.

    Args:
        words: four registers of E4M3 codes, or two of E2M1 codes, low nibble first.
        byte: the scale: an exponent for E4M3, an E4M3 code for E2M1.
    """
    recipe = Q8 if len(words) == 4 else Q4N
    factor = _q8_factor(byte) if recipe is Q8 else _q4n_factor(byte)
    return [pair for word in words for pair in _pairs(word, factor, recipe)]
