"""Sequences of many slots on data-parallel replicas: which has which slot, and rows to and fro.

The cached forms take one plan for all replicas. Slots 1.. are dealt out in turn, each replica has
its own null slot and block 0, and runs the rows of its own slots; hidden rows come back in the
order of the plan (parallelism.md 1.2).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.placement import cache_partitions
from deepinfer_jax.model.registry import AnyState, empty_cache
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.step import Plan
from sharding.mesh import DATA_AXES, MeshSizes, mesh_sizes


def replica_layout(layout: CacheLayout, sizes: MeshSizes) -> CacheLayout:
    """Returns the sizes of one replica's cache: its share of slots and blocks, and null ones."""
    replicas = sizes.data_parallel
    slots = -(-(layout.num_slots - 1) // replicas)
    return replace(
        layout, num_slots=1 + slots, num_blocks=1 + -(-(layout.num_blocks - 1) // replicas)
    )


def empty_replicas(config: ModelConfig, layout: CacheLayout) -> AnyState:
    """Returns empty caches on the mesh of the config; blocks are dealt out to slots as on one."""
    mesh: Mesh = config.execution.mesh
    local = replica_layout(layout, mesh_sizes(mesh))
    shape = jax.eval_shape(lambda: empty_cache(config, local))
    specs = cache_partitions(shape)
    make = jax.shard_map(
        lambda: empty_cache(config, local),
        mesh=mesh,
        in_specs=(),
        out_specs=specs,
        check_vma=False,
    )
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(make, out_shardings=places)()


def own_rows(plan: Plan, sizes: MeshSizes) -> tuple[Plan, Int[Array, " t"]]:
    """Returns (the rows of this replica's slots, in order and first; the row of the plan of each).

    Inside a `shard_map`.
    """
    replicas, rows = sizes.data_parallel, plan.ids.shape[0]
    real = (jnp.arange(rows) < plan.count) & (plan.slot > 0)
    if plan.valid is not None:
        real &= plan.valid
    mine = real & ((plan.slot - 1) % replicas == lax.axis_index(DATA_AXES))
    order = jnp.argsort(~mine, stable=True)
    local = jnp.where(mine, 1 + (plan.slot - 1) // replicas, 0)[order]
    own = Plan(
        ids=plan.ids[order],
        position=plan.position[order],
        slot=local,
        count=mine.sum(dtype=jnp.int32),
        image_rows=plan.image_rows,
        image_place=None if plan.image_place is None else plan.image_place[order],
    )
    return own, order


def in_plan_order(
    hidden: Float[Array, "t d"], own: Plan, order: Int[Array, " t"]
) -> Float[Array, "t d"]:
    """Returns the hidden rows of all replicas in the order of the plan; the same on all devices.

    Every row is added to zeros, as the integers of its bits: which order they are added in is free.
    """
    real = (jnp.arange(hidden.shape[0]) < own.count)[:, None]
    bits = jnp.where(real, lax.bitcast_convert_type(hidden, jnp.uint32), 0)
    placed = jnp.zeros_like(bits).at[order].set(bits)
    return lax.bitcast_convert_type(lax.psum(placed, DATA_AXES), jnp.float32)
