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
from deepinfer_jax.model.on_mesh import over_mesh, slot_maps
from deepinfer_jax.model.params import LayerParams, Params, ReplicaMaps
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.step import sequence_plan, step
from sharding.eplb.decide import THRESHOLD, Decision, decide_all
from sharding.eplb.maps import ExpertMaps, check_layout, expert_maps
from sharding.eplb.moves import Moves, plan_moves
from sharding.errors import ShardingError
from sharding.mesh import EXPERT_AXES, mesh_sizes
from sharding.rules import padded, partition


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


def with_extras(params: AnyParams, config: ModelConfig, extras: int) -> Params:
    """Returns parameters whose experts can move, with at least `extras` more slots in every layer.

    The slots are rounded up so that they divide over the mesh; further ones of a device hold its
    first experts again, so that nothing travels. Experts are copies: those of `params` are never
    donated. There are replica maps from the start: programs are compiled for this form once, and
    none when experts move.

    Raises:
        ConfigError: the model lies on one device, or is no V4.1.
    """
    sizes, experts = mesh_sizes(_mesh(config)), config.moe.n_routed_experts
    if not isinstance(params, Params):
        raise ConfigError(
            f"experts are placed again in models of type deepseek_v41, got {config.model_type!r}: "
            "leave RuntimeConfig.rebalance_steps at None"
        )
    ranks, present = sizes.expert_parallel, layouts_of(params.layers)
    slots = padded(experts + extras, ranks)
    own = np.arange(slots // ranks) % (present.shape[1] // ranks)
    held = present.reshape(len(present), ranks, -1)[:, :, own].reshape(len(present), -1)
    layers = replace(
        params.layers,
        experts=_grown(config, params.layers.experts, own),
        replicas=_on_all(slot_maps(held, experts), config),
    )
    return replace(params, layers=layers)


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

    window: rows by step, layer and expert, [S, L, E] (`sharding.eplb.load.LoadWindow.trace`, or
    `expert_rows` of several texts). threshold: see `sharding.eplb.decide`.
    """
    ranks = mesh_sizes(_mesh(config)).expert_parallel
    return decide_all(window, layouts_of(params.layers), ranks, threshold=threshold)


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
    layers = params.layers
    if layers.replicas is None:
        maps = _on_all(slot_maps(present, config.moe.n_routed_experts), config)
        params = replace(params, layers=replace(layers, replicas=maps))
    for layer in np.flatnonzero((layouts != present).any(axis=1)).tolist():
        params = place_layer(params, config, layer, present[layer], layouts[layer])
    return params


def place_layer(
    params: AnyParams, config: ModelConfig, layer: int, present: np.ndarray, layout: np.ndarray
) -> Params:
    """Returns the parameters with one layer's experts in other slots; weights and maps together.

    Does not wait, and reads nothing from the device. Experts and maps of `params` are donated.

    Args:
        params: of `with_extras`, on the mesh of the config.
        config: of the model.
        layer: of the backbone.
        present: the expert of every slot of the layer, [slots].
        layout: that from now on; a placement (`sharding.eplb.maps.check_layout`).
    """
    ranks = mesh_sizes(_mesh(config)).expert_parallel
    moves = plan_moves(present, layout, ranks)
    return _placed(params, config, layer, moves, expert_maps(layout, config.moe.n_routed_experts))


def compile_moves(params: AnyParams, config: ModelConfig) -> Params:
    """Returns the same parameters after `place_layer` has compiled all that it can need.

    Nothing moves: every slot takes what it holds. Experts and maps of `params` are donated.
    """
    ranks = mesh_sizes(_mesh(config)).expert_parallel
    assert isinstance(params, Params), "of with_extras"
    layout = layouts_of(params.layers)[0]
    slots, width = len(layout) // ranks, 1
    maps = expert_maps(layout, config.moe.n_routed_experts)
    stay = np.tile(np.arange(slots, dtype=np.int32), (ranks, 1))
    while True:
        send = np.zeros((ranks, ranks, width), np.int32)
        params = _placed(params, config, 0, Moves(send=send, take=stay, sent=0), maps)
        if width >= slots:
            return params
        width *= 2


def _mesh(config: ModelConfig) -> Mesh:
    if config.execution.mesh is None:
        raise ConfigError(
            "experts are placed on the devices of a mesh, and this model lies on one device: load "
            'it with mesh={"dp": n}'
        )
    return config.execution.mesh


def _on_all(maps: ReplicaMaps, config: ModelConfig) -> ReplicaMaps:
    """Returns the maps on every device; no process asks the others whether theirs are equal."""
    place = NamedSharding(_mesh(config), PartitionSpec())
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, place, lambda where: x[where]), maps
    )


def _grown(config: ModelConfig, experts: Any, own: np.ndarray) -> Any:
    """Returns copies of the experts in which a rank has its slots `own`, some of them twice."""
    held = partition(("layers", "experts"))

    def body(experts: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.take(leaf, own, axis=1), experts)

    run = jax.shard_map(body, mesh=_mesh(config), in_specs=(held,), out_specs=held, check_vma=False)
    return jax.jit(run)(experts)


def _placed(
    params: AnyParams, config: ModelConfig, layer: int, moves: Moves, maps: ExpertMaps
) -> Params:
    assert isinstance(params, Params), "of with_extras"
    layers = params.layers
    experts, replicas = _program(_mesh(config))(
        layers.experts,
        layers.replicas,
        np.int32(layer),
        moves.send,
        moves.take,
        maps.slots,
        maps.count,
    )
    return replace(params, layers=replace(layers, experts=experts, replicas=replicas))


@lru_cache(maxsize=16)
def _program(mesh: Mesh) -> Any:
    held, whole = partition(("layers", "experts")), PartitionSpec()

    def body(
        experts: Any, maps: ReplicaMaps, layer: Array, send: Array, take: Array, *new: Array
    ) -> tuple[Any, ReplicaMaps]:
        rank = lax.axis_index(EXPERT_AXES)

        def one(leaf: Array) -> Array:
            own = leaf[layer]
            out = own[send[rank]]  # [ranks, width, ...]
            arrived = lax.all_to_all(out, EXPERT_AXES, 0, 0).reshape(-1, *own.shape[1:])
            return leaf.at[layer].set(jnp.concatenate([own, arrived])[take[rank]])

        moved = ReplicaMaps(
            slots=maps.slots.at[layer].set(new[0]), count=maps.count.at[layer].set(new[1])
        )
        return jax.tree.map(one, experts), moved

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(held, *(whole,) * 6),
        out_specs=(held, whole),
        check_vma=False,
    )
    return jax.jit(run, donate_argnums=(0, 1))
