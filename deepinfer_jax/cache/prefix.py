"""Prefix tree: which block holds which tokens after which others (engine.md 6.2, 6.3).

A node is a published block. Nodes are found by the hash chain of `keys` and then compared, content
and parent, so that equal hashes of unequal prefixes never share rows.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer_jax.cache.keys import block_key
from deepinfer_jax.errors import CacheError


@dataclass(slots=True, eq=False)
class _Node:
    """A published block.

    held: references to its block (0 or 1: somebody or nobody) plus children with held > 0. A node
    with held == 0 has no referenced block at or below it, so it can be evicted after its children.
    """

    block: int
    root: bytes
    parent: "_Node | None" = field(repr=False)
    key: bytes
    content: bytes = field(repr=False)
    children: int = 0
    held: int = 0
    last_use: int = 0
    queued: bool = False


class PrefixTree:
    """Published blocks of a pool of `num_blocks`. Time is logical: the number of `drop` calls.

    Counters: `publications`, `duplicates`, `collisions` (a key already taken by another prefix) and
    `evictions`, all in blocks. `evictable` is the number of nodes without a referenced block at or
    below them: all of them can be evicted, children first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._node_at: list[_Node | None] = [None] * num_blocks
        self._index: dict[bytes, _Node] = {}
        # Leaves with held == 0, each at most once: (last use when queued, block). An entry may be
        # out of date, never too late: it is put right when it reaches the top.
        self._queue: list[tuple[int, int]] = []
        self._now = 0
        self.evictable = 0
        self.publications = 0
        self.duplicates = 0
        self.collisions = 0
        self.evictions = 0

    def __contains__(self, block: int) -> bool:
        """Returns whether the block is published."""
        return self._node_at[block] is not None

    def blocks(self) -> set[int]:
        """Returns the published blocks, O(their number)."""
        return {node.block for node in self._index.values()}

    def match(self, root: bytes, contents: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest published chain that starts with `contents`."""
        blocks = []
        key, parent = root, None
        for content in contents:
            key = block_key(key, content)
            node = self._index.get(key)
            if node is None or not _is_same(node, root, parent, content):
                break
            blocks.append(node.block)
            parent = node
        return blocks

    def publish(
        self, root: bytes, contents: Iterable[bytes], blocks: list[int], before: int | None
    ) -> list[int]:
        """Publishes referenced blocks and returns, per block, the one that holds its content.

        That is the block itself, or an equal one that was published earlier. Where the chain is
        broken (its parent is not published, or a key is taken by another prefix), this block and
        those after it stay unpublished and are returned as they are.

        Args:
            root: from `root_key`.
            contents: of `blocks`, in order.
            blocks: consecutive blocks of one sequence.
            before: the block before them in that sequence, None at its start.

        Raises:
            CacheError: a block is already published with other content, or the root is not that
                of the block before.
        """
        parent = None if before is None else self._node_at[before]
        if before is not None and parent is None:
            return list(blocks)
        if parent is not None and parent.root != root:
            raise CacheError(
                f"a sequence has one root key; block {before} was published under another one"
            )
        kept = []
        key = root if parent is None else parent.key
        for block, content in zip(blocks, contents, strict=True):
            key = block_key(key, content)
            node = self._index.get(key)
            if node is None:
                node = self._adopt(_Node(block, root, parent, key, content))
            elif not _is_same(node, root, parent, content):
                self.collisions += 1
                break
            elif node.block != block:
                self.duplicates += 1
            kept.append(node.block)
            parent = node
        return kept + blocks[len(kept) :]

    def _adopt(self, node: _Node) -> _Node:
        if self._node_at[node.block] is not None:
            raise CacheError(f"block {node.block} is published already, with other content")
        self._index[node.key] = node
        self._node_at[node.block] = node
        if node.parent is not None:
            node.parent.children += 1
        self.publications += 1
        self.evictable += 1
        self._hold(node)
        return node

    def hold(self, blocks: list[int]) -> None:
        """Notes that these blocks went from no reference to one; unpublished ones are skipped."""
        for block in blocks:
            node = self._node_at[block]
            if node is not None:
                self._hold(node)

    def _hold(self, node: _Node | None) -> None:
        while node is not None:
            node.held += 1
            if node.held > 1:
                return  # already counted above
            self.evictable -= 1
            node = node.parent

    def drop(self, blocks: list[int]) -> list[int]:
        """Notes that nobody references these blocks now; returns the unpublished ones."""
        self._now += 1
        unpublished = []
        for block in blocks:
            node = self._node_at[block]
            if node is None:
                unpublished.append(block)
                continue
            while node is not None:
                node.held -= 1
                if node.held:
                    break
                self.evictable += 1
                node.last_use = self._now
                self._queue_if_leaf(node)
                node = node.parent
        return unpublished

    def _queue_if_leaf(self, node: _Node) -> None:
        if not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (node.last_use, node.block))

    def evict(self, count: int) -> list[int]:
        """Unpublishes up to `count` blocks, least recently used leaves first, and returns them."""
        evicted = []
        while len(evicted) < count and self._queue:
            last_use, block = heapq.heappop(self._queue)
            node = self._node_at[block]
            if node is None:
                raise CacheError(f"block {block} waits for eviction but is not published")
            node.queued = False
            if node.held or node.children:
                continue  # it comes back when it is an unreferenced leaf again
            if node.last_use != last_use:
                self._queue_if_leaf(node)
                continue
            self._remove(node)
            evicted.append(block)
        self.evictions += len(evicted)
        return evicted

    def _remove(self, node: _Node) -> None:
        del self._index[node.key]
        self._node_at[node.block] = None
        self.evictable -= 1
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if not parent.held:
                self._queue_if_leaf(parent)

    def clear(self) -> list[int]:
        """Unpublishes every block and returns them all, referenced or not."""
        blocks = sorted(self.blocks())
        for block in blocks:
            self._node_at[block] = None
        self._index.clear()
        self._queue.clear()
        self.evictable = 0
        return blocks

    def check(self, referenced: set[int]) -> None:
        """Recounts the links, given all referenced blocks; O(num_blocks).

        Raises:
            CacheError: a link, counter or queue entry is wrong.
        """
        nodes = [node for node in self._node_at if node is not None]
        above: set[int] = set()  # blocks at or above a referenced one
        for node in nodes:
            step = node if node.block in referenced else None
            while step is not None and step.block not in above:
                above.add(step.block)
                step = step.parent
        children = Counter(node.parent.block for node in nodes if node.parent)
        held = Counter(n.parent.block for n in nodes if n.parent and n.block in above)
        queue = sorted(block for _, block in self._queue)
        if queue != sorted(node.block for node in nodes if node.queued):
            raise CacheError(f"the eviction queue {queue} is not the set of queued blocks")
        for node in nodes:
            is_linked = node.parent is None or self._node_at[node.parent.block] is node.parent
            if not is_linked or self._index.get(node.key) is not node:
                raise CacheError(f"block {node.block} is published, its parent or its key is not")
            found = (node.held, node.children)
            recounted = (held[node.block] + (node.block in referenced), children[node.block])
            if found != recounted:
                raise CacheError(
                    f"block {node.block}: (held, children) is {found}, recounted {recounted}"
                )
            if not node.held and not node.children and not node.queued:
                raise CacheError(f"block {node.block} is an unreferenced leaf outside the queue")
        idle = sum(not node.held for node in nodes)
        if idle != self.evictable or len(nodes) != len(self._index):
            raise CacheError(
                f"{len(nodes)} nodes, {idle} evictable; counted were {len(self._index)} and "
                f"{self.evictable}"
            )


def _is_same(node: _Node, root: bytes, parent: _Node | None, content: bytes) -> bool:
    return node.parent is parent and node.content == content and node.root == root
