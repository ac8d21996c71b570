"""The network that `benchmarks.multi_gpu` runs on meshes: eight or four layers, its caches.

Layers at the real sizes of DeepSeek-V4.1-Flash with 64 experts and random weights, or at nano's
sizes for a dry run. Programs are compiled from shapes alone, so that many processes compile side
by side and only the one that measures has weights in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.network_slice import EXPERTS, TABLE_ROWS, Case, filled_state
from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.checkpoint.random_weights import random_params
from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.model import ExecutionConfig, ModelConfig
from deepinfer_jax.config.presets import preset
from deepinfer_jax.determinism import GPU_PLATFORMS, row_tile
from deepinfer_jax.loading import EMBEDDED
from deepinfer_jax.model.engram.vocabulary import TokenMap
from deepinfer_jax.model.kernel_layout import for_kernels
from deepinfer_jax.model.on_mesh import replica_maps, settle
from deepinfer_jax.model.placement import cache_partitions, padded_abstract, partitions_like
from deepinfer_jax.model.step import Plan, logits, step
from deepinfer_jax.numerics.selection import attention_widths, choose_kernels
from sharding.eplb.maps import initial_layout
from sharding.footprint import zip_specs
from sharding.mesh import CONTEXT_AXIS, DATA_AXES, MeshSizes, build_mesh, mesh_sizes
from sharding.rules import padded


@dataclass(frozen=True)
class Roles:
    """What the layers of a slice do, as in `AttentionConfig` and `IndexerConfig`."""

    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidates: int
    engram: int


#: Eight for bits: window; window with Engram; Full and Reuse at ratio 2; Full at ratio 1, which
#: picks the candidates, and Reuse; Reindex and Reuse. Four for times, which compile in half the
#: time: the same without the first window and the Reuse layers.
SLICES = {
    8: Roles((0, 0, 2, 2, 1, 1, 1, 1), (2, 4), (2, 4, 6), candidates=4, engram=1),
    4: Roles((0, 2, 1, 1), (1, 2), (1, 2, 3), candidates=2, engram=0),
}


@dataclass(frozen=True)
class Setting:
    """kernels: "fast" (the best of every op) or "load" (what `load` picks). mesh: {}: one device.

    layers: of `SLICES`.
    """

    level: Any
    kernels: str
    mesh: tuple[tuple[str, int], ...] = ()
    small: bool = False
    layers: int = 8


def slice_config(setting: Setting) -> ModelConfig:
    """Returns the config of the layers on the mesh of a setting."""
    roles = SLICES[setting.layers]
    base = read_config(EMBEDDED) if setting.small else preset("deepseek-v4.1-flash")
    assert base.engram is not None
    rows = base.engram.engram_vocab_size if setting.small else TABLE_ROWS
    engram = replace(base.engram, engram_layer_ids=(roles.engram,), engram_vocab_size=rows)
    engram = replace(engram, engram_num_embeddings=engram_primes(engram).num_embeddings)
    experts = base.moe.n_routed_experts if setting.small else EXPERTS
    config = replace(
        base,
        num_hidden_layers=len(roles.ratios),
        attention=replace(
            base.attention,
            compress_ratios=roles.ratios,
            kv_source_layer_ids=roles.kv_sources,
            index_source_layer_ids=roles.index_sources,
        ),
        indexer=replace(base.indexer, candidate_source_layer_id=roles.candidates),
        moe=replace(base.moe, n_routed_experts=experts),
        engram=engram,
        draft=None,
        vision=None,
    )
    execution = ExecutionConfig(
        numerics="checkpoint",
        determinism=setting.level,
        kernels=_kernels(config, setting.kernels),
        row_tile=row_tile(setting.level),
        branches="static" if jax.default_backend() in GPU_PLATFORMS else "data",
        mesh=build_mesh(dict(setting.mesh)) if setting.mesh else None,
    )
    return replace(config, execution=execution)


def _kernels(config: ModelConfig, which: str) -> tuple[tuple[str, str], ...]:
    on_gpu = jax.default_backend() in GPU_PLATFORMS
    return choose_kernels(
        "pallas" if which == "fast" and on_gpu else None,
        numerics="checkpoint",
        scale_block=config.dense_block_size,
        device_kind=jax.devices()[0].device_kind,
        widths=attention_widths(config),
    )


def sizes_of(config: ModelConfig) -> MeshSizes:
    """Returns the axis sizes of the config's mesh, all 1 without one."""
    return mesh_sizes({} if config.execution.mesh is None else config.execution.mesh)


def slice_params(config: ModelConfig, extras: int = 0, *, bias: Any = None) -> Any:
    """Returns random weights where the mesh wants them: the same values on every mesh.

    bias: float32 [layers, experts], added to the router's.
    """
    params = for_kernels(random_params(config, 0), config.execution)
    params = replace(params, engram=replace(params.engram, token_map=_token_map(config)))
    if bias is not None:
        layers = replace(params.layers, gate_bias=params.layers.gate_bias + bias)
        params = replace(params, layers=layers)
    mesh = config.execution.mesh
    return params if mesh is None else settle(params, config, mesh, extras=extras)


def _token_map(config: ModelConfig) -> TokenMap:
    assert config.engram is not None
    return TokenMap(np.arange(config.vocab_size) % config.engram.engram_compressed_vocab_size)


def abstract_slice(config: ModelConfig, extras: int = 0) -> Any:
    """Returns shapes, dtypes and places of `slice_params`."""
    params = jax.eval_shape(
        partial(for_kernels, execution=config.execution), abstract_params(config)
    )
    params = replace(params, engram=replace(params.engram, token_map=_token_map(config)))
    mesh = config.execution.mesh
    if mesh is None:
        return params
    sizes, experts = mesh_sizes(mesh), config.moe.n_routed_experts
    params = padded_abstract(params, sizes)
    slots = padded(experts + extras, sizes.expert_parallel)
    if slots != experts:
        held = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0], slots, *leaf.shape[2:]), leaf.dtype),
            params.layers.experts,
        )
        layout = initial_layout(experts, slots - experts, sizes.expert_parallel)
        layouts = np.broadcast_to(layout, (config.num_hidden_layers, slots))
        maps = jax.eval_shape(lambda: replica_maps(layouts, experts))
        params = replace(params, layers=replace(params.layers, experts=held, replicas=maps))
    return with_places(params, partitions_like(params, config), mesh)


def with_places(tree: Any, specs: Any, mesh: Any) -> Any:
    """Returns shapes and dtypes of a tree with the place of every leaf."""
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for _, leaf, spec in zip_specs(tree, specs)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def cache_of(config: ModelConfig, case: Case) -> Any:
    """Returns caches full of random rows: of every replica the same, `case.sequences` each."""
    single = replace(config, execution=replace(config.execution, mesh=None))
    state = filled_state(single, case)
    mesh, replicas = config.execution.mesh, sizes_of(config).data_parallel
    if mesh is None:
        return state
    found = []
    for _, leaf, spec in zip_specs(state, cache_partitions(state)):
        axis = next(place for place, entry in enumerate(spec) if entry is not None)
        whole = jnp.concatenate([leaf] * replicas, axis) if replicas > 1 else leaf
        found.append(jax.device_put(whole, NamedSharding(mesh, spec)))
    return jax.tree.unflatten(jax.tree.structure(state), found)


def abstract_cache(config: ModelConfig, case: Case) -> Any:
    """Returns shapes, dtypes and places of `cache_of`."""
    single = replace(config, execution=replace(config.execution, mesh=None))
    state = jax.eval_shape(partial(filled_state, single, case))
    mesh, replicas = config.execution.mesh, sizes_of(config).data_parallel
    if mesh is None:
        return state

    def whole(leaf: Any, spec: Any) -> Any:
        shape = list(leaf.shape)
        shape[next(place for place, entry in enumerate(spec) if entry is not None)] *= replicas
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    specs = cache_partitions(state)
    leaves = [whole(leaf, spec) for _, leaf, spec in zip_specs(state, specs)]
    return with_places(jax.tree.unflatten(jax.tree.structure(state), leaves), specs, mesh)


def rows_of(config: ModelConfig, case: Case, seed: int = 2) -> tuple[Any, Any, Any]:
    """Returns (ids, positions, slots) of a step, int32 [replicas * rows]; each has its own ids.

    The first replica has the same ones on every mesh.
    """
    replicas = sizes_of(config).data_parallel
    most = min(config.vocab_size, 100_000) - 20
    ids = [np.random.default_rng([seed, r]).integers(3, most, case.rows) for r in range(replicas)]
    if case.sequences > 1:
        position, slot = np.full(case.rows, case.context - 1), 1 + np.arange(case.rows)
    else:
        position, slot = case.context - case.rows + np.arange(case.rows), np.ones(case.rows, int)
    place = None
    if config.execution.mesh is not None:
        place = NamedSharding(config.execution.mesh, PartitionSpec(DATA_AXES))
    columns = (np.concatenate(ids), np.tile(position, replicas), np.tile(slot, replicas))
    found = [jax.device_put(column.astype(np.int32), place) for column in columns]
    return found[0], found[1], found[2]


def row_step(config: ModelConfig, params: Any, case: Case, *, counts: bool = False) -> Any:
    """Returns step(params, state, ids, positions, slots), in which every replica has its own rows.

    It returns (state, logits of the wanted rows, rows by layer and expert if `counts`). Wanted are
    all rows of a decode step, and the last one of a prompt. params: for their structure.
    """
    asked = ("expert_ids",) if counts else ()

    def run(params: Any, state: Any, ids: Any, position: Any, slot: Any) -> Any:
        plan = Plan(ids=ids, position=position, slot=slot, count=case.rows)
        state, hidden, seen = step(
            params, config, state, plan, row_axes=(CONTEXT_AXIS,), collect=asked
        )
        wanted = hidden if case.sequences > 1 else hidden[-1:]
        found = logits(params, config, wanted)
        if not counts:
            return state, found, jnp.zeros((1,), jnp.int32)
        chosen = seen["expert_ids"].reshape(config.num_hidden_layers, -1)
        rows = (chosen[:, :, None] == jnp.arange(config.moe.n_routed_experts)).sum(1)
        return state, found, rows.astype(jnp.int32)[None]

    mesh = config.execution.mesh
    if mesh is None:
        return run
    rows, held = PartitionSpec(DATA_AXES), cache_partitions(abstract_cache(config, case))
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(partitions_like(params, config), held, rows, rows, rows),
        out_specs=(held, rows, rows),
        check_vma=False,  # as in `on_mesh`
    )


def compiled_step(
    config: ModelConfig, case: Case, *, extras: int = 0, counts: bool = False
) -> Callable[..., Any]:
    """Returns `row_step` compiled from shapes alone; it takes the state over."""
    params = abstract_slice(config, extras)
    run = jax.jit(row_step(config, params, case, counts=counts), donate_argnums=1)
    arguments = (params, abstract_cache(config, case), *rows_of(config, case))
    return run.lower(*arguments).compile()


def split_report(experts: Any, sizes: MeshSizes) -> dict[str, Any]:
    """Returns whether every device of a copy of the experts holds others than the rest.

    From the shards themselves: which slots of axis 1 lie on which device, and that they make up
    the whole axis, once for each of the `er` copies.
    """
    leaf = jax.tree.leaves(experts)[0]
    held = [shard.index[1].indices(leaf.shape[1])[:2] for shard in leaf.addressable_shards]
    parts = sorted(set(held))
    covered = [slot for first, stop in parts for slot in range(first, stop)]
    is_split = len(parts) == sizes.expert_parallel and covered == list(range(leaf.shape[1]))
    each = all(held.count(part) == sizes.er for part in parts)
    return {
        "experts_by_device": [f"{first}..{stop - 1}" for first, stop in held],
        "experts_are_split": is_split and each,
    }
