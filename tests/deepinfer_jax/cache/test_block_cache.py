"""Sharing, isolation, eviction order and misuse, one situation at a time."""

import numpy as np
import pytest

from deepinfer_jax.cache import prefix as prefix_module
from deepinfer_jax.cache.block_cache import BlockCache
from deepinfer_jax.cache.hit import Hit, Miss
from deepinfer_jax.cache.keys import ImageSpan
from deepinfer_jax.errors import CacheError, ConfigError

pytestmark = pytest.mark.accept(5)
A, B = b"a" * 16, b"b" * 16
STATE = {"window": np.zeros(10, np.uint8)}


def new_cache(blocks=8, block_tokens=4, checkpoint_bytes=100):
    return BlockCache(blocks + 1, block_tokens=block_tokens, checkpoint_bytes=checkpoint_bytes)


def store(cache, tokens, root=A, **kwargs):
    """Runs a request to its end; returns the blocks that stay cached."""
    count = len(tokens) // cache.block_tokens
    blocks = cache.publish(root, tokens, cache.allocate(count), 0, count, **kwargs)
    cache.release(blocks)
    cache.check()
    return blocks


def tokens(*blocks, size=4):
    """Returns blocks of equal tokens."""
    return [value for value in blocks for _ in range(size)]


def test_a_finished_request_is_found_again():
    cache = new_cache()
    blocks = store(cache, tokens(1, 2, 3))
    match = cache.match(A, [*tokens(1, 2, 3), 9])
    assert (match.blocks, match.tokens, match.checkpoints) == (blocks, 12, ())
    assert cache.match(A, tokens(1, 2)).blocks == blocks[:2]
    assert cache.match(A, [*tokens(1), 2, 2, 2]).blocks == blocks[:1]
    assert cache.match(A, tokens(1, 3)).blocks == blocks[:1]
    assert cache.match(A, tokens(2, 3)).blocks == []
    assert cache.match(A, np.asarray(tokens(1, 2, 3), np.int32)).blocks == blocks


def test_roots_do_not_share():
    cache = new_cache()
    blocks = store(cache, tokens(1, 2))
    assert cache.match(B, tokens(1, 2)).blocks == []
    others = store(cache, tokens(1, 2), B)
    assert not set(blocks) & set(others)
    assert cache.match(A, tokens(1, 2)).blocks == blocks
    assert cache.stats().duplicates == 0


def test_images_do_not_share():
    cache = new_cache()
    cat, dog = (ImageSpan(start=5, length=2, digest=name) for name in (b"cat", b"dog"))
    blocks = store(cache, tokens(1, 2), images=(cat,))
    assert cache.match(A, tokens(1, 2), images=(cat,)).blocks == blocks
    assert cache.match(A, tokens(1, 2), images=(dog,)).blocks == blocks[:1]
    assert cache.match(A, tokens(1, 2)).blocks == blocks[:1]


def test_the_first_of_two_equal_blocks_is_kept():
    cache = new_cache()
    first, second = cache.allocate(2), cache.allocate(2)
    assert cache.publish(A, tokens(1, 2), first, 0, 2) == first
    assert cache.publish(A, tokens(1, 3), second, 0, 2) == [first[0], second[1]]
    assert cache.stats().duplicates == 1
    assert cache.stats().referenced == 3  # the duplicate of block 0 is free again
    cache.release(first)
    cache.release([first[0], second[1]])
    cache.check()
    assert cache.match(A, tokens(1, 3)).blocks == [first[0], second[1]]


def test_blocks_are_published_as_they_fill():
    cache = new_cache()
    blocks = cache.allocate(3)
    assert cache.publish(A, tokens(1, 2), blocks, 0, 1) == blocks[:1]
    assert cache.publish(A, tokens(1, 2, 3), blocks, 1, 3) == blocks[1:]
    assert cache.publish(A, tokens(1, 2, 3), blocks, 3, 3) == []
    assert cache.match(A, tokens(1, 2, 3)).blocks == blocks


def test_publishing_again_changes_nothing():
    cache = new_cache()
    blocks = cache.allocate(2)
    for _ in range(2):
        assert cache.publish(A, tokens(1, 2), blocks, 0, 2) == blocks
    cache.check()
    assert (cache.stats().publications, cache.stats().duplicates) == (2, 0)


def test_leaves_go_first_and_the_least_recently_used_chain_before_others():
    cache = new_cache(6)
    old, young = store(cache, tokens(1, 2, 3)), store(cache, tokens(4, 5, 6))
    evicted = []
    for _ in range(6):
        before = set(
            cache.match(A, tokens(1, 2, 3)).blocks + cache.match(A, tokens(4, 5, 6)).blocks
        )
        (block,) = cache.allocate(1)
        evicted.append(block)
        assert block in before
        cache.check()
    assert evicted == [*reversed(old), *reversed(young)]
    assert cache.allocate(1) is None


def test_use_makes_a_chain_recent():
    cache = new_cache(6)
    old, young = store(cache, tokens(1, 2, 3)), store(cache, tokens(4, 5, 6))
    cache.acquire(old[:2])
    cache.release(old[:2])
    assert cache.allocate(6) == [old[2], *reversed(young), old[1], old[0]]


def test_a_shared_prompt_outlives_its_continuations():
    cache = new_cache(5)
    system = store(cache, tokens(1))
    branches = [store(cache, tokens(1, value))[1] for value in (2, 3)]
    other = store(cache, tokens(9, 9))
    cache.acquire(system)
    cache.release(system)
    assert cache.allocate(5) == [*branches, *reversed(other), *system]


def test_referenced_blocks_and_what_is_above_them_stay():
    cache = new_cache(4)
    blocks = store(cache, tokens(1, 2, 3, 4))
    cache.acquire(blocks[2:3])  # without its parents, as after a fork
    assert cache.available == 1
    assert cache.allocate(2) is None
    assert cache.allocate(1) == blocks[3:]
    cache.check()
    assert cache.match(A, tokens(1, 2, 3, 4)).blocks == blocks[:3]
    cache.release(blocks[2:3])
    assert cache.available == 3


def test_a_refused_allocation_evicts_nothing():
    cache = new_cache(3)
    blocks = store(cache, tokens(1, 2, 3))
    assert cache.allocate(4) is None
    assert cache.match(A, tokens(1, 2, 3)).blocks == blocks
    assert cache.allocate(0) == []


def test_equal_hashes_of_unequal_prefixes_do_not_share(monkeypatch):
    monkeypatch.setattr(prefix_module, "block_key", lambda parent, content: bytes(16))
    cache = new_cache()
    blocks = store(cache, tokens(1))
    assert cache.match(A, tokens(2)).blocks == []
    assert cache.match(B, tokens(1)).blocks == []
    assert cache.match(A, tokens(1, 1)).blocks == blocks  # not the block after itself
    mine = cache.allocate(2)
    assert cache.publish(A, tokens(2, 3), mine, 0, 2) == mine
    assert cache.stats().collisions == 1
    # Its parent is not published, so nothing can be published after it.
    assert cache.publish(A, tokens(2, 3, 4), [*mine, *cache.allocate(1)], 2, 3) != []
    assert cache.stats().publications == 1
    cache.check()


def test_equal_blocks_after_colliding_parents_do_not_share(monkeypatch):
    real = prefix_module.block_key

    def blind_to_parents(parent, content):
        return real(bytes(16), content)

    monkeypatch.setattr(prefix_module, "block_key", blind_to_parents)
    cache = new_cache()
    blocks = store(cache, tokens(1, 7))
    assert cache.match(A, tokens(1, 7)).blocks == blocks
    store(cache, tokens(2, 7))
    assert cache.match(A, tokens(2, 7)).tokens == 4
    assert cache.stats().collisions == 1


def test_a_checkpoint_lives_and_dies_with_its_block():
    cache = new_cache(3)
    blocks = store(cache, tokens(1, 2, 3))
    assert cache.attach(blocks[1], STATE)
    assert cache.match(A, tokens(1, 2, 3)).checkpoints == (8,)
    assert cache.match(A, tokens(1)).checkpoints == ()
    np.testing.assert_array_equal(cache.checkpoint(blocks[1])["window"], STATE["window"])
    assert cache.allocate(2) == [blocks[2], blocks[1]]
    assert cache.stats().checkpoints == 0
    with pytest.raises(CacheError, match="no checkpoint"):
        cache.checkpoint(blocks[1])
    assert not cache.attach(blocks[1], STATE)  # not published any more


def test_checkpoints_are_bounded():
    cache = new_cache(checkpoint_bytes=25)
    blocks = store(cache, tokens(1, 2, 3))
    assert all(cache.attach(block, STATE) for block in blocks)
    assert cache.match(A, tokens(1, 2, 3)).checkpoints == (8, 12)
    assert not cache.attach(blocks[0], {"window": np.zeros(26, np.uint8)})
    stats = cache.stats()
    assert (stats.checkpoint_bytes, stats.checkpoints_stored) == (20, 3)
    assert (stats.checkpoints_evicted, stats.checkpoints_rejected) == (1, 1)


def test_clear_forgets_prefixes_but_not_running_requests():
    cache = new_cache(4)
    store(cache, tokens(1))
    running = cache.publish(A, tokens(2, 3), cache.allocate(2), 0, 2)
    cache.attach(running[1], STATE)
    cache.clear()
    cache.check()
    assert cache.match(A, tokens(2, 3)).blocks == cache.match(A, tokens(1)).blocks == []
    stats = cache.stats()
    assert (stats.free, stats.kept, stats.referenced, stats.checkpoints) == (2, 0, 2, 0)
    more = [*running, *cache.allocate(1)]
    assert cache.publish(A, tokens(2, 3, 4), more, 2, 3) == more[2:]  # private: no parent
    assert cache.match(A, tokens(2, 3, 4)).blocks == []
    cache.release(more)
    assert cache.stats().free == 4
    store(cache, tokens(5, 6), B)


def test_hits_and_misses_are_counted():
    cache = new_cache()
    for hit in (
        Hit(128),
        Hit(256),
        Hit(0, Miss.NO_MATCH),
        Hit(0, Miss.BYPASS),
        Hit(0, Miss.BYPASS),
    ):
        cache.record(hit)
    stats = cache.stats()
    assert (stats.hits, stats.hit_tokens) == (2, 384)
    assert stats.misses == {"no match": 1, "bypass": 2}


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda c, b: c.publish(A, tokens(1, 2), b, 0, 3), "only full blocks"),
        (lambda c, b: c.publish(A, tokens(1), b, 0, 2), "only full blocks"),
        (lambda c, b: c.publish(A, [1] * 7, b, 0, 2), "only full blocks"),
        (lambda c, b: c.publish(A, tokens(1, 2), b, 2, 1), "only full blocks"),
        (lambda c, b: c.publish(A, tokens(1, 2), [b[0], 7], 0, 2), "published"),
        (lambda c, b: c.publish(A, tokens(9, 2), [*b[:1], 0], 0, 2), "published"),
        (
            lambda c, b: (c.publish(A, tokens(1), b, 0, 1), c.publish(A, tokens(2), b, 0, 1)),
            "other",
        ),
        (
            lambda c, b: (c.publish(A, tokens(1), b, 0, 1), c.publish(B, tokens(1, 2), b, 1, 2)),
            "one root key",
        ),
        (lambda c, b: c.release([*b, *b]), "more often"),
        (lambda c, b: c.acquire([7]), "acquired"),
    ],
)
def test_misuse_is_reported(misuse, complaint):
    cache = new_cache()
    blocks = cache.allocate(2)
    with pytest.raises(CacheError, match=complaint):
        misuse(cache, blocks)


def test_block_tokens_is_positive():
    with pytest.raises(ConfigError, match="block_tokens"):
        BlockCache(4, block_tokens=0, checkpoint_bytes=0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache, b: setattr(cache._tree._node_at[b[0]], "held", 1),
        lambda cache, b: setattr(cache._tree._node_at[b[0]], "children", 0),
        lambda cache, b: cache._tree._queue.clear(),
        lambda cache, b: cache._tree._node_at.__setitem__(b[0], None),
        lambda cache, b: cache._tree._index.clear(),
        lambda cache, b: setattr(cache._tree, "evictable", 3),
        lambda cache, b: cache._pool.free([b[0]]),
        lambda cache, b: cache._checkpoints.put(8, STATE),
    ],
)
def test_check_finds_damage(damage):
    cache = new_cache()
    blocks = store(cache, tokens(1, 2))
    cache.check()
    damage(cache, blocks)
    with pytest.raises(CacheError):
        cache.check()
