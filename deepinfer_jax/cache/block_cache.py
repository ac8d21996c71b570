"""The cache as the engine sees it: blocks with references, shared prefixes, checkpoints.

Host integers only; one thread; no clock. The usual order for a request (engine.md 6.2-6.5):

    match -> usable_hit -> acquire the reused blocks -> admissible -> allocate the others
    -> publish after every commit that fills a block, attach checkpoints
    -> release all blocks when it ends or is preempted
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.cache.checkpoints import CheckpointStore
from deepinfer_jax.cache.hit import Hit
from deepinfer_jax.cache.keys import ImageSpan, TokenIds, block_contents
from deepinfer_jax.cache.pool import BlockPool
from deepinfer_jax.cache.prefix import PrefixTree
from deepinfer_jax.errors import CacheError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest published prefix of a sequence: its blocks in order, and tokens in them.

    checkpoints: ascending positions on that path at which a window checkpoint is held; the one at
    position p belongs to blocks[p // block_tokens - 1].
    """

    blocks: list[int]
    tokens: int
    checkpoints: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since the start (in blocks unless named otherwise), and what is held now."""

    hits: int  # requests
    hit_tokens: int
    misses: dict[str, int]  # reason -> requests
    publications: int
    duplicates: int
    collisions: int
    evictions: int
    checkpoints_stored: int
    checkpoints_evicted: int
    checkpoints_rejected: int
    checkpoints: int
    checkpoint_bytes: int
    free: int
    kept: int  # cached and referenced by nobody
    referenced: int


class BlockCache:
    """Owns the bookkeeping of `num_blocks` cache blocks, the null block included.

    checkpoint_bytes: bound of all window checkpoints together.

    Raises:
        ConfigError: a size outside its range.
    """

    def __init__(self, num_blocks: int, *, block_tokens: int, checkpoint_bytes: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be >= 1, got {block_tokens}")
        self.block_tokens = block_tokens
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(num_blocks)
        self._checkpoints = CheckpointStore(checkpoint_bytes)
        self._hits = 0
        self._hit_tokens = 0
        self._misses: Counter[str] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self._pool.total + 1

    def references(self) -> dict[int, int]:
        """Returns the references of every block that somebody holds."""
        return {block: self._pool.count(block) for block in self._pool.referenced()}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and evictable ones, exactly."""
        return self._pool.num_free + self._tree.evictable

    def match(self, root: bytes, tokens: TokenIds, *, images: tuple[ImageSpan, ...] = ()) -> Match:
        """Returns the longest published prefix of `tokens`; changes nothing.

        `acquire` what is reused before the next `allocate`, which may evict it.
        """
        size = self.block_tokens
        blocks = self._tree.match(root, block_contents(tokens, size, images=images))
        held = self._checkpoints
        positions = [(i + 1) * size for i, block in enumerate(blocks) if block in held]
        return Match(blocks=blocks, tokens=len(blocks) * size, checkpoints=tuple(positions))

    def record(self, hit: Hit) -> None:
        """Counts the hit of an admitted request in the statistics."""
        if hit.reason is None:
            self._hits += 1
            self._hit_tokens += hit.length
        else:
            self._misses[str(hit.reason)] += 1

    def acquire(self, blocks: list[int]) -> None:
        """Adds one reference per listed block, as for a prefix hit or a fork.

        Raises:
            CacheError: one of them is free or null.
        """
        self._tree.hold(self._pool.acquire(blocks))

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` blocks with one reference each, evicting what nobody holds if need be.

        None, and nothing has changed, if fewer are available.
        """
        if count > self.available:
            return None
        missing = count - self._pool.num_free
        if missing > 0:
            evicted = self._tree.evict(missing)
            self._forget(evicted)
            self._pool.free(evicted)
        return self._pool.take(count)

    def release(self, blocks: list[int]) -> None:
        """Drops one reference per listed block; published ones stay cached until evicted.

        Raises:
            CacheError: one of them is not referenced that often.
        """
        self._pool.free(self._tree.drop(self._pool.release(blocks)))

    def publish(
        self,
        root: bytes,
        tokens: TokenIds,
        blocks: list[int],
        first: int,
        last: int,
        *,
        images: tuple[ImageSpan, ...] = (),
    ) -> list[int]:
        """Publishes blocks `first` to `last` (exclusive) of a sequence; returns their new ids.

        Where an equal block was published earlier, its id comes back: the caller's reference has
        moved to it, and the duplicate has lost one. Other ids come back unchanged.

        Args:
            root: from `root_key`.
            tokens: the sequence; all tokens before `last * block_tokens` are committed.
            blocks: block ids of the sequence from its start, each referenced by the caller;
                `blocks[:first]` as earlier calls returned them.
            first: number of blocks published before.
            last: number of full, committed blocks.
            images: the sequence's images.

        Raises:
            CacheError: the range leaves `tokens` or `blocks`, or a block is not referenced.
        """
        full = min(len(blocks), len(tokens) // self.block_tokens)
        if not 0 <= first <= last <= full:
            raise CacheError(
                f"only full blocks are published: 0 <= first <= last <= {full} (of {len(blocks)} "
                f"blocks and {len(tokens)} tokens), got first {first}, last {last}"
            )
        mine = blocks[first:last]
        self._pool.require(mine, 1, "published")
        contents = block_contents(tokens, self.block_tokens, first=first, last=last, images=images)
        before = blocks[first - 1] if first else None
        kept = self._tree.publish(root, contents, mine, before)
        if kept != mine:
            self.acquire([new for new, old in zip(kept, mine, strict=True) if new != old])
            self.release([old for new, old in zip(kept, mine, strict=True) if new != old])
        return kept

    def attach(self, block: int, leaves: dict[str, np.ndarray]) -> bool:
        """Stores the window state after the last token of `block`; returns whether it is kept.

        It is not if the block is unpublished or the state exceeds the bound. The arrays must not
        change afterwards.
        """
        return block in self._tree and self._checkpoints.put(block, leaves)

    def checkpoint(self, block: int) -> dict[str, np.ndarray]:
        """Returns the window state stored at `block`.

        Raises:
            CacheError: there is none.
        """
        return self._checkpoints.get(block)

    def clear(self) -> None:
        """Forgets all prefixes and checkpoints, as when the weights change.

        Blocks of running requests stay theirs and become private. Use another `root_key` after.
        """
        self._forget(self._tree.clear())
        self._pool.free(sorted(self._pool.kept()))

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self._checkpoints.drop(block)

    def stats(self) -> CacheStats:
        """Returns the counters and what is held now."""
        pool, tree, checkpoints = self._pool, self._tree, self._checkpoints
        return CacheStats(
            hits=self._hits,
            hit_tokens=self._hit_tokens,
            misses=dict(self._misses),
            publications=tree.publications,
            duplicates=tree.duplicates,
            collisions=tree.collisions,
            evictions=tree.evictions,
            checkpoints_stored=checkpoints.stored,
            checkpoints_evicted=checkpoints.evicted,
            checkpoints_rejected=checkpoints.rejected,
            checkpoints=len(checkpoints),
            checkpoint_bytes=checkpoints.nbytes,
            free=pool.num_free,
            kept=pool.num_kept,
            referenced=pool.num_referenced,
        )

    def check(self) -> None:
        """Recounts everything, O(num_blocks): for tests and debugging.

        Raises:
            CacheError: a law is broken, and which.
        """
        kept, published = self._pool.kept(), self._tree.blocks()
        self._pool.check()
        self._tree.check(self._pool.referenced())
        self._checkpoints.check()
        if kept != published - self._pool.referenced():
            raise CacheError(
                f"blocks kept without a reference {sorted(kept)} are not the published ones "
                f"without a reference, of {sorted(published)}"
            )
        strays = set(self._checkpoints.blocks()) - published
        if strays:
            raise CacheError(f"checkpoints without a published block: {sorted(strays)}")
