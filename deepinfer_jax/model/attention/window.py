"""Window rows: a ring per sequence and layer, addressed by position (model.md 4.2)."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import encoder_layers
from deepinfer_jax.model import rows
from deepinfer_jax.model.tile import Rows

AnyCache = (
    Any  # the cache record of V4.1 or V4: both hold window rings [slots, layers, capacity, row]
)


def window_ranks(
    position: Int[Array, " t"], window: int, lowest: Int[Array, " t"] | int = 0
) -> Int[Array, "t w"]:
    """Returns positions max(lowest, p-W+1)..p ascending, valid ones first, then -1."""
    first = jnp.maximum(position - window + 1, lowest)[:, None]
    ranks = first + jnp.arange(window, dtype=jnp.int32)
    return jnp.where(ranks <= position[:, None], ranks, -1)


def write_window(
    config: ModelConfig,
    state: AnyCache,
    layer: Int[Array, ""] | int,
    tile: Rows,
    key: Float[Array, "t c"],
) -> AnyCache:
    """Returns the state with the tile's window rows in their ring slots; padding is dropped."""
    tile, stored = tile.shared(rows.encode_window(config, key))
    ring = tile.position % state.window.shape[2]
    slot = jnp.where(tile.valid, tile.slot, state.window.shape[0])
    return replace(state, window=state.window.at[slot, layer, ring].set(stored, mode="drop"))


def read_window(
    config: ModelConfig,
    state: AnyCache,
    layer: Int[Array, ""] | int,
    slot: Int[Array, " t"],
    position: Int[Array, " t"],
) -> tuple[Float[Array, "t w c"], Bool[Array, "t w"]]:
    """Returns the window ranks of rows at `position`: keys and which are valid."""
    ranks, ring = window_places(config, state, layer, slot, position)
    return rows.decode_window(config, state.window[slot[:, None], layer, ring]), ranks >= 0


def window_places(
    config: ModelConfig,
    state: AnyCache,
    layer: Int[Array, ""] | int,
    slot: Int[Array, " t"],
    position: Int[Array, " t"],
) -> tuple[Int[Array, "t w"], Int[Array, "t w"]]:
    """Returns (positions of the window ranks, -1 for none; their places in the ring)."""
    lowest = first_visible(config, state, layer, slot)
    ranks = window_ranks(position, config.attention.sliding_window, lowest)
    return ranks, jnp.maximum(ranks, 0) % state.window.shape[2]


def first_visible(
    config: ModelConfig, state: AnyCache, layer: Int[Array, ""] | int, slot: Int[Array, " t"]
) -> Int[Array, " t"]:
    """Returns the first position whose window row this layer may read (engine.md 4.2).

    layer: of the backbone, or the number of layers plus a draft stage: stages read what the decoder
    computed.
    """
    start = state.window_start[slot]
    if config.model_type == "deepseek_v4":  # no decoder half
        return start
    truncated = jnp.maximum(start, state.floor[slot])
    return jnp.where(layer >= encoder_layers(config), truncated, start)
