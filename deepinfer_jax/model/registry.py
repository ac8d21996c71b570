"""The network of each model type, behind the two functions that differ."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import network
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.state import CacheLayout, CacheState, init_cache
from deepinfer_jax.model.v4 import network as v4_network
from deepinfer_jax.model.v4.state import V4CacheState, init_cache_v4

AnyParams = Params | V4Params
AnyState = CacheState | V4CacheState


@dataclass(frozen=True, slots=True)
class Network:
    """init_cache(config, layout) -> state; run_tile as `network.run_tile`."""

    init_cache: Callable[[ModelConfig, CacheLayout], Any]
    run_tile: Callable[..., tuple[Any, Array, dict[str, Array]]]


_NETWORKS = {
    "deepseek_v41": Network(init_cache, network.run_tile),
    "deepseek_v4": Network(init_cache_v4, v4_network.run_tile),
}


def network_of(config: ModelConfig) -> Network:
    """Returns the network of a config's model type."""
    return _NETWORKS[config.model_type]


def empty_cache(config: ModelConfig, layout: CacheLayout) -> AnyState:
    """Returns a zeroed cache whose blocks are dealt out to slots 1.. in equal shares.

    Slot 0 and block 0 are null. An engine that shares pages writes `block_table` itself.
    """
    state = network_of(config).init_cache(config, layout)
    slots, pages = layout.num_slots, layout.max_blocks
    table = np.zeros((slots, pages), np.int32)
    table[1:] = np.arange(1, 1 + (slots - 1) * pages, dtype=np.int32).reshape(slots - 1, pages)
    return replace(state, block_table=jnp.asarray(table))


def single_sequence(
    config: ModelConfig, tokens: int, *, row_tile: int, block_tokens: int = 128
) -> AnyState:
    """Returns a cache for one sequence of up to `tokens` tokens in slot 1."""
    blocks = max(1, -(-tokens // block_tokens))
    layout = CacheLayout(
        num_slots=2,
        num_blocks=blocks + 1,
        max_blocks=blocks,
        block_tokens=block_tokens,
        row_tile=row_tile,
    )
    return empty_cache(config, layout)
