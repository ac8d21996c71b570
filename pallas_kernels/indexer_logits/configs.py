"""Launch parameters of the indexer kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: What the kernel is written for: channels of a key, keys of a tile, most heads and their steps.
CHANNELS, TILE_KEYS, MOST_HEADS, HEAD_STEP = 128, 64, 32, 8


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
    {"one row": IndexerConfig(1024, warpgroups=1), "rows": IndexerConfig(1024, warpgroups=1)}
)
