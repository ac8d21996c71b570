"""Where parameters and state lie on a mesh: a partition for every leaf of both model types.

Names of logical axes come from the parameter specs; which mesh axes split them is `sharding.rules`
(parallelism.md 1.2). Nothing here allocates.
"""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import param_specs
from deepinfer_jax.model.params_v4 import param_specs_v4
from deepinfer_jax.model.registry import AnyState
from deepinfer_jax.model.spec import ParamSpec
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.v4.state import V4CacheState
from sharding.mesh import MeshSizes, describe_sizes
from sharding.rules import padded, partition

#: Names of the stacked axes in front of a tensor, by their number.
_STACKS: dict[int, tuple[str, ...]] = {0: (), 1: ("layers",), 2: ("layers", "experts")}
#: Logical axes of the cache leaves of V4.1 and V4; the others have slots first.
_PAGES = ("sources", "pages")
_CACHE_AXES: dict[str, tuple[str, ...]] = {
    "main": _PAGES,
    "index_data": _PAGES,
    "index_scale": _PAGES,
    "index_keys": _PAGES,
    "comp_tail": ("sources", "slots"),
    "tail": ("sources", "slots"),
    "index_tail": ("sources", "slots"),
}


def spec_partition(spec: ParamSpec) -> PartitionSpec:
    """Returns the partition of one parameter leaf: of its payload and of its scales."""
    return partition((*_STACKS[len(spec.stack)], *spec.axes))


def param_tree(config: ModelConfig) -> Any:
    """Returns the specs of all parameters of either model type."""
    return (param_specs if config.model_type == "deepseek_v41" else param_specs_v4)(config)


def param_partitions(config: ModelConfig) -> Any:
    """Returns the partitions of all parameters, in the structure of `param_specs`.

    A quantised leaf has one partition for payload and scales: what is split are leading axes.
    """
    return jax.tree.map(
        spec_partition, param_tree(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )


def partitions_like(params: Any, config: ModelConfig) -> Any:
    """Returns the partitions of loaded parameters, which may lack parts or hold host tables."""
    specs = param_partitions(config)
    if getattr(params.layers, "replicas", None) is not None:
        specs = replace(specs, layers=replace(specs.layers, replicas=PartitionSpec()))
    draft = getattr(params, "draft", None)
    if draft is not None and draft.stages.replicas is not None:
        stages = replace(specs.draft.stages, replicas=PartitionSpec())
        specs = replace(specs, draft=replace(specs.draft, stages=stages))
    engram = getattr(params, "engram", None)
    if engram is None:
        return specs
    tables = tuple(
        spec if jax.tree.leaves(table) else table
        for spec, table in zip(specs.engram.tables, engram.tables, strict=True)
    )
    memory = replace(specs.engram, tables=tables, token_map=engram.token_map)
    return replace(specs, engram=memory)


def cache_partitions(state: AnyState) -> AnyState:
    """Returns the partitions of a cache state: slots and pages over the replicas."""
    names = type(state).__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]

    def of(name: str) -> Any:
        spec = partition(_CACHE_AXES.get(name, ("slots",)))
        return jax.tree.map(lambda _: spec, getattr(state, name))

    record = CacheState if isinstance(state, CacheState) else V4CacheState
    return record(**{name: of(name) for name in names})


def padded_abstract(params: Any, sizes: MeshSizes) -> Any:
    """Returns abstract parameters with experts and Engram rows padded to divide over a mesh.

    Experts of a layer are padded with replicas (parallelism.md 4.1), tables with rows of zeros that
    no id names.
    """

    def lengthen(axis: int, parts: int) -> Any:
        def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            shape[axis] = padded(shape[axis], parts)
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return lambda tree: jax.tree.map(one, tree)

    experts = lengthen(1, sizes.expert_parallel)
    layers = replace(params.layers, experts=experts(params.layers.experts))
    params = replace(params, layers=layers)
    if getattr(params, "engram", None) is not None:
        tables = tuple(lengthen(0, sizes.devices)(table) for table in params.engram.tables)
        params = replace(params, engram=replace(params.engram, tables=tables))
    if getattr(params, "draft", None) is not None:
        stages = params.draft.stages
        stages = replace(stages, experts=experts(stages.experts))
        params = replace(params, draft=replace(params.draft, stages=stages))
    return params


def check_mesh(config: ModelConfig, sizes: MeshSizes) -> None:
    """Checks that a model can run on a mesh, before anything is loaded or compiled.

    Raises:
        ConfigError: a rule that the mesh breaks, what it has, and what to do.
    """
    if sizes.tp > 1:
        raise ConfigError(
            "tensor parallelism splits float sums, so tp must be 1 unless the chunked contraction "
            f"is on, which does not exist yet: got {describe_sizes(sizes)}. Give these devices to "
            "dp or cp: experts are split over both"
        )
    most = 2 * config.moe.n_routed_experts
    if sizes.expert_parallel > most:
        raise ConfigError(
            f"the experts of a layer ({config.moe.n_routed_experts}) are split over dp * cp "
            f"devices, at most twice as many as there are experts, got {sizes.expert_parallel}: "
            "use er for more copies of the experts"
        )
