"""The one configuration of rms_norm_quant."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class NormConfig:
    """Launch parameters; neither changes bits.

    Attributes:
        warps: warps of a program, which holds one row.
        chunk: elements loaded at once; a power of two.
    """

    warps: int = 4
    chunk: int = 1024


#: Holds for every row width.
TABLE: Mapping[str, NormConfig] = MappingProxyType({"row": NormConfig()})
