"""Window checkpoints in host memory: what a prefix hit needs beside its blocks (engine.md 4.5).

A checkpoint is the state of a sequence after the last token of a published block: the window rings
that the replay mode does not rebuild. It is stored under that block and goes when the block goes.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.errors import CacheError, ConfigError


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    leaves: dict[str, np.ndarray]
    nbytes: int


class CheckpointStore:
    """Checkpoints by block, at most `max_bytes` of them; the least recently used one goes first.

    Counters: `stored`, `evicted` (by the bound) and `rejected` (larger than the bound alone).

    Raises:
        ConfigError: a negative bound.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(f"checkpoint bytes must be >= 0 (0 keeps none), got {max_bytes}")
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.stored = 0
        self.evicted = 0
        self.rejected = 0
        self._by_block: OrderedDict[int, _Checkpoint] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of checkpoints."""
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        """Returns whether the block has a checkpoint."""
        return block in self._by_block

    def put(self, block: int, leaves: Mapping[str, np.ndarray]) -> bool:
        """Stores a checkpoint, replacing the block's old one; returns whether it fits.

        The arrays are kept, not copied: the caller must not change them afterwards.

        Raises:
            CacheError: no leaves.
        """
        if not leaves:
            raise CacheError(f"a checkpoint needs at least one leaf, block {block} got none")
        self.drop(block)
        nbytes = sum(leaf.nbytes for leaf in leaves.values())
        if nbytes > self.max_bytes:
            self.rejected += 1
            return False
        while self.nbytes + nbytes > self.max_bytes:
            _, oldest = self._by_block.popitem(last=False)
            self.nbytes -= oldest.nbytes
            self.evicted += 1
        self._by_block[block] = _Checkpoint(dict(leaves), nbytes)
        self.nbytes += nbytes
        self.stored += 1
        return True

    def get(self, block: int) -> dict[str, np.ndarray]:
        """Returns the leaves of a block's checkpoint, which becomes the most recently used.

        Raises:
            CacheError: the block has none.
        """
        if block not in self._by_block:
            raise CacheError(
                f"block {block} has no checkpoint: take it right after the match, before another "
                "checkpoint is stored"
            )
        self._by_block.move_to_end(block)
        return dict(self._by_block[block].leaves)

    def drop(self, block: int) -> None:
        """Removes the block's checkpoint if it has one."""
        gone = self._by_block.pop(block, None)
        if gone is not None:
            self.nbytes -= gone.nbytes

    def clear(self) -> None:
        """Removes all checkpoints."""
        self._by_block.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Recounts the bytes.

        Raises:
            CacheError: they differ from the counter, or exceed the bound.
        """
        sizes = [leaf.nbytes for c in self._by_block.values() for leaf in c.leaves.values()]
        if sum(sizes) != self.nbytes or self.nbytes > self.max_bytes:
            raise CacheError(
                f"checkpoints take {sum(sizes)} bytes, counted {self.nbytes}, bound "
                f"{self.max_bytes}"
            )

    def blocks(self) -> list[int]:
        """Returns the blocks with a checkpoint, least recently used first."""
        return list(self._by_block)
