"""Opening slots, checkpoints and copies of one sequence, for V4.1 and V4; forks run on."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.hit import halo_rows
from deepinfer_jax.model.registry import empty_cache
from deepinfer_jax.model.slots import (
    copy_block,
    copy_slot,
    look_back,
    open_slots,
    put_checkpoint,
    take_checkpoint,
)
from deepinfer_jax.model.state import CacheLayout
from tests.deepinfer_jax.model import test_v4_cache
from tests.golden.network import tiny_config, tiny_params
from tests.invariance import replay_runs as runs
from tests.invariance.replay_runs import BLOCK, IDS, advance, assert_rows, cold, config, opened

pytestmark = pytest.mark.accept(5)
SMALL = CacheLayout(num_slots=4, num_blocks=7, max_blocks=2, block_tokens=16)


def numbered(state):
    """Returns the state with every element of every leaf different within the leaf."""

    def fill(leaf):
        if leaf.dtype == jnp.uint8:
            return jnp.asarray(np.arange(leaf.size, dtype=np.uint8).reshape(leaf.shape))
        return jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, state)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def test_open_slots_sets_every_limit_and_the_look_back():
    whole = tiny_config()
    params = tiny_params()
    assert look_back(whole) == 3
    state = numbered(empty_cache(whole, SMALL))
    before = on_host(state)
    got = on_host(
        open_slots(
            params,
            whole,
            state,
            ints(3, 1, 99),
            length=ints(32, 0, 5),
            first=ints(22, 0, 5),
            floor=ints(7, 9, 5),
            ids_before=ints(40, 41, 42, 50, 51, 52, 60, 61, 62).reshape(3, 3),
        )
    )
    kept = before.floor[[0, 2]].tolist()
    assert got.length[[0, 3, 1]].tolist() == [0, 32, 0]
    assert got.floor[[3, 1]].tolist() == [7, 9]
    assert got.floor[[0, 2]].tolist() == kept
    assert got.window_start[[3, 1]].tolist() == [22, 0]  # a slot without rows to run again: 0
    assert got.write_from[[3, 1]].tolist() == [32, 0]
    capacity = got.engram_ids.shape[1]
    ring = before.engram_ids.copy()
    ring[3, np.arange(19, 22) % capacity] = np.asarray(params.engram.token_map.ids)[[40, 41, 42]]
    np.testing.assert_array_equal(got.engram_ids, ring)  # nothing stands before position 0
    changed = ("length", "floor", "window_start", "write_from", "engram_ids")
    for name in set(before.__dataclass_fields__) - set(changed):
        jax.tree.map(np.testing.assert_array_equal, getattr(got, name), getattr(before, name))


@pytest.mark.parametrize("numerics", ["float32", "checkpoint"])
@pytest.mark.parametrize(("mode", "rings"), [("off", 13), ("mask", 6), ("compact", 6)])
def test_a_checkpoint_moves_the_last_window_of_the_rings_nothing_rebuilds(mode, rings, numerics):
    whole, length = config(mode, numerics), 20
    source = numbered(empty_cache(whole, SMALL))
    leaves = take_checkpoint(whole, source, np.int32(1), np.int32(length))
    before = on_host(source)
    positions = np.arange(length - 8, length)
    held = before.window[1, :rings][:, positions % before.window.shape[2]]
    assert list(leaves) == ["window"]
    np.testing.assert_array_equal(leaves["window"], held)
    # A cache of another capacity, where the rows lie in other ring slots.
    roomy = empty_cache(whole, replace(SMALL, row_tile=13))
    roomy = jax.tree.map(jnp.ones_like, roomy)
    want = on_host(roomy)
    got = on_host(put_checkpoint(whole, roomy, np.int32(2), np.int32(length), on_host(leaves)))
    where = np.ix_([2], np.arange(rings), positions % want.window.shape[2])
    expected = want.window.copy()
    expected[where] = held
    np.testing.assert_array_equal(got.window, expected)
    for name in set(want.__dataclass_fields__) - {"window"}:
        jax.tree.map(np.testing.assert_array_equal, getattr(got, name), getattr(want, name))


#: Leaf -> axis of the slot, or of the block.
V41_SLOTS = {"window": 0, "comp_tail": 1, "engram_ids": 0, "length": 0, "floor": 0}
V4_SLOTS = {"window": 0, "tail": 1, "index_tail": 1, "length": 0}
LIMITS = {"window_start": 0, "write_from": 0}
V41_PAGES = dict.fromkeys(("main", "index_data", "index_scale"), 1)
V4_PAGES = dict.fromkeys(("main", "index_keys"), 1)


@pytest.mark.parametrize("model", ["v41", "v4"])
@pytest.mark.parametrize("copy", [copy_slot, copy_block])
def test_copies_touch_their_target_only(copy, model):
    if model == "v41":
        state = empty_cache(config("off", "checkpoint"), SMALL)
        axes = V41_SLOTS | LIMITS if copy is copy_slot else V41_PAGES
    else:
        state = empty_cache(test_v4_cache.config(), replace(SMALL, block_tokens=128))
        axes = V4_SLOTS | LIMITS if copy is copy_slot else V4_PAGES
    state = numbered(state)
    before = on_host(state)
    got = on_host(copy(state, np.int32(1), np.int32(3)))

    def copied(leaf, axis):
        leaf = leaf.copy()
        if axis == 0:
            leaf[3] = leaf[1]
        else:
            leaf[:, 3] = leaf[:, 1]
        return leaf

    for name in before.__dataclass_fields__:
        want = getattr(before, name)
        if name in axes:
            want = jax.tree.map(partial(copied, axis=axes[name]), want)
        jax.tree.map(np.testing.assert_array_equal, getattr(got, name), want)


def test_state_is_donated():
    whole = config("off", "float32")
    state = empty_cache(whole, SMALL)
    leaves = take_checkpoint(whole, state, np.int32(1), np.int32(16))
    window = state.window  # still there: taking does not consume
    state = put_checkpoint(whole, state, np.int32(2), np.int32(16), leaves)
    assert window.is_deleted()
    window = state.window
    state = copy_slot(state, np.int32(1), np.int32(2))
    assert window.is_deleted()
    main = state.main[0]
    copy_block(state, np.int32(1), np.int32(2))
    assert main.is_deleted()


@pytest.mark.parametrize("numerics", ["float32", "checkpoint"])
def test_a_fork_runs_on_as_if_it_had_run_alone(numerics):
    """The child shares two full blocks and owns a copy of the third, then both go their own way."""
    length, stop, mode = 37, 45, "compact"
    child_ids = np.concatenate([IDS[:length], IDS[::-1]])
    state, _ = cold(mode, numerics, length, length, slot=1)
    state = copy_slot(state, np.int32(1), np.int32(3))
    table = np.asarray(state.block_table).copy()
    shared = length // BLOCK
    state = copy_block(state, np.int32(table[1, shared]), np.int32(table[3, shared]))
    table[3, :shared] = table[1, :shared]
    state = state.replace(block_table=runs.placed(numerics, table))
    state, child = advance(mode, numerics, state, 3, length, stop, ids=child_ids, chunk=3)
    state, parent = advance(mode, numerics, state, 1, length, stop, chunk=1)
    assert_rows(parent, cold(mode, numerics, length, stop)[1][length:], "parent")
    floor = runs.floor_of(mode, length)
    alone = opened(mode, numerics, runs.poisoned(numerics), 2, floor=floor, ids=child_ids)
    alone, _ = advance(mode, numerics, alone, 2, 0, length, ids=child_ids)
    _, want = advance(mode, numerics, alone, 2, length, stop, ids=child_ids)
    assert_rows(child, want, "child")


@pytest.mark.parametrize("policy", ["checkpoint", "halo"])
def test_v4_restore_equals_a_cold_run(policy):
    """Its compressors of ratio 4 pool the group before, so they reach back over the border."""
    whole, hit, stop = test_v4_cache.config(), 128, 141
    window = whole.attention.sliding_window
    ids = test_v4_cache.prompt()[:stop]

    def opened(state, slot, length, first):
        where = {"length": ints(length), "first": ints(first), "floor": ints(0)}
        none = jnp.zeros((1, look_back(whole)), jnp.int32)
        parameters = test_v4_cache.params()
        return open_slots(parameters, whole, state, ints(slot), ids_before=none, **where)

    def run(state, slot, start, end):
        return test_v4_cache.run(state, test_v4_cache.sequence(ids[start:end], start, slot))

    state, _ = run(opened(test_v4_cache.empty([1, 9], np.nan), 1, 0, 0), 1, 0, hit)
    leaves = take_checkpoint(whole, state, np.int32(1), np.int32(hit))
    shapes = {name: leaf.shape[1] for name, leaf in leaves.items()}
    assert shapes == {"window": window, "tail": 4, "index_tail": 4}
    table = np.asarray(state.block_table).copy()
    table[9, 0] = table[1, 0]
    state = replace(
        state,
        window=jnp.full_like(state.window, jnp.nan),
        tail=tuple(jnp.full_like(leaf, jnp.nan) for leaf in state.tail),
        index_tail=jnp.full_like(state.index_tail, jnp.nan),
        block_table=jnp.asarray(table),
    )
    shared = on_host((state.main, state.index_keys))
    if policy == "halo":
        first = hit - halo_rows(window, whole.num_hidden_layers)
        state, _ = run(opened(state, 9, hit, first), 9, first, hit)
    else:
        state = put_checkpoint(whole, state, np.int32(9), np.int32(hit), leaves)
        state = opened(state, 9, hit, hit)
    jax.tree.map(np.testing.assert_array_equal, on_host((state.main, state.index_keys)), shared)
    assert state.length[9] == hit
    _, got = run(state, 9, hit, stop)
    test_v4_cache.same(got, test_v4_cache.reference()[hit:stop])
