"""Checkpoint store: byte accounting, order of eviction."""

import numpy as np
import pytest

from deepinfer_jax.cache.checkpoints import CheckpointStore
from deepinfer_jax.errors import CacheError, ConfigError

pytestmark = pytest.mark.accept(5)


def leaves(size, fill=0):
    return {
        "window": np.full(size - 4, fill, np.uint8),
        "tail": np.full(1, fill, np.float32),
    }


def test_least_recently_used_goes_first():
    store = CheckpointStore(30)
    for block in (1, 2, 3):
        assert store.put(block, leaves(10, block))
    assert store.nbytes == 30
    np.testing.assert_array_equal(store.get(1)["window"], leaves(10, 1)["window"])
    assert store.put(4, leaves(15, 4))
    assert store.blocks() == [1, 4]
    assert (store.nbytes, store.stored, store.evicted, len(store)) == (25, 4, 2, 2)
    store.check()


def test_too_large_a_checkpoint_displaces_nothing_else():
    store = CheckpointStore(30)
    store.put(1, leaves(10))
    assert not store.put(2, leaves(31))
    assert (store.blocks(), store.rejected) == ([1], 1)
    assert store.put(3, leaves(20))
    assert store.nbytes == 30


def test_replacing_accounts_for_the_old_one():
    store = CheckpointStore(30)
    store.put(1, leaves(25))
    assert store.put(1, leaves(30, 7))
    assert (store.nbytes, store.evicted) == (30, 0)
    assert store.get(1)["tail"] == 7
    store.drop(1)
    store.drop(1)
    assert (store.nbytes, 1 in store) == (0, False)


def test_without_room_nothing_is_stored():
    store = CheckpointStore(0)
    assert not store.put(1, leaves(10))
    assert len(store) == 0


def test_misuse_is_reported():
    store = CheckpointStore(30)
    with pytest.raises(CacheError, match="no checkpoint"):
        store.get(1)
    with pytest.raises(CacheError, match="at least one leaf"):
        store.put(1, {})
    with pytest.raises(ConfigError, match=">= 0"):
        CheckpointStore(-1)
    store.put(1, leaves(10))
    store.nbytes = 9
    with pytest.raises(CacheError, match="counted 9"):
        store.check()
