"""Launch parameters of the indexer kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class IndexerConfig:
    """How the keys of a sequence are cut; neither field may change a bit.

    Attributes:
        keys: keys of a program, a multiple of 128 times ``warpgroups``.
        warpgroups: computing warpgroups of a program.
    """

    keys: int
    warpgroups: int = 2


#: By the query rows that share their keys: one row, or up to eight.
TABLE: Mapping[str, IndexerConfig] = MappingProxyType(
    {"one row": IndexerConfig(keys=1024), "rows": IndexerConfig(keys=1024)}
)
