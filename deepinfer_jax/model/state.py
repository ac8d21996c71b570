"""The cache state of the network: its leaves, their sizes and how rows are addressed (engine.md
2.6).

Sources of equal compression ratio share one stacked leaf, so that a scanned layer can pick its
source by index. Slot 0 and block 0 are null: nothing reads them.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int, Shaped

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import source_layers, source_ratios
from deepinfer_jax.model import rows as row_formats
from deepinfer_jax.model.params import Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Sizes of the cache. Capacities never change bits (determinism.md 12, trap 3).

    `rollback` is the number of positions that may be taken back (draft length + 1).
    """

    num_slots: int
    num_blocks: int
    max_blocks: int  # blocks of one sequence
    block_tokens: int = 128
    row_tile: int = 8  # rows that may be written before any of them is read
    rollback: int = 6

    @property
    def slack(self) -> int:
        """Ring rows beyond the ones a single row reads."""
        return max(self.row_tile, self.rollback)


@struct.dataclass
class CacheState:
    """Cache leaves. `g` runs over `roles.source_ratios`; rows are float32 or the bytes of model.md
    4.1.

    main[g]         [sources, blocks, block_tokens/ratio, row]   compressed rows
    index_data[g]   [sources, blocks, block_tokens/ratio, row]   index keys
    index_scale[g]  the same with scale bytes, None in float32
    window          [slots, layers + stages, capacity, row]      ring slot = position mod capacity
    comp_tail[g]    [sources, slots, capacity, 2, head_dim]      (gate, value); None at ratio 1
    engram_ids      [slots, capacity]                            compressed ids; -1: image
    length          [slots]                                      committed tokens
    block_table     [slots, max_blocks]
    floor           [slots]   first window row that decoder layers and draft stages see; 0: replay
                              off, or a short prompt (engine.md 4.4)
    window_start    [slots]   first window row that any layer sees; not 0 where rows before a prefix
                              hit run again to rebuild the windows (engine.md 4.5)
    write_from      [slots]   rows before it write no pages: those are shared, and written
    """

    main: tuple[Leaf, ...]
    index_data: tuple[Leaf, ...]
    index_scale: tuple[Leaf | None, ...]
    window: Leaf
    comp_tail: tuple[Leaf | None, ...]
    engram_ids: Leaf
    length: Leaf
    block_table: Leaf
    floor: Leaf
    window_start: Leaf
    write_from: Leaf


def init_cache(config: ModelConfig, layout: CacheLayout) -> CacheState:
    """Returns a zeroed cache with an empty block table."""
    attention = config.attention
    ratios = source_ratios(config)
    stages = config.draft.num_stages if config.draft else 0
    capacity = attention.sliding_window + layout.slack
    main_width, main_dtype = row_formats.main_row(config)
    window_width, window_dtype = row_formats.window_row(config)
    (data_width, data_dtype), scale_width = row_formats.index_row(config)

    def pages(ratio: int, width: int, dtype: jnp.dtype) -> Array:
        count = len(source_layers(config, ratio))
        return jnp.zeros((count, layout.num_blocks, layout.block_tokens // ratio, width), dtype)

    def tail(ratio: int) -> Array | None:
        if ratio == 1:
            return None
        count = len(source_layers(config, ratio))
        shape = (count, layout.num_slots, ratio + layout.slack - 1, 2, attention.head_dim)
        return jnp.zeros(shape, jnp.float32)

    return CacheState(
        main=tuple(pages(ratio, main_width, main_dtype) for ratio in ratios),
        index_data=tuple(pages(ratio, data_width, data_dtype) for ratio in ratios),
        index_scale=tuple(
            pages(r, scale_width, jnp.dtype(jnp.uint8)) if scale_width else None for r in ratios
        ),
        window=jnp.zeros(
            (layout.num_slots, config.num_hidden_layers + stages, capacity, window_width),
            window_dtype,
        ),
        comp_tail=tuple(tail(ratio) for ratio in ratios),
        engram_ids=jnp.zeros((layout.num_slots, layout.slack + 3), jnp.int32),
        length=jnp.zeros((layout.num_slots,), jnp.int32),
        block_table=jnp.zeros((layout.num_slots, layout.max_blocks), jnp.int32),
        floor=jnp.zeros((layout.num_slots,), jnp.int32),
        window_start=jnp.zeros((layout.num_slots,), jnp.int32),
        write_from=jnp.zeros((layout.num_slots,), jnp.int32),
    )


@runtime_checkable
class Paged(Protocol):
    """A cache whose compressed rows are addressed through a block table, of V4.1 or V4."""

    @property
    def block_table(self) -> Array:
        """[slots, max_blocks]."""
        ...

    @property
    def write_from(self) -> Array:
        """[slots]."""
        ...


def may_close(
    state: Paged, slot: Int[Array, " t"], position: Int[Array, " t"], ratio: int
) -> Bool[Array, " t"]:
    """Returns which rows write the compressed row of the group they close."""
    return ((position + 1) % ratio == 0) & (position >= state.write_from[slot])


def page_address(
    state: Paged, slot: Int[Array, "..."], index: Int[Array, "..."], rows_per_block: int
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Returns (block, row) of compressed index `index` of the sequence in `slot`."""
    return state.block_table[slot, index // rows_per_block], index % rows_per_block


def read_pages(
    leaf: Shaped[Array, "n p z w"],
    state: Paged,
    source: Int[Array, ""] | int,
    slot: Int[Array, " t"],
    index: Int[Array, "t k"],
) -> Shaped[Array, "t k w"]:
    """Returns rows `index` of each row's own sequence; negative indices read row 0."""
    block, row = page_address(state, slot[:, None], jnp.maximum(index, 0), leaf.shape[2])
    return leaf[source, block, row]


def write_pages(
    leaf: Shaped[Array, "n p z w"],
    state: Paged,
    source: Int[Array, ""] | int,
    slot: Int[Array, " t"],
    index: Int[Array, " t"],
    value: Shaped[Array, "t w"],
    allowed: Shaped[Array, " t"],
) -> Shaped[Array, "n p z w"]:
    """Returns the leaf with one row written per allowed row; the others are dropped."""
    block, row = page_address(state, slot, index, leaf.shape[2])
    block = jnp.where(allowed, block, leaf.shape[1])
    return leaf.at[source, block, row].set(value, mode="drop")
