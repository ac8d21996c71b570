"""The network over a plan of rows: a loop over tiles of fixed height, layers scanned inside.

One program serves prefill, decode, verification and mixtures, because only the number of tiles
changes (architecture.md 3, determinism.md 12). With `determinism` "off" or "run" there is no loop:
the same layer functions run on all rows at once, through stock XLA.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.registry import AnyParams, AnyState, network_of
from deepinfer_jax.model.share import share_of
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.numerics.ops import ops_for
from pallas_kernels import core
from sharding.mesh import ROW_AXES


@struct.dataclass
class Plan:
    """Rows of one step: ids, positions, slots [T], of which the first `count` are real.

    T is a multiple of the row tile and at least two tiles (`plan_length`). Rows of one sequence
    stand in ascending position and follow what its state already holds.

    image_rows [m, d]: rows of encoded images, of which row t takes number image_place[t] if its id
    is the image token's (`model.vision`). None: no row is an image's.
    """

    ids: Leaf  # int32 [T]
    position: Leaf  # int32 [T]
    slot: Leaf  # int32 [T]
    count: Leaf  # int, or int32 []
    rows: Leaf = None  # int32 [B]: rows whose logits are wanted; None: all
    valid: Leaf = None  # bool [T]: rows below `count` that are real after all; None: all of them
    image_rows: Leaf = None  # float [m, d]
    image_place: Leaf = None  # int32 [T]; None with image_rows


def plan_length(rows: int, tile: int) -> int:
    """Returns the plan length for `rows` rows.

    At least two tiles: a loop over one tile is inlined and its body fuses differently. A multiple
    of the tile: `dynamic_slice` clamps, and the last tile would read other rows (determinism.md
    12).
    """
    return max(2, -(-rows // tile)) * tile


def sequence_plan(
    ids: Int[Array, " n"],
    tile: int,
    *,
    slot: int = 1,
    start: int = 0,
    images: tuple[Array, Array] | None = None,
) -> Plan:
    """Returns the plan of one sequence's next rows, beginning at position `start`.

    images: `Plan.image_rows`, and `Plan.image_place` of these rows.
    """
    count = ids.shape[0]
    missing = plan_length(count, tile) - count
    position = start + jnp.arange(count, dtype=jnp.int32)
    return Plan(
        ids=jnp.pad(ids.astype(jnp.int32), (0, missing)),
        position=jnp.pad(position, (0, missing)),
        slot=jnp.pad(jnp.full((count,), slot, jnp.int32), (0, missing)),
        count=count,
        image_rows=None if images is None else images[0],
        image_place=None if images is None else jnp.pad(images[1], (0, missing)),
    )


def lengthened(plan: Plan, rows: int) -> Plan:
    """Returns the plan padded to `rows` rows."""
    missing = rows - plan.ids.shape[0]
    if not missing:
        return plan
    names = ("ids", "position", "slot", "valid", "image_place")
    held = {name: getattr(plan, name) for name in names if getattr(plan, name) is not None}
    return replace(plan, **{name: jnp.pad(leaf, (0, missing)) for name, leaf in held.items()})


def step(
    params: AnyParams,
    config: ModelConfig,
    state: AnyState,
    plan: Plan,
    *,
    drafting: bool = False,
    collect: tuple[str, ...] = (),
    row_axes: tuple[str, ...] = ROW_AXES,
) -> tuple[AnyState, Float[Array, "n d"], dict[str, Array]]:
    """Returns (state after the plan's rows, final normed hidden [T, d], collected values).

    drafting: also write the draft stages' context rows. collect: names of `apply_layer`'s
    observations, returned as [layers, T, ...]. row_axes: of the mesh in whose `shard_map` this
    runs, over which all devices have this plan and this state, and share the rows. Tiles beyond
    `plan.count` are not computed.
    """
    ops, run = ops_for(config.execution), network_of(config).run_tile
    asked, ranks = plan.ids.shape[0], 1 if ops.mesh is None else ops.mesh.of(row_axes)
    height = config.execution.row_tile if ops.is_tiled else -(-asked // ranks)
    share = share_of(height, ranks, row_axes)
    tile_rows = ranks * share.rows
    plan = lengthened(plan, max(2, -(-asked // tile_rows)) * tile_rows if ranks > 1 else asked)
    rows = plan.ids.shape[0]

    def images(start: Int[Array, ""] | int) -> Array | None:
        if plan.image_rows is None:
            return None
        place = lax.dynamic_slice_in_dim(plan.image_place, start, tile_rows)
        return plan.image_rows[place].astype(jnp.float32)

    def body(index: Int[Array, ""] | int, carry: tuple) -> tuple:
        state, hidden, collected = carry
        start = index * tile_rows
        cut = [
            lax.dynamic_slice_in_dim(a, start, tile_rows)
            for a in (plan.ids, plan.position, plan.slot)
        ]
        valid = start + jnp.arange(tile_rows) < plan.count
        if plan.valid is not None:
            valid &= lax.dynamic_slice_in_dim(plan.valid, start, tile_rows)
        # The barrier keeps row-only work (cos and sin, for one) from being hoisted out of the loop,
        # where it would fuse with other operations and round differently.
        tile = share.own(Rows(*lax.optimization_barrier((*cut, valid, images(start)))))
        state, z, seen = run(ops, config, params, state, tile, drafting, collect)
        hidden = lax.dynamic_update_slice_in_dim(hidden, share.joined(z, 0), start, axis=0)
        collected = {
            name: lax.dynamic_update_slice_in_dim(
                buffer, share.joined(seen[name], 1), start, axis=1
            )
            for name, buffer in collected.items()
        }
        return state, hidden, collected

    hidden = jnp.zeros((rows, config.hidden_size), jnp.float32)
    zeros = jnp.zeros((share.rows,), jnp.int32)
    blank = Rows(ids=zeros, position=zeros, slot=zeros, valid=zeros > 0)
    if plan.image_rows is not None:
        blank = replace(blank, image=jnp.zeros((share.rows, config.hidden_size), jnp.float32))
    shapes = jax.eval_shape(lambda: run(ops, config, params, state, blank, drafting, collect)[2])
    collected = {
        name: jnp.zeros((s.shape[0], rows, *s.shape[2:]), s.dtype) for name, s in shapes.items()
    }
    carry = (state, hidden, collected)
    if ops.is_tiled:
        tiles = ops.agree(-(-plan.count // tile_rows))
        state, hidden, collected = lax.fori_loop(0, tiles, body, carry)
    else:
        state, hidden, collected = body(0, carry)
    return state, hidden[:asked], {name: found[:, :asked] for name, found in collected.items()}


def logits(
    params: AnyParams, config: ModelConfig, hidden: Float[Array, "n d"]
) -> Float[Array, "n v"]:
    """Returns float32 logits of final normed hidden rows."""
    rows, tile = hidden.shape[0], core.ROW_TILE
    # One tile's worth of rows is taken for the inside of a tile loop, and there is none here.
    hidden = jnp.pad(hidden, ((0, tile if rows == tile else 0), (0, 0)))
    return ops_for(config.execution).head(hidden, params.head)[:rows]
