"""Bytes of the cache, computed from the shapes of the real state (model.md 4.3)."""

import math
from dataclasses import dataclass

import jax

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.state import CacheLayout, init_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFootprint:
    """Bytes that grow with every token, and bytes of every sequence whatever its length."""

    token_bytes: float
    window_bytes: int
    tail_bytes: int
    look_back_bytes: int

    @property
    def sequence_bytes(self) -> int:
        """Rings and compressor tails: what the published 3,128,352 bytes count."""
        return self.window_bytes + self.tail_bytes


#: Capacities of DeepInfer: room for a draft of five and its anchor, no row tiles.
DEEPINFER = {"row_tile": 1, "rollback": 6}


def cache_footprint(config: ModelConfig, *, row_tile: int, rollback: int = 6) -> CacheFootprint:
    """Returns the cache bytes of a model at given ring capacities; allocates nothing."""
    layout = CacheLayout(
        num_slots=1, num_blocks=1, max_blocks=1, row_tile=row_tile, rollback=rollback
    )
    state = jax.eval_shape(lambda: init_cache(config, layout))
    pages = (state.main, state.index_data, state.index_scale)
    return CacheFootprint(
        token_bytes=_bytes(pages) / layout.block_tokens,
        window_bytes=_bytes(state.window),
        tail_bytes=_bytes(state.comp_tail),
        look_back_bytes=_bytes(state.engram_ids),
    )


def _bytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
