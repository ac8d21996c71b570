"""Experts of a loaded model placed again by load, while it serves: no bit changes.

Weights and maps are operands of the step program, so that nothing is compiled again as long as the
number of slots stays (parallelism.md 4.6). Swap them between two steps.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.forward import check_ids, fresh_cache
from deepinfer_jax.model.on_mesh import over_mesh, replica_maps, settle
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.step import sequence_plan, step
from sharding.eplb.decide import THRESHOLD, Decision, decide
from sharding.eplb.maps import check_layout
from sharding.eplb.moves import Moves, plan_moves
from sharding.errors import ShardingError
from sharding.mesh import EXPERT_AXES, mesh_sizes
from sharding.rules import partition


def expert_rows(params: Params, config: ModelConfig, token_ids: Any) -> Int[Array, "l e"]:
    """Returns how many rows of a text each expert of each layer gets: one step of a load window.

    Raises:
        InputError: as `score`.
    """
    ids = check_ids(config, token_ids, minimum=1)
    return over_mesh(count_rows, config, params, ids)


def count_rows(config: ModelConfig, params: Params, ids: Int[Array, " t"]) -> Int[Array, "l e"]:
    """Returns `expert_rows` of checked ids, as every device of a mesh computes it."""
    plan = sequence_plan(ids, config.execution.row_step)
    state = fresh_cache(config, ids.shape[0])
    _, _, seen = step(params, config, state, plan, collect=("expert_ids",))
    chosen = seen["expert_ids"][:, : ids.shape[0]].reshape(config.num_hidden_layers, -1)
    return (chosen[:, :, None] == jnp.arange(config.moe.n_routed_experts)).sum(1, dtype=jnp.int32)


def with_extras(params: Params, config: ModelConfig, extras: int) -> Params:
    """Returns the parameters with at least `extras` more slots in every layer, for replicas.

    The slots are rounded up so that they divide over the mesh, and hold experts 0, 1, 2, ... at
    first. A form of its own: programs are compiled for it once.

    Raises:
        ConfigError: the model lies on one device, or has extras already.
    """
    mesh = _mesh(config)
    if params.layers.experts.w1.shape[1] != config.moe.n_routed_experts:
        raise ConfigError(
            "slots for replicas are added once, right after load, and this model has "
            f"{params.layers.experts.w1.shape[1]} for {config.moe.n_routed_experts} experts"
        )
    return settle(params, config, mesh, extras=extras)


def layouts_of(layers: LayerParams) -> np.ndarray:
    """Returns the expert in every slot, int32 [layers, slots]."""
    count, slots = layers.experts.w1.shape[:2]
    if layers.replicas is None:
        return np.broadcast_to(np.arange(slots, dtype=np.int32), (count, slots)).copy()
    found = np.zeros((count, slots), np.int32)
    places, counts = np.asarray(layers.replicas.slots), np.asarray(layers.replicas.count)
    for layer in range(count):
        for expert, own in enumerate(counts[layer]):
            found[layer, places[layer, expert, :own]] = expert
    return found


def decide_layers(
    params: Params, config: ModelConfig, window: np.ndarray, *, threshold: float = THRESHOLD
) -> list[Decision]:
    """Returns for every layer whether and how to place its experts again.

    window: rows by step, layer and expert, [S, L, E] (`sharding.eplb.load.LoadWindow.by_expert`, or
    `expert_rows` of several texts). threshold: see `sharding.eplb.decide`.
    """
    ranks = mesh_sizes(_mesh(config)).expert_parallel
    layouts = layouts_of(params.layers)
    return [
        decide(window[:, layer], layouts[layer], ranks, threshold=threshold)
        for layer in range(len(layouts))
    ]


def place_experts(params: Params, config: ModelConfig, layouts: np.ndarray) -> Params:
    """Returns the parameters with the backbone's experts in other slots, one layer after another.

    Between devices only the weights that change place travel, and one layer's at a time. The
    expert leaves of `params` are donated: use the returned ones.

    Args:
        params: on the mesh of the config.
        config: of the model.
        layouts: the expert of every slot, [layers, slots]; a layer that stays as it is costs
            nothing.

    Raises:
        ConfigError: the model lies on one device, or a layout is none of its experts.
    """
    mesh = _mesh(config)
    ranks, present = mesh_sizes(mesh).expert_parallel, layouts_of(params.layers)
    if layouts.shape != present.shape:
        raise ConfigError(
            f"layouts name the expert of every slot, [layers, slots] = {present.shape}, got "
            f"{layouts.shape}: add slots with `with_extras` before the first step"
        )
    try:
        for layout in layouts:
            check_layout(layout, config.moe.n_routed_experts, ranks)
    except ShardingError as error:
        raise ConfigError(f"layouts: {error}") from error
    experts = params.layers.experts
    for layer in np.flatnonzero((layouts != present).any(axis=1)):
        moves = plan_moves(present[layer], layouts[layer], ranks)
        experts = _moved(mesh, moves, experts, int(layer))
    maps = replica_maps(layouts, config.moe.n_routed_experts)
    if maps is not None:
        maps = jax.device_put(maps, NamedSharding(mesh, PartitionSpec()))
    return replace(params, layers=replace(params.layers, experts=experts, replicas=maps))


def _mesh(config: ModelConfig) -> Mesh:
    if config.execution.mesh is None:
        raise ConfigError(
            "experts are placed on the devices of a mesh, and this model lies on one device: load "
            'it with mesh={"dp": n}'
        )
    return config.execution.mesh


def _moved(mesh: Mesh, moves: Moves, experts: Any, layer: int) -> Any:
    return _program(mesh, moves.width)(experts, np.int32(layer), moves.send, moves.take)


@lru_cache(maxsize=16)
def _program(mesh: Mesh, width: int) -> Any:
    held, whole = partition(("layers", "experts")), PartitionSpec()

    def body(experts: Any, layer: Array, send: Array, take: Array) -> Any:
        rank = lax.axis_index(EXPERT_AXES)

        def one(leaf: Array) -> Array:
            own = leaf[layer]
            out = own[send[rank]]  # [ranks, width, ...]
            arrived = lax.all_to_all(out, EXPERT_AXES, 0, 0).reshape(-1, *own.shape[1:])
            return leaf.at[layer].set(jnp.concatenate([own, arrived])[take[rank]])

        return jax.tree.map(one, experts)

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(held, whole, whole, whole),
        out_specs=held,
        check_vma=False,
    )
    return jax.jit(run, donate_argnums=0)
