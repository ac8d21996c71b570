"""Which rows of a step each context rank computes: balanced mirrored blocks (parallelism.md 2).

A long sequence is cut into 2c blocks; rank r gets blocks r and 2c-1-r, an early one with short
histories and a late one with long ones, so that all ranks have equal work. Blocks end on multiples
of `align` positions: a compressor's group, or a block of candidates, never straddles two ranks.
Short sequences stay whole, each on the rank that has least work. Tables only; data moves elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sharding.errors import ShardingError

#: What a row costs beside its history, in units of one key of history.
ROW_COST = 640.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows first..stop-1 of the packed step, of one sequence, on one rank at local row `row`."""

    sequence: int
    rank: int
    first: int
    stop: int
    row: int
    position: int  # absolute position of `first`


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSplit:
    """The two tables that drive everything, and the blocks they were made from.

    take: int32 [c, rows], packed row that each local row holds, -1 for padding. back: int32 [n],
    rank * rows + local row of every packed row. Rows of a sequence ascend on every rank.
    """

    take: np.ndarray
    back: np.ndarray
    blocks: tuple[Block, ...]

    @property
    def ranks(self) -> int:
        """Context ranks."""
        return self.take.shape[0]

    @property
    def rows(self) -> int:
        """Rows of every rank, padding included."""
        return self.take.shape[1]


def split_context(
    lengths: Sequence[int],
    prefixes: Sequence[int],
    ranks: int,
    *,
    align: int = 2,
    whole_below: int | None = None,
    row_cost: float = ROW_COST,
) -> ContextSplit:
    """Returns which rank computes which rows of a step.

    Args:
        lengths: new rows of every sequence, packed one sequence after the other; 0 is allowed.
        prefixes: positions that each sequence has in the cache already.
        ranks: c.
        align: blocks end on absolute multiples of it; the largest compression ratio.
        whole_below: shorter sequences are not cut; None takes 16 c.
        row_cost: of a row beside its history, in keys.

    Raises:
        ShardingError: lengths and prefixes do not belong together, or a negative one.
    """
    if len(lengths) != len(prefixes) or any(n < 0 for n in (*lengths, *prefixes)):
        raise ShardingError(
            "every sequence of a step has a length and a prefix, neither negative",
            f"lengths {list(lengths)[:8]}, prefixes {list(prefixes)[:8]}",
            "give 0 for a sequence without new rows",
        )
    limit = 16 * ranks if whole_below is None else whole_below
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    pieces: list[tuple[int, int, int, int]] = []  # sequence, rank, first, stop; local to sequence
    work = np.zeros(ranks)
    for sequence, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        if ranks > 1 and length >= limit:
            cuts = block_cuts(length, prefix, ranks, align)
            for block, (start, stop) in enumerate(pairwise(cuts)):
                rank = min(block, 2 * ranks - 1 - block)
                pieces.append((sequence, rank, start, stop))
                work[rank] += block_work(start, stop, prefix, row_cost)
    whole = [s for s, length in enumerate(lengths) if length and (ranks == 1 or length < limit)]
    cost = {s: block_work(0, lengths[s], prefixes[s], row_cost) for s in whole}
    for sequence in sorted(whole, key=lambda s: (-cost[s], s)):
        rank = int(np.argmin(work))
        pieces.append((sequence, rank, 0, lengths[sequence]))
        work[rank] += cost[sequence]
    return _tables(sorted(pieces), [int(f) for f in first], prefixes, ranks)


def block_cuts(length: int, prefix: int, ranks: int, align: int) -> list[int]:
    """Returns the 2c + 1 borders of a sequence's blocks, counted from its first new row.

    Whole units of `align` absolute positions are dealt out, one more to the first blocks, whose
    rows have the shortest histories.
    """
    begin = prefix // align
    units = -(-(prefix + length) // align) - begin
    size, more = divmod(units, 2 * ranks)
    borders = np.cumsum([0, *(size + (block < more) for block in range(2 * ranks))])
    return [int(b) for b in np.clip((begin + borders) * align - prefix, 0, length)]


def block_work(start: int, stop: int, prefix: int, row_cost: float = 0.0) -> float:
    """Returns the work of rows start..stop-1: of each the keys of its history, and `row_cost`."""
    rows = stop - start
    return rows * (prefix + row_cost) + (start + 1 + stop) * rows / 2


def _tables(
    pieces: list[tuple[int, int, int, int]],
    first: list[int],
    prefixes: Sequence[int],
    ranks: int,
) -> ContextSplit:
    used, blocks = [0] * ranks, []
    for sequence, rank, start, stop in pieces:
        if start == stop:
            continue
        blocks.append(
            Block(
                sequence=sequence,
                rank=rank,
                first=first[sequence] + start,
                stop=first[sequence] + stop,
                row=used[rank],
                position=prefixes[sequence] + start,
            )
        )
        used[rank] += stop - start
    rows = max(used)
    take = np.full((ranks, rows), -1, np.int32)
    back = np.zeros(first[-1], np.int32)
    for block in blocks:
        count = block.stop - block.first
        take[block.rank, block.row : block.row + count] = np.arange(block.first, block.stop)
        back[block.first : block.stop] = block.rank * rows + block.row + np.arange(count)
    return ContextSplit(take=take, back=back, blocks=tuple(blocks))


def rank_work(split: ContextSplit, row_cost: float = 0.0) -> np.ndarray:
    """Returns the work of every rank, float64 [c]: of each row the keys of its history."""
    work = np.zeros(split.ranks)
    for block in split.blocks:
        rows = block.stop - block.first
        work[block.rank] += block_work(0, rows, block.position, row_cost)
    return work


def imbalance(split: ContextSplit, row_cost: float = 0.0) -> float:
    """Returns the busiest rank's work over the mean; 1 is perfect, also without work."""
    work = rank_work(split, row_cost)
    return float(work.max() / work.mean()) if work.any() else 1.0


def halo_sources(split: ContextSplit, window: int) -> list[np.ndarray]:
    """Returns where the rows before each block are computed, int32 [window - 1] for every block.

    Ascending positions, ending just before the block. An entry is rank * rows + local row; -1 is a
    row before this step, which the cache of every rank holds, or before the sequence.
    """
    begins: dict[int, int] = {}
    for block in split.blocks:
        begins[block.sequence] = min(begins.get(block.sequence, block.first), block.first)
    found = []
    for block in split.blocks:
        rows = block.first - window + 1 + np.arange(window - 1)
        inside = rows >= begins[block.sequence]
        found.append(np.where(inside, split.back[np.maximum(rows, 0)], -1).astype(np.int32))
    return found


def needs_neighbours_only(split: ContextSplit, window: int) -> bool:
    """Says whether every halo lies on the block's own rank or on one next to it.

    Then two exchanges between neighbours replace the gather of all window rows; blocks shorter than
    a window reach further.
    """
    for block, sources in zip(split.blocks, halo_sources(split, window), strict=True):
        ranks = sources[sources >= 0] // split.rows
        if (abs(ranks - block.rank) > 1).any():
            return False
    return True
