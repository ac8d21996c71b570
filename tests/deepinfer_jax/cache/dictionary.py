"""A cache written down with plain dictionaries and full scans: what `BlockCache` must agree with.

A prefix is a tuple (root, content of block 0, content of block 1, ...). `rows` says which prefix
the rows of a block belong to, so a wrongly shared or reused block is noticed.
"""

from collections.abc import Callable

Prefix = tuple[bytes, ...]


class DictionaryCache:
    """Blocks 1 .. num_blocks - 1; `key_of` gives the hash of a prefix."""

    def __init__(
        self, num_blocks: int, checkpoint_room: int, key_of: Callable[[Prefix], bytes]
    ) -> None:
        self.key_of = key_of
        self.checkpoint_room = checkpoint_room  # number of checkpoints
        self.references = dict.fromkeys(range(1, num_blocks), 0)
        self.free = list(range(1, num_blocks))
        self.published: dict[Prefix, int] = {}
        self.by_key: dict[bytes, Prefix] = {}
        self.last_use: dict[Prefix, int] = {}
        self.checkpoints: list[Prefix] = []  # least recently used first
        self.rows: dict[int, Prefix] = {}
        self.now = 0
        self.counts = dict.fromkeys(("publications", "duplicates", "collisions", "evictions"), 0)

    def kept(self) -> list[int]:
        return [b for b in self.published.values() if not self.references[b]]

    def evictable(self) -> list[Prefix]:
        held = [p for p, block in self.published.items() if self.references[block]]
        above = {p[:n] for p in held for n in range(2, len(p) + 1)}
        return [p for p in self.published if p not in above]

    def match(self, prefix: Prefix) -> list[Prefix]:
        found = []
        for n in range(2, len(prefix) + 1):
            if prefix[:n] not in self.published:
                break
            found.append(prefix[:n])
        return found

    def acquire(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free) + len(self.evictable()):
            return None
        while len(self.free) < count:
            parents = {p[:-1] for p in self.published}
            leaves = [p for p in self.evictable() if p not in parents]
            self.evict(min(leaves, key=lambda p: (self.last_use[p], self.published[p])))
        taken, self.free = self.free[:count], self.free[count:]
        self.acquire(taken)
        return taken

    def evict(self, prefix: Prefix) -> None:
        block = self.forget(prefix)
        self.free.append(block)
        self.counts["evictions"] += 1

    def forget(self, prefix: Prefix) -> int:
        block = self.published.pop(prefix)
        self.by_key = {k: p for k, p in self.by_key.items() if p != prefix}
        self.checkpoints = [p for p in self.checkpoints if p != prefix]
        del self.rows[block]
        return block

    def release(self, blocks: list[int]) -> None:
        before = set(self.evictable())
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block] and block not in self.published.values():
                self.rows.pop(block, None)
                self.free.append(block)
        self.now += 1
        for prefix in self.evictable():
            if prefix not in before:
                self.last_use[prefix] = self.now

    def publish(self, prefixes: list[Prefix], blocks: list[int], before: int | None) -> list[int]:
        """Returns the ids to use, with references swapped; `before` is the block before them."""
        kept = []
        if before is not None and before not in self.published.values():
            return list(blocks)
        for prefix, block in zip(prefixes, blocks, strict=True):
            owner = self.by_key.setdefault(self.key_of(prefix), prefix)
            if owner != prefix:
                self.counts["collisions"] += 1
                break
            if prefix not in self.published:
                self.published[prefix] = block
                self.counts["publications"] += 1
            elif self.published[prefix] != block:
                self.counts["duplicates"] += 1
            kept.append(self.published[prefix])
        kept += blocks[len(kept) :]
        swapped = [(new, old) for new, old in zip(kept, blocks, strict=True) if new != old]
        if swapped:
            self.acquire([new for new, _ in swapped])
            self.release([old for _, old in swapped])
        return kept

    def attach(self, prefix: Prefix) -> None:
        self.checkpoints = [p for p in self.checkpoints if p != prefix]
        self.checkpoints = [*self.checkpoints, prefix][-self.checkpoint_room :]

    def touch(self, prefix: Prefix) -> None:
        self.checkpoints = [p for p in self.checkpoints if p != prefix] + [prefix]

    def clear(self) -> None:
        for prefix in sorted(self.published, key=lambda p: self.published[p]):
            block = self.forget(prefix)
            if not self.references[block]:
                self.free.append(block)
