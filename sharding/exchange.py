"""Work sent to the rank that can do it, and the answers brought home, in rounds of fixed size.

Every item goes to one rank; a round carries up to `cap` items between every pair of ranks, and as
many rounds are run as the fullest pair needs, so that nothing is dropped and shapes are fixed
(scheme A' of parallelism.md 3.2). Only data moves: no value depends on `cap`, on the number of
ranks, or on what else is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Tree = Any


def exchange(
    serve: Callable[[Tree, Array], Tree],
    items: Tree,
    target: Array,
    valid: Array,
    *,
    axes: Sequence[str],
    cap: int,
    packed: bool = False,
) -> Tree:
    """Returns what `serve` on rank target[i] answers to item i; zeros for items that are not valid.

    To be called by all devices of a `shard_map` that is manual over `axes`, the same number of
    times.

    Args:
        serve: Called as `serve(received, present)` with leaves [ranks * cap, ...] and the mask of
            slots that hold an item; returns leaves of the same first axis. Its answer to an item
            must not depend on the other slots.
        items: Leaves [n, ...].
        target: int32 [n], rank along `axes`, the first axis slowest.
        valid: bool [n].
        axes: Names of the mesh axes over which items travel.
        cap: Items from one rank to another in a round. With room for all of them there is one
            round and no loop, whose bound the host of a GPU would have to wait for.
        packed: All leaves travel as bytes in one collective, rather than in one each: for devices
            on which starting a collective costs more than a copy of what it sends.
    """
    names, ranks = tuple(axes), lax.axis_size(tuple(axes))
    order = queue_places(target, valid, ranks)

    def travel(leaf: Array) -> Array:
        bits = _as_bits(leaf).reshape(ranks, cap, *leaf.shape[1:])
        return _as_values(lax.all_to_all(bits, names, 0, 0).reshape(leaf.shape), leaf.dtype)

    def travel_all(tree: Tree) -> Tree:
        if not packed:
            return jax.tree.map(travel, tree)
        leaves, structure = jax.tree.flatten(tree)
        parts = [_as_bytes(leaf) for leaf in leaves]
        cuts = [int(c) for c in np.cumsum([part.shape[1] for part in parts])[:-1]]
        found = jnp.split(travel(jnp.concatenate(parts, axis=1)), cuts, axis=1)
        back = [_from_bytes(part, leaf) for part, leaf in zip(found, leaves, strict=True)]
        return jax.tree.unflatten(structure, back)

    def one_round(index: Array | int, answers: Tree) -> Tree:
        now = valid & (order // cap == index)
        slot = jnp.where(now, target * cap + order % cap, ranks * cap)

        def put(leaf: Array) -> Array:
            empty = jnp.zeros((ranks * cap, *leaf.shape[1:]), leaf.dtype)
            return empty.at[slot].set(leaf, mode="drop")

        received, present = travel_all((jax.tree.map(put, items), put(now)))
        home = travel_all(serve(received, present))

        def keep(old: Array, new: Array) -> Array:
            mask = now.reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(mask, new[jnp.minimum(slot, ranks * cap - 1)], old)

        return jax.tree.map(keep, answers, home)

    blank = jax.tree.map(lambda leaf: jnp.zeros((ranks * cap, *leaf.shape[1:]), leaf.dtype), items)
    shapes = jax.eval_shape(serve, blank, jnp.zeros((ranks * cap,), bool))
    count = target.shape[0]
    start = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), shapes)
    if cap >= count:
        return one_round(0, start)
    most = jnp.max(jnp.where(valid, order + 1, 0), initial=0)
    rounds = lax.pmax(-(-most // cap), names)
    return lax.fori_loop(0, rounds, one_round, start)


def _as_bits(leaf: Array) -> Array:
    """Returns floats as integers: a compiler may widen narrow floats before it sends them."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")


def _as_values(bits: Array, dtype: Any) -> Array:
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def _as_bytes(leaf: Array) -> Array:
    """Returns uint8 [n, bytes of a row]."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    return lax.bitcast_convert_type(leaf, jnp.uint8).reshape(leaf.shape[0], -1)


def _from_bytes(rows: Array, like: Array) -> Array:
    if like.dtype == jnp.bool_:
        return rows.reshape(like.shape) != 0
    width = (like.dtype.itemsize,) if like.dtype.itemsize > 1 else ()
    return lax.bitcast_convert_type(rows.reshape(*like.shape, *width), like.dtype)


def queue_places(target: Array, valid: Array, ranks: int) -> Array:
    """Returns the place of every item among the valid ones to the same rank, int32 [n]."""
    goes = (target[:, None] == jnp.arange(ranks)) & valid[:, None]
    place = jnp.cumsum(goes.astype(jnp.int32), axis=0) - 1
    return jnp.take_along_axis(place, jnp.clip(target, 0, ranks - 1)[:, None], axis=1)[:, 0]


def agree(value: Array | int, axes: Sequence[str]) -> Array:
    """Returns the largest of an integer over the devices of some axes: a trip count for all.

    A loop with collectives inside must run equally often everywhere.
    """
    return lax.pmax(jnp.asarray(value, jnp.int32), tuple(axes))
