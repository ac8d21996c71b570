"""Tiles of mhc_pre, as data.

Few and many rows use different tiles because that does not change a bit of a row (kernels.md 6,
rule 2: shown on the H200, benchmarks/results/kernel_bits_h200_2026-11-30.jsonl).
"""

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


#: Largest number of rows that take the tile for few.
FEW_ROWS = 64
#: Both hold for every number of streams and channels.
TABLE: Mapping[str, MHCConfig] = MappingProxyType(
    {"few rows": MHCConfig(rows=16), "rows": MHCConfig()}
)


def config_for(rows: int) -> MHCConfig:
    """Returns the configuration for a static number of rows."""
    return TABLE["few rows" if rows <= FEW_ROWS else "rows"]
