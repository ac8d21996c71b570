"""From cache bytes to bfloat16 pairs in 32-bit registers: integer moves and exact multiplies.

One lane of a warp holds 16 consecutive channels of a row: its codes and the one scale byte that
covers them. Every function takes and returns MLIR values of type i32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

_SIGNS = 0x80008000


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
            itself, or zero where nothing is shifted.
        moves: a byte selector (prmt.b32) a pair, which brings each code to the top of its half.
        shift: how far right its magnitude moves from there.
        mask: the magnitude's bits in a half.
        power: exponent of the power of two that is missing.
    """

    raised: int
    moves: tuple[int, ...]
    shift: int
    mask: int
    power: int


#: Four E4M3 codes a word; codes in the high bytes of the halves, zeros below.
Q8 = Recipe(0, (0x1404, 0x3424), 4, 0x07F0, 120)
#: Eight E2M1 codes a word; even channels are raised into high nibbles, where odd ones are.
Q4N = Recipe(4, (0x4000, 0x5010, 0x6020, 0x7030), 6, 0x01C0, 126)


def _pairs(word: Any, factor: Any, recipe: Recipe) -> list[Any]:
    """Returns the pairs of a word of codes, each times ``factor``."""
    from jaxlib.mlir.dialects import arith

    first = arith.shli(word, const(recipe.raised)) if recipe.raised else word
    second = word if recipe.raised else const(0)
    pairs = []
    for selector in recipe.moves:
        x = _permute(first, second, selector)
        magnitude = arith.shrui(x, const(recipe.shift))
        magnitude = arith.andi(magnitude, const(recipe.mask * 0x10001))
        bits = arith.ori(arith.andi(x, const(_SIGNS)), magnitude)
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
