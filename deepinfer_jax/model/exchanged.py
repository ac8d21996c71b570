"""Experts and Engram rows that lie on other devices: rows travel there and answers come home.

Called inside the `shard_map` of a step. Only data moves, and every row is computed as on one
device, in tiles of the same height: no bit depends on the mesh (parallelism.md 3, determinism.md
D5).
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from deepinfer_jax.model.engram.gate import lookup
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.model.params import ExpertParams, ReplicaMaps
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import core
from sharding.exchange import exchange
from sharding.mesh import AXES, EXPERT_AXES, MeshSizes

#: Slots of all ranks up to which an exchange without conditions on data has room for every item.
ONE_ROUND_SLOTS = 4096
#: Experts of this device for rows [t, d], ids and weights [t, k], mask [t] -> [t, k, d].
Local = Callable[[Array, Array, Array, Array], Array]


def expert_slots(
    replicas: ReplicaMaps | None, ids: Int[Array, "t k"], position: Int[Array, " t"] | None
) -> Int[Array, "t k"]:
    """Returns the slot of every chosen expert; replicas share rows by position, never by row index.

    A replica is a copy, so that this decides where a row is computed and not its value.
    """
    if replicas is None:
        return ids
    if position is None:
        return replicas.slots[ids, 0]
    turn = position[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
    return replicas.slots[ids, turn % replicas.count[ids]]


def exchanged_experts(
    ops: Ops,
    sizes: MeshSizes,
    experts: ExpertParams,
    run: Local,
    x: Float[Array, "t d"],
    slots: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    valid: Bool[Array, " t"],
) -> Float[Array, "t k d"]:
    """Returns the output of every selected expert, [t, slot, d], in the order of the router.

    experts: the shard of this device, [l, e, ..]. run: its experts on some rows. x: quantised. In
    checkpoint arithmetic a row travels as its FP8 codes and scales and its answer as BF16, which
    are exactly the values.
    """
    held, ranks = experts.w1.shape[1], sizes.expert_parallel
    rows, top = slots.shape
    items = {
        "x": jax.tree.map(lambda leaf: jnp.repeat(leaf, top, axis=0), _packed(ops, x)),
        "expert": (slots % held).reshape(-1),
        "weight": weights.reshape(-1),
    }

    def serve(received: dict[str, Any], present: Array) -> Array:
        taken = (_unpacked(ops, received["x"]), received["expert"], received["weight"])
        found = _by_tiles(ops, held, run, *taken, present)
        return found.astype(jnp.bfloat16) if ops.rounded else found

    answers = exchange(
        serve,
        items,
        (slots // held).reshape(-1),
        jnp.repeat(valid, top),
        axes=EXPERT_AXES,
        **_room(ops, rows * top, ranks),
    )
    return answers.astype(jnp.float32).reshape(rows, top, -1)


def _room(ops: Ops, items: int, ranks: int) -> dict[str, Any]:
    """Returns `cap` and `packed` of an exchange: a quarter more room than the mean pair needs.

    Where nothing is to be bounded by data (`Ops.static`) and items are few, there is room for all
    of them, and they travel in one collective: a decode step on a GPU has no loop that the host
    must steer, and waits for fewer starts.
    """
    if ops.static and items * ranks <= ONE_ROUND_SLOTS:
        return {"cap": items, "packed": True}
    return {"cap": ceil(1.25 * items / ranks / core.ROW_TILE) * core.ROW_TILE}


def _packed(ops: Ops, x: Float[Array, "t d"]) -> Any:
    return core.quantize_q8(x) if ops.rounded else x


def _unpacked(ops: Ops, packed: Any) -> Float[Array, "n d"]:
    return core.dequantize_q8(*packed) if ops.rounded else packed


def _by_tiles(
    ops: Ops,
    held: int,
    run: Local,
    x: Float[Array, "n d"],
    expert: Int[Array, " n"],
    weight: Float[Array, " n"],
    present: Bool[Array, " n"],
) -> Float[Array, "n d"]:
    """Returns each received row's answer from its one expert.

    At level "batch" in tiles of the network's height, of which there are at least two (one from
    each rank), so that the loop is not inlined. Rows are sorted by expert: a tile then needs few.
    """
    if not ops.is_tiled:
        return run(x, expert[:, None], weight[:, None], present)[:, 0]
    order = jnp.argsort(jnp.where(present, expert, held), stable=True)
    missing = -order.shape[0] % ops.tile
    order = jnp.pad(order, (0, missing))
    real = jnp.pad(present[order[: order.shape[0] - missing]], (0, missing))

    def tile(index: Int[Array, ""] | int, out: Float[Array, "n d"]) -> Float[Array, "n d"]:
        start = index * ops.tile
        place = lax.dynamic_slice_in_dim(order, start, ops.tile)
        valid = lax.dynamic_slice_in_dim(real, start, ops.tile)
        taken = (x[place], expert[place, None], weight[place, None], valid)
        found = run(*lax.optimization_barrier(taken))[:, 0]
        return lax.dynamic_update_slice_in_dim(out, found, start, axis=0)

    filled = -(-present.sum(dtype=jnp.int32) // ops.tile)
    sorted_rows = jnp.zeros((order.shape[0], x.shape[1]), jnp.float32)
    sorted_rows = lax.fori_loop(0, filled, tile, sorted_rows)
    where = jnp.zeros((x.shape[0],), jnp.int32)
    where = where.at[order[: x.shape[0]]].set(jnp.arange(x.shape[0], dtype=jnp.int32))
    return sorted_rows[where]


def engram_rows(
    ops: Ops, table: Any, ids: Int[Array, "t k"], valid: Bool[Array, " t"]
) -> Float[Array, "t k w"]:
    """Returns dequantised rows of an Engram table, which a mesh holds in equal parts.

    table: all of it, on the device or the host, or the part of this device of a mesh. There stored
    bytes travel, and rows that are not valid are zeros.
    """
    sizes = ops.mesh
    if sizes is None or sizes.devices == 1 or isinstance(table, HostTable):
        return lookup(table, ids)
    held, columns = table.shape[0], ids.shape[1]
    target = (ids // held).reshape(-1)
    found = exchange(
        lambda rows, _: table[rows],
        (ids % held).reshape(-1),
        target,
        jnp.repeat(valid, columns),
        axes=AXES,
        **_room(ops, target.shape[0], sizes.devices),
    )
    return core.dequantize(found).reshape(*ids.shape, -1)
