"""Runs of tiny_v41 that begin anywhere: cold, after a prefix hit, or recovered. Used by the replay
and slot tests. One plan length and one layout, so one program per mode and arithmetic.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di
from deepinfer_jax.cache.hit import first_decoder_row, hit_rule
from deepinfer_jax.config.roles import encoder_layers
from deepinfer_jax.loading import load
from deepinfer_jax.model.registry import empty_cache
from deepinfer_jax.model.slots import look_back, open_slots
from deepinfer_jax.model.state import CacheLayout
from tests.golden.network import TINY

WINDOW, KEEP, ROLLBACK, BLOCK, PLAN = 8, 15, 6, 16, 128
LAYOUT = CacheLayout(num_slots=4, num_blocks=25, max_blocks=8, block_tokens=BLOCK)
IDS = np.random.default_rng(11).integers(3, 500, PLAN).astype(np.int32)


@cache
def loaded(numerics):
    return load(TINY, numerics=numerics)


def params(numerics):
    return loaded(numerics).params


@cache
def config(mode, numerics):
    whole = loaded(numerics).config
    return replace(whole, execution=replace(whole.execution, replay=mode))


def rule(mode, restore="checkpoint"):
    relaxed = config(mode, "float32")
    relaxed = replace(relaxed, execution=replace(relaxed.execution, determinism="run"))
    return hit_rule(
        relaxed,
        block_tokens=BLOCK,
        replay=mode,
        keep_tokens=KEEP,
        restore=restore,
        rollback=ROLLBACK,
    )


def floor_of(mode, prompt, length=None):
    return first_decoder_row(rule(mode), prompt, prompt if length is None else length)


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32)


@cache
def _poison(numerics):
    def fill(leaf):
        if leaf.dtype == jnp.uint8:
            return np.full(leaf.shape, 0xFF, np.uint8)
        if leaf.dtype == jnp.float32:
            return np.full(leaf.shape, np.nan, np.float32)
        return np.full(leaf.shape, 77, np.int32)

    state = empty_cache(config("off", numerics), LAYOUT)
    return replace(jax.tree.map(fill, state), block_table=np.asarray(state.block_table))


def poisoned(numerics):
    """Returns a cache of NaN and garbage, limits included; slot s owns blocks 8s-7..8s."""
    return placed(numerics, jax.tree.map(np.copy, _poison(numerics)))


def placed(numerics, tree):
    """Returns arrays where the parameters are: a state from elsewhere would compile again."""
    return jax.device_put(tree, params(numerics).embed.sharding)


def opened(mode, numerics, state, slot, *, length=0, first=None, floor=0, ids=IDS):
    """Returns the state with one slot opened at a hit of `length` tokens; runs from `first`."""
    first = length if first is None else first
    before = (
        first - look_back(config(mode, numerics)) + np.arange(look_back(config(mode, numerics)))
    )
    vector = [jnp.asarray([value], jnp.int32) for value in (slot, length, first, floor)]
    return open_slots(
        params(numerics),
        config(mode, numerics),
        state,
        vector[0],
        length=vector[1],
        first=vector[2],
        floor=vector[3],
        ids_before=jnp.asarray(ids[np.maximum(before, 0)])[None],
    )


def advance(mode, numerics, state, slot, start, stop, *, chunk=None, ids=IDS):
    """Returns (state, logit bits of rows start..stop), run `chunk` rows at a time."""
    found, chunk = [], chunk or stop - start
    for first in range(start, stop, chunk):
        rows = np.arange(first, min(first + chunk, stop))
        state, got = advance_rows(
            mode, numerics, state, [(slot, int(r)) for r in rows], {slot: ids}
        )
        found.append(got)
    return state, np.concatenate(found)


def advance_rows(mode, numerics, state, rows, ids):
    """Returns (state, logit bits) after one step of (slot, position) rows; ids: slot -> tokens."""
    plan = di.make_plan(
        config(mode, numerics),
        [int(ids[slot][position]) for slot, position in rows],
        [position for _, position in rows],
        [slot for slot, _ in rows],
        length=PLAN,
    )
    state, out = di.prefill(params(numerics), config(mode, numerics), state, plan)
    return state, bits(out.logits)[: len(rows)]


def cold(mode, numerics, prompt, stop, *, slot=2, chunk=None, floor=None):
    """Returns (state, bits of rows 0..stop): a prompt in chunks, then single rows."""
    floor = floor_of(mode, prompt) if floor is None else floor
    state = opened(mode, numerics, poisoned(numerics), slot, floor=floor)
    state, found = advance(mode, numerics, state, slot, 0, prompt, chunk=chunk)
    if stop > prompt:
        state, rest = advance(mode, numerics, state, slot, prompt, stop, chunk=1)
        found = np.concatenate([found, rest])
    return state, found


def readable(state, numerics, slot, length, floor, back=ROLLBACK):
    """Returns every byte that rows from `length` on may read, also `back` rows rolled back."""
    host = jax.tree.map(np.asarray, state)
    boundary, table = encoder_layers(config("off", numerics)), host.block_table[slot]
    capacity = host.window.shape[2]
    near = np.arange(max(length - WINDOW - back, 0), length) % capacity
    kept = np.arange(max(floor, length - WINDOW - back, 0), length) % capacity
    parts = {
        "encoder rings": host.window[slot, :boundary][:, near],
        "decoder and draft rings": host.window[slot, boundary:][:, kept],
    }
    for name in ("main", "index_data", "index_scale"):
        for group, leaf in enumerate(getattr(host, name)):
            if leaf is not None:
                pages = leaf[:, table].reshape(leaf.shape[0], -1, leaf.shape[-1])
                count = length * leaf.shape[2] // BLOCK
                parts[f"{name} {group}"] = pages[:, :count]
    if length % 2:
        tail = host.comp_tail[0]
        parts["open pair"] = tail[:, slot, (length - 1) % tail.shape[2]]
    return parts


def assert_rows(got, want, label=""):
    wrong = np.unique((got != want).nonzero()[0])
    assert not wrong.size, f"{label}: rows {wrong[:10]} of {len(want)} differ"


def assert_states(got, want, label=""):
    assert got.keys() == want.keys()
    wrong = [name for name in want if got[name].tobytes() != want[name].tobytes()]
    assert not wrong, f"{label}: {wrong} differ"
