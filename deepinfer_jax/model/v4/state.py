"""The cache state of DeepSeek-V4: leaves, sizes and ring access (model.md 10.5).

Layers of equal ratio share one stacked leaf. Slot 0 and block 0 are null: nothing reads them.
Compressed rows and index keys go through `read_pages` and `write_pages` of V4.1.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import (
    encoder_layers,
    index_layers,
    source_layers,
    source_ratios,
)
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.model.v4.compress import pooled_tokens


@struct.dataclass
class V4CacheState:
    """Cache leaves, all float32. `g` runs over `roles.source_ratios`.

    main[g]       [layers of g, blocks, block_tokens/ratio, D]    compressed rows
    tail[g]       [layers of g, slots, capacity, 2, width]        (gate before ape, value)
    index_keys    [ratio-4 layers, blocks, block_tokens/4, D_i]   None without such layers
    index_tail    [ratio-4 layers, slots, capacity, 2, 2*D_i]     the same
    window        [slots, layers, capacity, D]
    length        [slots]                                         committed tokens
    block_table   [slots, max_blocks]
    window_start  [slots]                                         as in V4.1, as is
    write_from    [slots]

    Ring slot = position mod capacity. Tail width is 2*D at ratio 4 (both halves), D at ratio 128.
    """

    main: tuple[Leaf, ...]
    tail: tuple[Leaf, ...]
    index_keys: Leaf
    index_tail: Leaf
    window: Leaf
    length: Leaf
    block_table: Leaf
    window_start: Leaf
    write_from: Leaf


def init_cache_v4(config: ModelConfig, layout: CacheLayout) -> V4CacheState:
    """Returns a zeroed cache with an empty block table.

    Raises:
        ConfigError: `check_execution`, or a block does not hold whole groups.
    """
    check_execution(config)
    ratios, dim = source_ratios(config), config.attention.head_dim
    for ratio in ratios:
        if layout.block_tokens % ratio:
            raise ConfigError(
                f"block_tokens must be a multiple of every compression ratio {ratios}, got "
                f"{layout.block_tokens}: take a multiple of 128"
            )

    def pages(ratio: int, width: int) -> Array:
        count = len(source_layers(config, ratio))
        return jnp.zeros((count, layout.num_blocks, layout.block_tokens // ratio, width))

    def tail(ratio: int, width: int) -> Array:
        # A tile writes its rows before any of them pools, so the ring holds both.
        capacity = pooled_tokens(ratio) + layout.slack - 1
        shape = (len(source_layers(config, ratio)), layout.num_slots, capacity)
        return jnp.zeros((*shape, 2, pooled_tokens(ratio) // ratio * width))

    has_index, index_dim = bool(index_layers(config)), config.indexer.index_head_dim
    window = config.attention.sliding_window + layout.slack
    return V4CacheState(
        main=tuple(pages(ratio, dim) for ratio in ratios),
        tail=tuple(tail(ratio, dim) for ratio in ratios),
        index_keys=pages(4, index_dim) if has_index else None,
        index_tail=tail(4, index_dim) if has_index else None,
        window=jnp.zeros((layout.num_slots, config.num_hidden_layers, window, dim)),
        length=jnp.zeros((layout.num_slots,), jnp.int32),
        block_table=jnp.zeros((layout.num_slots, layout.max_blocks), jnp.int32),
        window_start=jnp.zeros((layout.num_slots,), jnp.int32),
        write_from=jnp.zeros((layout.num_slots,), jnp.int32),
    )


def check_execution(config: ModelConfig) -> None:
    """Checks how the model is to be run.

    Raises:
        ConfigError: other arithmetic than float32, or replay.
    """
    if config.execution.numerics != "float32":
        raise ConfigError(
            f'deepseek_v4 runs with numerics="float32" only, got '
            f"{config.execution.numerics!r}: no vectors of V4's own rounding points exist"
        )
    if config.execution.replay != "off":
        encoder_layers(config)  # raises: V4 has no such half


def write_tail(
    leaf: Float[Array, "n b p 2 w"],
    source: Int[Array, ""],
    tile: Rows,
    value: Float[Array, "t 2 w"],
    allowed: Bool[Array, ""],
) -> Float[Array, "n b p 2 w"]:
    """Returns the leaf with one compressor row written per valid row, none if not allowed."""
    tile, value = tile.shared(value)
    slot = jnp.where(tile.valid & allowed, tile.slot, leaf.shape[1])
    return leaf.at[source, slot, tile.position % leaf.shape[2]].set(value, mode="drop")


def read_tail(
    leaf: Float[Array, "n b p 2 w"],
    source: Int[Array, ""],
    slot: Int[Array, " t"],
    position: Int[Array, "t s"],
) -> Float[Array, "t s 2 w"]:
    """Returns compressor rows at `position`; negative positions read any row."""
    return leaf[source, slot[:, None], jnp.maximum(position, 0) % leaf.shape[2]]
