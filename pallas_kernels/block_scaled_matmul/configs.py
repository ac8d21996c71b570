"""Tile shapes of the dense products, as data: keyed on the weight's shape class.

Small and large numbers of rows use different tiles because that does not change a bit of a row
(kernels.md 6, rule 2: shown on the H200, benchmarks/results); a new tile needs the same proof.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one Hopper kernel cuts a product; none of the fields may change a bit of the result.

    Attributes:
        rows: rows of x a computing warpgroup owns (64 or 128).
        cols: weight rows (output columns) of a tile, a multiple of 16, at most 256.
        depth: K elements of a stage.
        stages: stages in shared memory.
        warpgroups: computing warpgroups of a block, one below the other.
        cluster: blocks that share a tile of one operand by multicast.
        share: that operand, "w" (blocks lie one below the other) or "x" (side by side).
        width: tiles of the minor axis that are visited side by side (L2 reuse).
        minor: 0 for rows, 1 for columns as the minor axis of that order.
        out_slots: store buffers of a warpgroup, ``store`` columns each.
        unroll: FP8 K steps that follow each other without a gap.
        ahead: FP8 products left running while the one before them is promoted.
    """

    rows: int = 64
    cols: int = 128
    depth: int = 128
    stages: int = 4
    warpgroups: int = 2
    cluster: int = 1
    share: Literal["w", "x"] = "w"
    width: int = 8
    minor: int = 1
    out_slots: int = 2
    unroll: int = 2
    ahead: int = 1

    @property
    def store(self) -> int:
        """Columns of one output store, and of one FP8 promotion."""
        return next(width for width in (64, 32, 16) if self.cols % width == 0)


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """How the kernel for few tokens cuts a product; none of the fields may change a bit.

    Attributes:
        tokens: tokens of a tile (the N of an MMA), a multiple of 8.
        warpgroups: computing warpgroups of a block.
        blocks: 64-row weight blocks of a warpgroup.
        depth: K elements of a stage, 128 or 256. The longer reads two neighbouring lines of every
            weight row at once.
        stages: stages in shared memory.
        cluster: blocks that share the tokens by multicast.
        width: weight tiles that are visited side by side (L2 reuse).
    """

    tokens: int = 64
    warpgroups: int = 2
    blocks: int = 1
    depth: int = 128
    stages: int = 4
    cluster: int = 1
    width: int = 8

    @property
    def store(self) -> int:
        """Tokens of one output store."""
        return min(self.tokens, 64)

    @property
    def in_flight(self) -> int:
        """Products left running while the next operand is decoded."""
        # with two accumulators ptxas serialises products whose operands are registers
        return 1 if self.blocks == 1 else 0


#: Largest number of rows that the kernel for few tokens takes.
FEW_TOKENS = 256
#: Weight rows from which a decode tile covers 256 of them: below, more blocks beat larger ones.
WIDE = 16384
_WIDTHS = (8, 16, 32, 64)
#: Of an H200.
MULTIPROCESSORS = 132
#: Columns of work that one tile costs beside its own.
NARROW = 16

TABLE: Mapping[str, Tile | DecodeTile] = MappingProxyType(
    {
        "decode n>=16384 t<=8": DecodeTile(tokens=8, warpgroups=4, depth=256, stages=3),
        "decode n>=16384 t<=16": DecodeTile(tokens=16, warpgroups=4, depth=256, stages=3),
        "decode n>=16384 t<=32": DecodeTile(tokens=32, warpgroups=4, stages=5),
        "decode n>=16384 t<=64": DecodeTile(tokens=64, warpgroups=4, stages=4),
        "decode t<=8": DecodeTile(tokens=8, warpgroups=1, depth=256, stages=7),
        "decode t<=16": DecodeTile(tokens=16, warpgroups=1, depth=256, stages=7),
        "decode t<=32": DecodeTile(tokens=32, warpgroups=1, stages=10),
        "decode t<=64": DecodeTile(tokens=64, warpgroups=1, depth=256, stages=4),
        "bf16 256": Tile(cols=256, depth=64, stages=4),
        "bf16 224": Tile(cols=224, depth=64, stages=4),
        "bf16 192": Tile(cols=192, depth=64, stages=5, out_slots=1),
        "float32 256": Tile(cols=256, depth=64, stages=4, out_slots=1),
        "bf16 few": Tile(cols=64, depth=128, warpgroups=1, stages=5),
        "bf16 few n<2048": Tile(cols=16, depth=128, warpgroups=1, stages=8, out_slots=1),
        "fp8": Tile(stages=5, unroll=4),
        "fp8 few": Tile(cols=64, stages=7, unroll=4),
        "fp8 m<=64": Tile(cols=32, warpgroups=1, stages=12, unroll=8, ahead=3),
    }
)


def decode_tile(n: int, k: int, rows: int) -> DecodeTile:
    """Returns the tile of an FP8 weight [n, k] for at most FEW_TOKENS tokens."""
    tokens = next((t for t in _WIDTHS if rows <= t), _WIDTHS[-1])
    tile = TABLE[f"decode {'n>=16384 ' if n >= WIDE else ''}t<={tokens}"]
    assert isinstance(tile, DecodeTile)
    if k % tile.depth == 0:
        return tile
    return dataclasses.replace(tile, depth=tile.depth // 2, stages=2 * tile.stages)


def bf16_tile(n: int, rows: int, itemsize: int, grouped: bool) -> Tile:
    """Returns the tile of a BF16 weight with ``n`` rows (of each group) and an output type.

    Of three widths the one that leaves the fewest multiprocessors idle in the last round.
    """
    if rows <= FEW_TOKENS:
        tiles = [TABLE["bf16 few n<2048" if n < 2048 and not grouped else "bf16 few"]]
    elif itemsize == 4 or grouped:
        tiles = [TABLE["float32 256" if itemsize == 4 else "bf16 256"]]
    else:
        tiles = [TABLE[f"bf16 {cols}"] for cols in (256, 224, 192)]

    def work(tile: Tile | DecodeTile) -> float:
        assert isinstance(tile, Tile)
        blocks = -(-rows // (tile.rows * tile.warpgroups)) * -(-n // tile.cols)
        # narrow tiles read more shared memory for a product
        return -(-blocks // MULTIPROCESSORS) * (tile.cols + NARROW)

    best = min(tiles, key=work)
    assert isinstance(best, Tile)
    return best


def fp8_tile(rows: int) -> Tile:
    """Returns the tile of the FP8 form."""
    tile = TABLE["fp8 m<=64" if rows <= 64 else "fp8 few" if rows <= FEW_TOKENS else "fp8"]
    assert isinstance(tile, Tile)
    return tile
