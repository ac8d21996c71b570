"""The sharded step compiled ahead for devices that are not there: abstract values, emulated mesh.

What is compiled is the program of `prefill`, `decode` and `verify` for the mesh, on CPU devices:
its collectives and argument bytes are those of any backend, its temporaries are not.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.cached import cache_layout, lower_program
from deepinfer_jax.model.placement import cache_partitions, padded_abstract, partitions_like
from deepinfer_jax.model.registry import AnyState, network_of
from deepinfer_jax.model.replicas import replica_layout
from deepinfer_jax.model.step import Plan, plan_length
from deepinfer_jax.numerics.lint import Finding, lint_hlo
from sharding.collectives import Collective, collectives_of
from sharding.footprint import zip_specs
from sharding.mesh import MeshSizes, build_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A compiled step: rows of its plan, seconds, argument bytes of a device, what it exchanges.

    faults: findings of the lint that forbid it at level "batch": float sums across devices.
    """

    rows: int
    trace_seconds: float
    compile_seconds: float
    argument_bytes: int
    collectives: tuple[Collective, ...]
    faults: tuple[Finding, ...]


def emulate_devices(count: int) -> None:
    """Gives this process `count` CPU devices; before anything ran on a device.

    Raises:
        ConfigError: the devices of this process were used already, and are fewer.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # devices exist already: what counts is how many
    found = len(jax.devices())
    if found < count:
        raise ConfigError(
            f"{count} devices are emulated before a process uses its own, this one has {found} "
            "already: compile in a process of its own, as `deepinfer-jax plan --compile` does"
        )


def abstract_state(config: ModelConfig, sizes: MeshSizes, runtime: RuntimeConfig) -> AnyState:
    """Returns the cache of all replicas without data, `runtime.max_seqs` sequences on them all."""
    layout = cache_layout(config, runtime, runtime.max_seqs + 1, runtime.longest(config))
    local, replicas = replica_layout(layout, sizes), sizes.data_parallel
    whole = replace(
        local, num_slots=local.num_slots * replicas, num_blocks=local.num_blocks * replicas
    )
    return jax.eval_shape(lambda: network_of(config).init_cache(config, whole))


def lower_step(
    config: ModelConfig, params: Any, sizes: MeshSizes, runtime: RuntimeConfig, rows: int
) -> Lowered:
    """Returns the step of `rows` plan rows compiled for a mesh of emulated devices.

    Args:
        config: of the model.
        params: abstract parameters, not padded (`checkpoint.abstract.abstract_params`).
        sizes: of the mesh; the process has as many devices.
        runtime: sizes of the cache.
        rows: of the plan, of all replicas together.
    """
    mesh = build_mesh(sizes)
    config = replace(config, execution=replace(config.execution, mesh=mesh))
    params = padded_abstract(params, sizes)
    params = _placed(params, partitions_like(params, config), mesh)
    state = abstract_state(config, sizes, runtime)
    state = _placed(state, cache_partitions(state), mesh)
    length = plan_length(rows, config.execution.row_step)

    def words(*shape: int) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)

    plan = Plan(
        ids=words(length),
        position=words(length),
        slot=words(length),
        count=words(),
        rows=words(min(runtime.max_seqs, length)),
    )
    begin = time.perf_counter()
    lowered = lower_program(params, config, state, plan)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return Lowered(
        rows=length,
        trace_seconds=traced - begin,
        compile_seconds=done - traced,
        argument_bytes=0 if memory is None else int(memory.argument_size_in_bytes),
        collectives=tuple(collectives_of(text)),
        faults=tuple(found for found in lint_hlo(text) if found.rule == "float-collective"),
    )


def _placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for _, leaf, spec in zip_specs(tree, specs)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
