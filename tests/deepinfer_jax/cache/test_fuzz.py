"""Random operations against a cache of plain dictionaries, compared after every operation.

Each operation checks the laws (`BlockCache.check`), the exact block ids, the eviction order, the
counters, and that every block handed out or found still holds the rows of the prefix it stands for.
"""

import random
from dataclasses import dataclass, field
from functools import cache as memo

import jaxtyping
import numpy as np
import pytest

from deepinfer_jax.cache import prefix as prefix_module
from deepinfer_jax.cache.block_cache import BlockCache
from deepinfer_jax.cache.keys import block_contents, block_key
from tests.deepinfer_jax.cache.dictionary import DictionaryCache, Prefix

BLOCK = 2  # tokens
ROOTS = (b"a" * 16, b"b" * 16)
CHECKPOINT = 16  # bytes


@memo
def contents(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    return tuple(block_contents(tokens, BLOCK))


def strong_key(prefix: Prefix) -> bytes:
    key = prefix[0]
    for content in prefix[1:]:
        key = prefix_module.block_key(key, content)
    return key


def weak_block_key(parent: bytes, content: bytes) -> bytes:
    """A hash of three bits, so that unequal prefixes often share a key."""
    return bytes([block_key(parent, content)[0] % 8])


@dataclass
class Sequence:
    """A running request of the fuzz; `blocks` cover all of `tokens`."""

    root: bytes
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    published: int = 0

    def prefixes(self) -> list[Prefix]:
        whole = (self.root, *contents(tuple(self.tokens)))
        return [whole[: n + 1] for n in range(1, len(whole))]


class Fuzz:
    """Drives `BlockCache` and `DictionaryCache` with the same operations."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        blocks = self.random.choice((6, 10, 14))
        room = self.random.choice((1, 3))
        self.cache = BlockCache(blocks + 1, block_tokens=BLOCK, checkpoint_bytes=room * CHECKPOINT)
        self.model = DictionaryCache(blocks + 1, room, strong_key)
        self.running: list[Sequence] = []

    def step(self) -> None:
        names = ("start", "grow", "publish", "fork", "end", "attach", "restore", "flood", "clear")
        weights = (22, 16, 28, 6, 14, 8, 4, 1, 0.2)
        getattr(self, self.random.choices(names, weights)[0])()
        self.compare()

    def some_tokens(self, count: int) -> list[int]:
        return self.random.choices((0, 1), (5, 1), k=count)

    def some_sequence(self) -> Sequence | None:
        return self.random.choice(self.running) if self.running else None

    def start(self) -> None:
        """Match, acquire part of it, allocate the rest or give up."""
        root, length = self.random.choice(ROOTS), self.random.randint(1, 8)
        new = Sequence(root, self.some_tokens(length))
        match = self.cache.match(root, new.tokens)
        found = self.model.match((root, *contents(tuple(new.tokens))))
        assert match.blocks == [self.model.published[p] for p in found]
        assert [self.model.rows[block] for block in match.blocks] == found
        assert match.tokens == BLOCK * len(found)
        held = [BLOCK * (len(p) - 1) for p in found if p in self.model.checkpoints]
        assert match.checkpoints == tuple(held)
        new.published = self.random.randint(0, len(found))
        new.blocks = match.blocks[: new.published]
        self.acquire(new.blocks)
        if self.extend(new):
            self.running.append(new)
        else:
            self.release(new.blocks)

    def extend(self, sequence: Sequence) -> bool:
        """Gives the sequence the blocks its tokens need, and writes its full blocks."""
        need = -(-len(sequence.tokens) // BLOCK) - len(sequence.blocks)
        got, expected = self.cache.allocate(need), self.model.allocate(need)
        assert got == expected
        if got is None:
            return False
        assert not set(got) & self.model.rows.keys(), "a block in use was handed out"
        sequence.blocks += got
        for prefix, block in list(zip(sequence.prefixes(), sequence.blocks, strict=False)):
            assert self.model.rows.setdefault(block, prefix) == prefix
        return True

    def grow(self) -> None:
        sequence = self.some_sequence()
        if sequence is None:
            return
        old = list(sequence.tokens)
        sequence.tokens += self.some_tokens(self.random.randint(1, 3))
        if not self.extend(sequence):
            sequence.tokens = old

    def publish(self) -> None:
        sequence = self.some_sequence()
        if sequence is None:
            return
        first, prefixes = sequence.published, sequence.prefixes()
        last = self.random.randint(first, len(prefixes))
        tokens = np.asarray(sequence.tokens, np.int32)
        got = self.cache.publish(sequence.root, tokens, sequence.blocks, first, last)
        expected = self.model.publish(
            prefixes[first:last],
            sequence.blocks[first:last],
            sequence.blocks[first - 1] if first else None,
        )
        assert got == expected
        sequence.blocks[first:last] = got
        sequence.published = last

    def fork(self) -> None:
        """Shares the full blocks; the tail of the child is its own."""
        parent = self.some_sequence()
        if parent is None:
            return
        full = self.random.randint(0, len(parent.tokens) // BLOCK)
        child = Sequence(
            parent.root,
            parent.tokens[: BLOCK * full] + self.some_tokens(1),
            parent.blocks[:full],
            min(full, parent.published),
        )
        self.acquire(child.blocks)
        if self.extend(child):
            self.running.append(child)
        else:
            self.release(child.blocks)

    def end(self) -> None:
        sequence = self.some_sequence()
        if sequence is not None:
            self.running.remove(sequence)
            self.release(sequence.blocks)

    def attach(self) -> None:
        sequence = self.some_sequence()
        if sequence is None:
            return
        for prefix, block in zip(sequence.prefixes(), sequence.blocks, strict=False):
            if self.random.random() < 0.5:
                is_published = self.model.published.get(prefix) == block
                leaves = {"window": np.frombuffer(prefix_stamp(prefix), np.uint8)}
                assert self.cache.attach(block, leaves) == is_published
                if is_published:
                    self.model.attach(prefix)

    def restore(self) -> None:
        if self.model.checkpoints:
            prefix = self.random.choice(self.model.checkpoints)
            leaves = self.cache.checkpoint(self.model.published[prefix])
            self.model.touch(prefix)
            assert leaves["window"].tobytes() == prefix_stamp(prefix)

    def flood(self) -> None:
        """Takes every block there is, which evicts all that can be evicted."""
        count = self.cache.available
        assert self.cache.allocate(count + 1) is None
        got = self.cache.allocate(count)
        assert got == self.model.allocate(count)
        assert not set(got) & self.model.rows.keys()
        self.release(got)

    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()
        for sequence in self.running:
            sequence.published = 0
            # Private now, but still written.
            for prefix, block in zip(sequence.prefixes(), sequence.blocks, strict=False):
                self.model.rows[block] = prefix

    def acquire(self, blocks: list[int]) -> None:
        self.cache.acquire(blocks)
        self.model.acquire(blocks)

    def release(self, blocks: list[int]) -> None:
        self.cache.release(blocks)
        self.model.release(blocks)

    def compare(self) -> None:
        cache, model = self.cache, self.model
        cache.check()
        stats, counts = cache.stats(), model.counts
        assert stats.free == len(model.free)
        assert stats.kept == len(model.kept())
        assert stats.free + stats.kept + stats.referenced == len(model.references)
        assert cache.available == len(model.free) + len(model.evictable())
        assert {name: getattr(stats, name) for name in counts} == counts
        assert stats.checkpoints == len(model.checkpoints)
        prefixes = {p[:n] for p in model.published for n in range(2, len(p))}
        assert prefixes <= model.published.keys(), "a parent was evicted before its child"


def prefix_stamp(prefix: Prefix) -> bytes:
    return (b"".join(prefix) + bytes(CHECKPOINT))[-CHECKPOINT:]


def run(seed: int, operations: int) -> Fuzz:
    fuzz = Fuzz(seed)
    for _ in range(operations):
        fuzz.step()
    for sequence in fuzz.running:
        fuzz.release(sequence.blocks)
    fuzz.flood()
    stats = fuzz.cache.stats()
    assert (stats.free, stats.kept, stats.referenced) == (len(fuzz.model.references), 0, 0)
    return fuzz


def require_events(fuzzes: list[Fuzz], least: int, *names: str) -> None:
    """Every event happened often enough to mean something."""
    for name in ("publications", "duplicates", "evictions", *names):
        count = sum(fuzz.model.counts[name] for fuzz in fuzzes)
        print(f"{name}: {count}")
        assert count >= least, name


@pytest.fixture
def no_type_checks():
    """Type checks cost ten times the work that they check; one test below keeps them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_random_operations_with_type_checks():
    require_events([run(seed, 1_000) for seed in range(3)], 10)


@pytest.mark.accept(5)
@pytest.mark.usefixtures("no_type_checks")
def test_random_operations():
    require_events([run(seed, 20_000) for seed in range(8)], 2000)


@pytest.mark.accept(5)
@pytest.mark.usefixtures("no_type_checks")
def test_random_operations_with_colliding_hashes(monkeypatch):
    monkeypatch.setattr(prefix_module, "block_key", weak_block_key)
    require_events([run(seed, 10_000) for seed in range(100, 104)], 500, "collisions")


@pytest.mark.slow
@pytest.mark.accept(5)
@pytest.mark.usefixtures("no_type_checks")
def test_a_million_random_operations():
    require_events([run(seed, 20_000) for seed in range(1000, 1050)], 10_000)
