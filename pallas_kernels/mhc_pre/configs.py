"""The one configuration of mhc_pre."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class MHCConfig:
    """Launch parameters; neither changes bits.

    Attributes:
        rows: rows of a program, one lane each; a power of two.
        warps: warps of a program.
    """

    rows: int = 32
    warps: int = 1


#: Holds for every number of streams.
TABLE: Mapping[str, MHCConfig] = MappingProxyType({"rows": MHCConfig()})
