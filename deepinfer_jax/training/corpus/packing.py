"""Fixed-length training rows that hold several items each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.encode import COMPLETION, TEXT, Rendered

_OPEN_ROWS = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of items, all arrays [n, length].

    ids: int32, pad where empty. weights: float32 of each token as a target; the first token of an
    item has none. segments: int32, 1, 2, ... per item of a row, 0 where empty. positions: int32,
    from 0 in each item. labels: int8, see `encode`. dropped: items longer than a row.
    """

    ids: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    dropped: int

    @property
    def fill(self) -> float:
        """Share of the places that hold a token."""
        return float(np.mean(self.segments > 0)) if self.segments.size else 0.0


def assign_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Returns item indices of each row: the fullest open row that has room, of 64 open rows."""
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for i, size in enumerate(sizes):
        fitting = [(left, row) for row, left in room.items() if left >= size]
        if fitting:
            left, row = min(fitting)
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append(i)
        room[row] = left - size
        if len(room) > _OPEN_ROWS:
            del room[min(room, key=lambda r: (room[r], r))]
    return rows


def pack(
    items: Sequence[Rendered],
    length: int,
    seed: int,
    *,
    pad_id: int,
    task_weights: Mapping[str, float] | None = None,
    copy_weight: float = 0.0,
    align: int = 1,
) -> Packed:
    """Returns items packed into rows of `length` tokens, in an order drawn from `seed`.

    Args:
        items: rendered items; those longer than a row are left out and counted.
        length: tokens of a row.
        seed: orders the items and the rows.
        pad_id: id of empty places.
        task_weights: weight of completions and plain text by task, 1 if not given; prompts have 0.
        copy_weight: added to the weight of learned tokens that look back (`Rendered.copies`).
        align: every item starts at a multiple of it (the compression ratio, for instance).
    """
    draw = Draw("pack", seed)
    ordered = draw.shuffled([item for item in items if len(item.ids) <= length])
    sizes = [-(-len(item.ids) // align) * align for item in ordered]
    rows = draw.shuffled(assign_rows([min(s, length) for s in sizes], length))
    shape = (len(rows), length)
    ids = np.full(shape, pad_id, np.int32)
    weights = np.zeros(shape, np.float32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    labels = np.zeros(shape, np.int8)
    for row, members in enumerate(rows):
        start = 0
        for segment, member in enumerate(members, 1):
            item = ordered[member]
            place = slice(start, start + len(item.ids))
            ids[row, place] = item.ids
            labels[row, place] = item.labels
            segments[row, place] = segment
            positions[row, place] = np.arange(len(item.ids))
            learned = (item.labels == COMPLETION) | (item.labels == TEXT)
            weight = (task_weights or {}).get(item.item.task, 1.0) + copy_weight * item.copies
            weights[row, place] = learned * weight
            weights[row, start] = 0.0
            start += sizes[member]
    return Packed(ids, weights, segments, positions, labels, len(items) - len(ordered))
