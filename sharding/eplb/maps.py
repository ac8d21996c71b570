"""The maps between experts and slots, of one layer (parallelism.md 4.1).

A slot is a place for one expert's weights. Rank r owns the slots r*m .. (r+1)*m - 1. An expert has
at least one slot; further ones hold copies, its replicas.
"""

from dataclasses import dataclass

import numpy as np

from sharding.errors import ShardingError
from sharding.rules import padded


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMaps:
    """Tables that route rows to slots: operands of the step program, never constants in it.

    slots: int32 [E, most], the slots of every expert ascending, the first repeated at the end.
    count: int32 [E], how many of them there are.
    """

    slots: np.ndarray
    count: np.ndarray


def initial_layout(experts: int, extras: int, ranks: int) -> np.ndarray:
    """Returns the first placement, int32 [slots]: every expert in order, then 0, 1, 2, ... again.

    `extras` is rounded up so that the slots divide by the ranks, and never refused.
    """
    return (np.arange(padded(experts + extras, ranks)) % experts).astype(np.int32)


def check_layout(layout: np.ndarray, experts: int, ranks: int) -> None:
    """Checks a placement.

    Raises:
        ShardingError: an expert without a slot, an unknown expert, or slots that do not divide.
    """
    absent = np.setdiff1d(np.arange(experts), layout)
    outside = layout[(layout < 0) | (layout >= experts)]
    if absent.size or outside.size or len(layout) % ranks:
        raise ShardingError(
            f"a placement gives every one of {experts} experts a slot, nothing else one, and as "
            f"many slots to each of {ranks} ranks",
            f"{len(layout)} slots, experts without one {absent[:5].tolist()}, others "
            f"{outside[:5].tolist()}",
            "make it with `plan_placement` or `initial_layout`",
        )


def replica_counts(layout: np.ndarray, experts: int) -> np.ndarray:
    """Returns the number of slots of every expert, int [E]."""
    return np.bincount(layout, minlength=experts)


def expert_maps(layout: np.ndarray, experts: int, most: int | None = None) -> ExpertMaps:
    """Returns the tables of a placement.

    most: columns of the table; a layout of more extras keeps the shape if it is fixed ahead, so
    that no program is compiled again. None takes what one expert can have: all extras and its own.
    """
    most = most or len(layout) - experts + 1
    count = replica_counts(layout, experts)
    slots = np.zeros((experts, most), np.int32)
    for expert in range(experts):
        own = np.flatnonzero(layout == expert)
        slots[expert] = own[0]
        slots[expert, : len(own)] = own
    return ExpertMaps(slots=slots, count=count.astype(np.int32))
