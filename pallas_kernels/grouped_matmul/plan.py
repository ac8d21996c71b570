"""Work lists of grouped products, built on device: rows sorted by expert, cut into tiles."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Gathered rows of an expert start at multiples of this.
ROW_ALIGNMENT = 8


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["order", "offsets", "slot"], meta_fields=[]
)
@dataclass(frozen=True)
class Groups:
    """Token slots sorted by expert, stable by token, then slot.

    Attributes:
        order: int32 [rows], the flat token slot (token * slots + slot) of each sorted row.
        offsets: int32 [experts + 1], first sorted row of each expert; rows from offsets[-1] on
            belong to no expert.
        slot: int32 [rows], the sorted row of each flat token slot.
    """

    order: Any
    offsets: Any
    slot: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "first", "valid", "count", "source", "position"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TilePlan:
    """Tiles of at most n rows of one expert.

    A kernel reads rows gathered so that every expert starts at a multiple of ROW_ALIGNMENT: a
    tiled TMA copy may not start inside a tile of eight rows.

    Attributes:
        expert: int32 [tiles], 0 from ``count`` on.
        first: int32 [tiles], first gathered row of the tile, a multiple of ROW_ALIGNMENT.
        valid: int32 [tiles], rows of the tile, 1 to n (0 from ``count`` on).
        count: int32 [1], tiles in use.
        source: int32 [gathered rows], the sorted row of each gathered row, -1 for padding.
        position: int32 [rows], where a sorted row lies in the output of ``tiles * n`` rows.
    """

    expert: Any
    first: Any
    valid: Any
    count: Any
    source: Any
    position: Any


def group_rows(ids: jax.Array, experts: int) -> Groups:
    """Returns the token slots of ids int [tokens, slots] grouped by expert.

    An id outside of [0, experts) belongs to no expert; its row is sorted behind all others.
    """
    flat = ids.reshape(-1).astype(jnp.int32)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rows = jnp.arange(flat.size, dtype=jnp.int32)
    counts = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts[:-1], dtype=jnp.int32)])
    slot = jnp.zeros(flat.size, jnp.int32).at[order].set(rows)
    return Groups(order, offsets, slot)


def max_tiles(rows: int, experts: int, tile_n: int) -> int:
    """Returns the most tiles that any split of ``rows`` over ``experts`` needs (static)."""
    used = min(experts, rows)
    return max(1, (rows - used) // tile_n + used)


def gathered_rows(rows: int, experts: int, tile_n: int) -> int:
    """Returns how many gathered rows any split needs, with a tile behind the last row (static)."""
    most = rows + min(experts, rows) * (ROW_ALIGNMENT - 1) + tile_n
    return -(-most // ROW_ALIGNMENT) * ROW_ALIGNMENT


def plan_tiles(offsets: jax.Array, rows: int, tile_n: int) -> TilePlan:
    """Returns the tiles of sorted rows, experts ascending.

    Args:
        offsets: int32 [experts + 1].
        rows: static number of sorted rows, grouped or not.
        tile_n: rows a tile, a multiple of ROW_ALIGNMENT.
    """
    experts = offsets.shape[0] - 1
    counts = offsets[1:] - offsets[:-1]
    last = np.int32(experts - 1)

    def owner(ends: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        place = jnp.arange(size, dtype=jnp.int32)
        # compared with all ends in one pass: the default method loops, one launch a step
        found = jnp.searchsorted(ends, place, side="right", method="compare_all").astype(jnp.int32)
        return place, jnp.minimum(found, last)

    per_expert = (counts + (tile_n - 1)) // tile_n
    ends = jnp.cumsum(per_expert, dtype=jnp.int32)
    starts = ends - per_expert
    aligned = (counts + (ROW_ALIGNMENT - 1)) // ROW_ALIGNMENT * ROW_ALIGNMENT
    gathered_ends = jnp.cumsum(aligned, dtype=jnp.int32)
    gathered_starts = gathered_ends - aligned

    tile, expert = owner(ends, max_tiles(rows, experts, tile_n))
    used = tile < ends[-1]
    within = (tile - starts[expert]) * tile_n
    place, holder = owner(gathered_ends, gathered_rows(rows, experts, tile_n))
    inside = place - gathered_starts[holder]
    real = (inside < counts[holder]) & (place < gathered_ends[-1])
    row, group = owner(offsets[1:], rows)
    rank = row - offsets[group]
    position = (starts[group] + rank // tile_n) * tile_n + rank % tile_n
    return TilePlan(
        expert=jnp.where(used, expert, 0),
        first=jnp.where(used, gathered_starts[expert] + within, 0),
        valid=jnp.where(used, jnp.minimum(counts[expert] - within, tile_n), 0),
        count=ends[-1:],
        source=jnp.where(real, offsets[holder] + inside, -1),
        position=jnp.where(row < offsets[-1], position, 0),
    )
