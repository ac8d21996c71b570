"""Frozen configurations of the sparse attention kernel; none of them changes bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class MlaConfig:
    """Launch parameters of one kernel: two warpgroups that multiply, one that gathers.

    Attributes:
        registers: registers a thread of a multiplying warpgroup may use; at least 168.
        gather_registers: registers a thread of the gathering warpgroup may use. Twice the first
            and once the second may not exceed 504, what a block of 384 threads is launched with.
        batch: rows a warp of the gathering warpgroup keeps in flight: 2, 4 or 8.
        exchange: whether each multiplying warpgroup computes the scores of half of a block's ranks,
            and they exchange what they found, or both compute all.
        out_slots: 64-column pieces of output that one warpgroup may have on their way.
    """

    registers: int = 208
    gather_registers: int = 88
    batch: int = 4
    exchange: bool = True
    out_slots: int = 1


#: Bytes of a selected row (0: no second set) -> configuration.
TABLE: Mapping[int, MlaConfig] = MappingProxyType(
    {0: MlaConfig(), 288: MlaConfig(), 528: MlaConfig()}
)
