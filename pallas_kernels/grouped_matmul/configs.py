"""Frozen tile configurations of the grouped products; none of them changes bits.

Keyed on the product and on how many rows an expert gets on average in a full launch: a static
property of the compiled program's shapes, never of the routing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType


@dataclass(frozen=True)
class GroupedConfig:
    """Tiles of one launch.

    Attributes:
        tile_n: token rows of a tile, a multiple of 16, at most 160.
        consumers: consumer warpgroups; a row tile has 128 weight rows for each.
        stages: depth of the ring in steps of 128 channels.
        registers: registers a consumer thread may use.
        in_flight: wgmma groups left running while the next operand is decoded.
        producer_registers: registers a producer thread may use.
        narrow: smaller widths, multiples of 16, ascending: a tile with fewer valid rows multiplies
            the narrowest that holds them.
    """

    tile_n: int
    consumers: int = 2
    stages: int = 4
    registers: int = 232
    in_flight: int = 1
    producer_registers: int = 40
    narrow: tuple[int, ...] = ()


#: Registers of a consumer's thread by consumers, beside a producer with 40: a block of fewer
#: warpgroups starts with more registers a thread, and a request below that is undefined.
_REGISTERS = MappingProxyType({1: 240, 2: 232, 4: 104})
# Four consumers decode as fast as the copies bring a few rows; for more rows they lack registers,
# and two are enough. Each is the fastest of those tried on an H200.
_ROWS = MappingProxyType(
    {
        8: GroupedConfig(16, consumers=4, stages=5, registers=104),
        20: GroupedConfig(32, stages=6, registers=240, producer_registers=24, narrow=(16,)),
        44: GroupedConfig(64, stages=6, narrow=(32, 48)),
        64: GroupedConfig(80, stages=5, registers=240, producer_registers=24, narrow=(64,)),
        1 << 30: GroupedConfig(
            144, stages=3, registers=240, producer_registers=24, narrow=(16, 128)
        ),
    }
)
#: (product, mean rows of an expert up to which it holds) -> configuration; both products of the
#: same rows have the same tiles of tokens.
TABLE: Mapping[tuple[str, int], GroupedConfig] = MappingProxyType(
    {(product, mean): config for product in ("gate_up", "down") for mean, config in _ROWS.items()}
)


def config_for(product: str, rows: int, experts: int, units: int) -> GroupedConfig:
    """Returns the configuration of one launch.

    Args:
        product: "gate_up" or "down".
        rows: static number of token rows of the launch.
        experts: experts that share them.
        units: weight units (128 rows) of an expert; consumers are reduced to divide them.
    """
    mean = rows / experts
    bound = min(bound for name, bound in TABLE if name == product and mean <= bound)
    config = TABLE[product, bound]
    consumers = gcd(config.consumers, units)
    if consumers == config.consumers:
        return config
    return replace(config, consumers=consumers, registers=_REGISTERS[consumers])
