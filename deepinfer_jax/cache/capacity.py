"""Exact arithmetic of cache memory: how much fits, and when one more request does (engine.md 6.3).

Byte counts come from the shapes of the real state, which is affine in slots and blocks.
"""

import math
from dataclasses import dataclass, replace

import jax

from deepinfer_jax.cache.hit import Replay, window_layers
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CapacityError, ConfigError
from deepinfer_jax.model.registry import AnyState, network_of
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.v4.state import V4CacheState


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A cache that fits its budget. Slot 0 and block 0 are null and counted; sizes in bytes.

    image_bytes: of encoded images' rows, which share the budget.
    """

    layout: CacheLayout
    block_bytes: int  # of one block, all layers
    slot_bytes: int  # of one slot: rings, tails, its row of the block table
    available_bytes: int
    image_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache state."""
        slots, blocks = self.layout.num_slots, self.layout.num_blocks
        return slots * self.slot_bytes + blocks * self.block_bytes + self.image_bytes


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Returns the number of blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def plan_capacity(
    config: ModelConfig,
    available_bytes: int,
    *,
    max_seqs: int,
    max_len: int,
    block_tokens: int,
    row_tile: int,
    rollback: int,
    image_bytes: int = 0,
) -> Capacity:
    """Returns the cache with as many blocks as the budget holds beside `max_seqs` slots.

    One sequence of `max_len` tokens always fits alone, so the oldest request can always finish
    once the others are preempted.

    Args:
        config: the model.
        available_bytes: budget of the whole cache state.
        max_seqs: sequences that run together.
        max_len: longest sequence, in tokens.
        block_tokens: tokens per block.
        row_tile: rows that may be written before any of them is read (`CacheLayout.row_tile`).
        rollback: positions that may be taken back (`CacheLayout.rollback`).
        image_bytes: what encoded images take of the budget.

    Raises:
        ConfigError: a size below 1, or one the network refuses.
        CapacityError: slots and the blocks of one sequence exceed the budget.
    """
    sizes = {"max_seqs": max_seqs, "max_len": max_len, "block_tokens": block_tokens}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}")
    layout = CacheLayout(
        num_slots=max_seqs + 1,
        num_blocks=1,
        max_blocks=blocks_for(max_len, block_tokens),
        block_tokens=block_tokens,
        row_tile=row_tile,
        rollback=rollback,
    )
    slot_bytes, block_bytes = _unit_bytes(config, layout)
    if not block_bytes:
        raise ConfigError("no layer of this model has paged rows, so there is nothing to page")
    slots, least = layout.num_slots, 1 + layout.max_blocks
    required = slots * slot_bytes + least * block_bytes + image_bytes
    if required > available_bytes:
        seeing = f", and {image_bytes} bytes of encoded images" if image_bytes else ""
        raise CapacityError(
            f"the cache needs at least {required} bytes: {slots} slots (max_seqs + 1) of "
            f"{slot_bytes} bytes and {least} blocks (one sequence of max_len {max_len}, and the "
            f"null block) of {block_bytes} bytes{seeing}; available are {available_bytes} bytes. "
            "Raise cache_bytes, or lower max_seqs or max_len"
        )
    blocks = (available_bytes - image_bytes - slots * slot_bytes) // block_bytes
    return Capacity(
        layout=replace(layout, num_blocks=blocks),
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        available_bytes=available_bytes,
        image_bytes=image_bytes,
    )


def _unit_bytes(config: ModelConfig, layout: CacheLayout) -> tuple[int, int]:
    """Returns the bytes of one slot and of one block; allocates nothing."""

    def total(slots: int, blocks: int) -> int:
        return _bytes(_shapes(config, replace(layout, num_slots=slots, num_blocks=blocks)))

    least = total(1, 1)
    return total(2, 1) - least, total(1, 2) - least


def _shapes(config: ModelConfig, layout: CacheLayout) -> AnyState:
    return jax.eval_shape(lambda: network_of(config).init_cache(config, layout))


def _bytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def checkpoint_bytes(config: ModelConfig, *, replay: Replay, rollback: int) -> int:
    """Returns the bytes of one window checkpoint: W + rollback rows of every ring that the replay
    mode does not rebuild (engine.md 4.5).

    Rings of draft stages are included with replay off, when nothing else rebuilds them. V4's
    compressor tails are included too: its groups of 4 pool the group before, across a border.

    Raises:
        ConfigError: replay of a model without an encoder half.
    """
    layout = CacheLayout(
        num_slots=1, num_blocks=1, max_blocks=1, row_tile=1, rollback=max(rollback, 1)
    )
    state = _shapes(config, layout)
    if isinstance(state, V4CacheState):
        window_layers(config, replay)  # refuses replay
        return _bytes((state.window, state.tail, state.index_tail))
    rings = state.window.shape[1]
    stored = rings if replay == "off" else window_layers(config, replay)
    return _bytes(state.window) // rings * stored


def reserved_blocks(*, running: int, lookahead: int, block_tokens: int, num_blocks: int) -> int:
    """Returns the blocks that admission leaves for the growth of running requests.

    Each may write `lookahead` rows before the host sees its length again, rounded up to blocks,
    and 1 % of all blocks is kept. Zero if nothing runs: then the whole cache is for the next
    request, however large (progress guarantee).

    Args:
        running: number of running requests.
        lookahead: (depth + 1) * (draft length + 1) rows.
        block_tokens: tokens per block.
        num_blocks: blocks of the cache.
    """
    if not running:
        return 0
    return running * blocks_for(lookahead, block_tokens) + num_blocks // 100


def admissible(
    *,
    available: int,
    need: int,
    running: int,
    lookahead: int,
    block_tokens: int,
    num_blocks: int,
) -> bool:
    """Returns whether a request may start: available - reserved >= need (engine.md 6.3).

    Args:
        available: free + evictable blocks, after the request acquired the blocks it reuses.
        need: blocks it must allocate now.
        running: see `reserved_blocks`, as are the others.
        lookahead: rows.
        block_tokens: tokens per block.
        num_blocks: blocks of the cache.
    """
    reserved = reserved_blocks(
        running=running, lookahead=lookahead, block_tokens=block_tokens, num_blocks=num_blocks
    )
    return available - reserved >= need
