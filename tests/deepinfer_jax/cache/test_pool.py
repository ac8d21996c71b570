"""Block pool: order of reuse, references, and every way to misuse it."""

import pytest

from deepinfer_jax.cache.pool import BlockPool
from deepinfer_jax.errors import CacheError, ConfigError

pytestmark = pytest.mark.accept(5)


def counts(pool):
    return pool.num_free, pool.num_kept, pool.num_referenced


def test_blocks_are_taken_in_order_and_reused_longest_free_first():
    pool = BlockPool(5)
    assert pool.take(2) == [1, 2]
    pool.free(pool.release([2]))
    assert pool.take(3) == [3, 4, 2]
    assert counts(pool) == (0, 0, 4)
    pool.check()


def test_a_block_is_kept_until_freed():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    assert pool.acquire([block]) == []
    assert pool.release([block]) == []
    assert pool.release([block]) == [block]
    assert counts(pool) == (1, 1, 0)
    assert (pool.kept(), pool.referenced()) == ({block}, set())
    assert pool.acquire([block]) == [block]
    assert counts(pool) == (1, 0, 1)
    pool.release([block])
    pool.free([block])
    assert counts(pool) == (2, 0, 0)
    pool.check()


def test_a_block_listed_twice_counts_twice():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.acquire([block, block])
    assert pool.release([block, block, block]) == [block]


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda pool: pool.take(3), "take needs"),
        (lambda pool: pool.take(-1), "take needs"),
        (lambda pool: pool.acquire([0]), "acquired"),
        (lambda pool: pool.acquire([2]), "acquired"),
        (lambda pool: pool.acquire([4]), "acquired"),
        (lambda pool: pool.acquire([-1]), "acquired"),
        (lambda pool: pool.release([2]), "released"),
        (lambda pool: pool.release([1, 1]), "more often"),
        (lambda pool: pool.free([1]), "without references"),
        (lambda pool: pool.free([2]), "freed"),
    ],
)
def test_misuse_is_reported(misuse, complaint):
    pool = BlockPool(4)
    assert pool.take(1) == [1]
    with pytest.raises(CacheError, match=complaint):
        misuse(pool)


def test_a_refused_list_changes_nothing():
    pool = BlockPool(4)
    pool.take(2)
    for call in (pool.acquire, pool.release):
        with pytest.raises(CacheError):
            call([1, 2, 3])
    assert counts(pool) == (1, 0, 2)
    assert pool.release([1, 2]) == [1, 2]


def test_a_pool_has_a_block_beside_the_null_one():
    with pytest.raises(ConfigError, match="null block"):
        BlockPool(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(1),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._references.__setitem__(3, 1),
        lambda pool: setattr(pool, "_referenced", 7),
    ],
)
def test_check_finds_damage(damage):
    pool = BlockPool(4)
    pool.take(1)
    pool.check()
    damage(pool)
    with pytest.raises(CacheError):
        pool.check()
