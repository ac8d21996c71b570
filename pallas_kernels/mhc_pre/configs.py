"""The one configuration of mhc_pre."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class MHCConfig:
    """Tiles and launch parameters; a row's bits depend on `part` and `chunk`, not on its tile.

    Attributes:
        rows: rows of a program of the projection; a power of two, at least 16.
        part: channels whose products are added up on their own; a multiple of `chunk`.
        chunk: channels of one step of the projection; a power of two, at least 16.
        warps: warps of a program of the projection.
        stages: chunks in flight.
        balance_rows: rows of a program of the balancing; a power of two.
        balance_warps: its warps.
    """

    rows: int = 64
    part: int = 512
    chunk: int = 64
    warps: int = 4
    stages: int = 4
    balance_rows: int = 8
    balance_warps: int = 4


#: Holds for every number of streams and channels.
TABLE: Mapping[str, MHCConfig] = MappingProxyType({"rows": MHCConfig()})
