"""Reference counts of cache blocks and the list of free ones (engine.md 6.1, 6.3).

A block is free, referenced (by requests and transfers), or kept: referenced by nobody, but holding
rows that the prefix tree can hand out again. Block 0 is null and in none of these states.
"""

from collections import deque

from deepinfer_jax.errors import CacheError, ConfigError

_FREE = -1  # reference count of a free block; 0 is a kept one


class BlockPool:
    """Blocks 1 .. num_blocks - 1. Every operation is O(1) per block.

    Raises:
        ConfigError: there is no block beside the null one.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a block pool needs the null block and at least one more, got {num_blocks} blocks"
            )
        self._references = [_FREE] * num_blocks
        self._free = deque(range(1, num_blocks))
        self._referenced = 0

    @property
    def total(self) -> int:
        """Number of blocks without the null block."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        """Number of blocks somebody holds."""
        return self._referenced

    @property
    def num_kept(self) -> int:
        """Number of blocks nobody holds whose rows are still cached."""
        return self.total - self.num_free - self.num_referenced

    def count(self, block: int) -> int:
        """Returns the references of a block that is not free."""
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Returns `count` free blocks with one reference each, longest free first.

        Raises:
            CacheError: fewer are free.
        """
        if not 0 <= count <= len(self._free):
            raise CacheError(f"take needs 0 <= count <= {len(self._free)} free blocks, got {count}")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._referenced += count
        return blocks

    def acquire(self, blocks: list[int]) -> list[int]:
        """Adds one reference per listed block; returns those that had none.

        Raises:
            CacheError: one of them is free or null; nothing has changed.
        """
        self.require(blocks, 0, "acquired")
        woken = []
        for block in blocks:
            if self._references[block] == 0:
                woken.append(block)
            self._references[block] += 1
        self._referenced += len(woken)
        return woken

    def release(self, blocks: list[int]) -> list[int]:
        """Drops one reference per listed block; returns those that have none left, now kept.

        Raises:
            CacheError: one of them has fewer references than it is listed times.
        """
        self.require(blocks, 1, "released")
        idle = []
        for block in blocks:
            left = self._references[block] - 1
            if left < 0:
                raise CacheError(f"block {block} is listed more often than it is referenced")
            self._references[block] = left
            if left == 0:
                idle.append(block)
        self._referenced -= len(idle)
        return idle

    def free(self, blocks: list[int]) -> None:
        """Puts kept blocks at the end of the free list.

        Raises:
            CacheError: one of them is referenced, or free already.
        """
        self.require(blocks, 0, "freed")
        for block in blocks:
            if self._references[block] != 0:
                raise CacheError(
                    f"only a block without references can be freed, block {block} has "
                    f"{self._references[block]}"
                )
            self._references[block] = _FREE
        self._free.extend(blocks)

    def kept(self) -> set[int]:
        """Returns the kept blocks, O(num_blocks)."""
        return {block for block, count in enumerate(self._references) if count == 0}

    def referenced(self) -> set[int]:
        """Returns the blocks somebody holds, O(num_blocks)."""
        return {block for block, count in enumerate(self._references) if count > 0}

    def require(self, blocks: list[int], least: int, verb: str) -> None:
        """Checks that every listed block has at least `least` references and is not free.

        Raises:
            CacheError: one has not; `verb` says what was to be done with it.
        """
        if not blocks:
            return
        in_range = min(blocks) >= 1 and max(blocks) <= self.total
        if not in_range or min(map(self._references.__getitem__, blocks)) < least:
            wrong = [
                block
                for block in blocks
                if not 1 <= block <= self.total or self._references[block] < least
            ]
            raise CacheError(
                f"a block that is {verb} lies in 1..{self.total}, is not free and has at least "
                f"{least} references; got {wrong[:8]}"
            )

    def check(self) -> None:
        """Recounts everything, O(num_blocks).

        Raises:
            CacheError: free + kept + referenced blocks are not all blocks, each once.
        """
        free = sorted(self._free)
        marked = [block for block, count in enumerate(self._references) if count == _FREE]
        if [0, *free] != marked:
            raise CacheError(f"marked free beside the null block: {marked}, free list: {free}")
        referenced = len(self.referenced())
        if referenced != self._referenced:
            raise CacheError(f"{referenced} blocks are referenced, counted were {self._referenced}")
