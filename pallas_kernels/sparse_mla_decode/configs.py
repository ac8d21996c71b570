"""Frozen configurations of the sparse attention kernel; none of them changes bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: What the Hopper kernel is written for: channels of a row, heads of a block of threads, and ranks
#: of a block, of which a first set has whole ones.
DIM, HEADS, BLOCK = 512, 64, 64


@dataclass(frozen=True)
class MlaConfig:
    """Launch parameters of one kernel: two warpgroups that multiply, two that gather.

    Attributes:
        registers: registers a thread of a multiplying warpgroup may use; at least 168.
        gather_registers: registers a thread of a gathering warpgroup may use. The two together may
            not exceed 256, twice what a block of 512 threads is launched with.
        out_slots: 64-column pieces of output that one warpgroup may have on their way.
    """

    registers: int = 184
    gather_registers: int = 72
    out_slots: int = 1


#: Bytes of a selected row (0: no second set) -> configuration.
TABLE: Mapping[int, MlaConfig] = MappingProxyType(
    {0: MlaConfig(), 288: MlaConfig(), 528: MlaConfig()}
)
