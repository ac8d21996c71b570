"""Launch parameters of the selection kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class SelectConfig:
    """How rows are cut; none of the fields may change what is selected.

    Attributes:
        most: entries a program holds in registers, a power of two, at most 16384; a program with
            more of them reads them again in every pass.
        chunk: entries that such a program reads at once; a power of two.
        tile: entries of a program where a longer row is split over several; a power of two.
        part: entries of a list, or of a program that reads again, emitted at once; a power of two.
        reduction: a row is split where a tile keeps at most one of so many entries.
        lanes: entries of a program for each of its warps.
        most_warps: warps of the largest program.
    """

    most: int = 16384
    chunk: int = 8192
    tile: int = 16384
    part: int = 4096
    reduction: int = 4
    lanes: int = 512
    most_warps: int = 16


#: Holds for every row length.
TABLE: Mapping[str, SelectConfig] = MappingProxyType({"row": SelectConfig()})
