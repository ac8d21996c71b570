"""Parameters on a mesh, and programs over it: one `shard_map` around everything they do.

Inside, every device runs the functions of one device on its replica's sequences; experts and Engram
rows of other devices are reached through `exchanged` (parallelism.md 1.3).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import ReplicaMaps
from deepinfer_jax.model.placement import partitions_like, spec_partition
from deepinfer_jax.model.spec import ParamSpec
from sharding.eplb.maps import expert_maps, initial_layout
from sharding.footprint import zip_specs
from sharding.mesh import MeshSizes, mesh_sizes
from sharding.rules import padded


def padding_of(sizes: MeshSizes) -> Callable[[ParamSpec, tuple[int, ...]], tuple[int, int] | None]:
    """Returns up to which (axis, length) each array is padded: experts and Engram rows."""

    def pad(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, int] | None:
        if len(spec.stack) == 2:
            return 1, padded(shape[1], sizes.expert_parallel)
        if "engram_rows" in spec.axes:
            return 0, padded(shape[0], sizes.devices)
        return None

    return pad


def placement_on(mesh: Mesh) -> Callable[[ParamSpec, tuple[int, ...]], NamedSharding]:
    """Returns where each array of a parameter leaf lies; one that does not divide lies whole."""
    pad = padding_of(mesh_sizes(mesh))

    def place(spec: ParamSpec, shape: tuple[int, ...]) -> NamedSharding:
        wanted = pad(spec, shape)
        divides = wanted is None or wanted[1] == shape[wanted[0]]
        return NamedSharding(mesh, spec_partition(spec) if divides else PartitionSpec())

    return place


def settle(params: Any, config: ModelConfig, mesh: Mesh, *, extras: int = 0) -> Any:
    """Returns the parameters padded, and every array where the mesh wants it, with replica maps.

    What lies there already is not copied. Experts beyond the last are replicas of the first ones:
    at least `extras` in every layer of the backbone.
    """
    sizes = mesh_sizes(mesh)

    def experts(tree: Any, more: int = 0) -> Any:
        return _repeated(tree, 1, sizes.expert_parallel, more)

    layers = replace(params.layers, experts=experts(params.layers.experts, extras))
    params = replace(params, layers=layers)
    if getattr(params, "engram", None) is not None:
        tables = tuple(_repeated(table, 0, sizes.devices) for table in params.engram.tables)
        params = replace(params, engram=replace(params.engram, tables=tables))
    if getattr(params, "draft", None) is not None:
        stages = params.draft.stages
        stages = replace(stages, experts=experts(stages.experts))
        stages = replace(stages, replicas=_first_maps(stages, sizes))
        params = replace(params, draft=replace(params.draft, stages=stages))
    if hasattr(params.layers, "replicas"):
        params = replace(
            params, layers=replace(params.layers, replicas=_first_maps(params.layers, sizes))
        )
    shardings = [
        NamedSharding(mesh, spec)
        for _, _, spec in zip_specs(params, partitions_like(params, config))
    ]
    return jax.device_put(params, jax.tree.unflatten(jax.tree.structure(params), shardings))


def _repeated(tree: Any, axis: int, parts: int, more: int = 0) -> Any:
    """Returns arrays whose axis is `more` longer, up to a multiple of `parts`.

    It is padded by repetition from the start.
    """

    def one(leaf: Any) -> Any:
        count = leaf.shape[axis]
        wanted = padded(count + more, parts)
        if wanted == count:
            return leaf
        return jnp.take(leaf, np.arange(wanted) % count, axis=axis)

    return jax.tree.map(one, tree)


def _first_maps(layers: Any, sizes: MeshSizes) -> ReplicaMaps | None:
    """Returns the maps of the first layout, None if every expert has the one slot of its number."""
    count, slots = layers.gate.shape[1], layers.experts.w1.shape[1]
    if slots == count:
        return None
    layout = initial_layout(count, slots - count, sizes.expert_parallel)
    return replica_maps(np.broadcast_to(layout, (layers.gate.shape[0], slots)), count)


def replica_maps(layouts: np.ndarray, experts: int) -> ReplicaMaps | None:
    """Returns the maps of the experts' slots, [layers, slots]; None if each has that of its number.

    One shape whatever the layouts: no program is compiled again when experts move.
    """
    slots = layouts.shape[1]
    if slots == experts and (layouts == np.arange(experts)).all():
        return None
    return slot_maps(layouts, experts)


def slot_maps(layouts: np.ndarray, experts: int) -> ReplicaMaps:
    """Returns the same, also where every expert has the slot of its number."""
    found = [expert_maps(layout, experts) for layout in layouts]
    return ReplicaMaps(
        slots=np.stack([one.slots for one in found]), count=np.stack([one.count for one in found])
    )


def over_mesh(
    function: Callable[..., Any], config: ModelConfig, params: Any, *arguments: Any
) -> Any:
    """Returns function(config, params, *arguments) on the mesh of the config, if it has one.

    Arguments and result are the same on all devices. function: of a module, so that its program is
    compiled once.
    """
    if config.execution.mesh is None:
        return function(config, params, *arguments)
    return program_over(function, config, params, len(arguments))(params, *arguments)


def program_over(
    function: Callable[..., Any], config: ModelConfig, params: Any, count: int
) -> Callable[..., Any]:
    """Returns the jitted program of `over_mesh`, called with parameters and `count` arguments."""
    return _program(function, config, jax.tree.structure(params), count)


@lru_cache(maxsize=64)
def _program(
    function: Callable[..., Any], config: ModelConfig, structure: Any, count: int
) -> Callable[..., Any]:
    shape = jax.tree.unflatten(structure, range(structure.num_leaves))
    return jax.jit(everywhere(partial(function, config), config, shape, count))


def everywhere(
    function: Callable[..., Any], config: ModelConfig, params: Any, count: int
) -> Callable[..., Any]:
    """Returns function(params, *arguments) as all devices of the config's mesh run it together.

    The function itself without a mesh. params: for their structure. count: of the arguments, which
    are the same on all devices, as the result is.
    """
    if config.execution.mesh is None:
        return function
    return jax.shard_map(
        function,
        mesh=config.execution.mesh,
        in_specs=(partitions_like(params, config), *(PartitionSpec(),) * count),
        out_specs=PartitionSpec(),
        check_vma=False,  # carries of the network's loops start as constants
    )
