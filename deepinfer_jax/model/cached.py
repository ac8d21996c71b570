"""The cached forms of the network: one program for prefill, decode and verification.

They differ in what the plan holds, not in arithmetic: a sequence's logits have the same bits
however its rows were cut into calls and whatever shares them (determinism.md D1-D3).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.placement import cache_partitions, partitions_like
from deepinfer_jax.model.registry import AnyParams, AnyState, empty_cache
from deepinfer_jax.model.replicas import empty_replicas, in_plan_order, own_rows
from deepinfer_jax.model.share import rows_before_read
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.step import Plan, logits, plan_length, step
from sharding.mesh import CONTEXT_AXIS, mesh_sizes


@struct.dataclass
class StepOutput:
    """What one step returns: logits of `plan.rows` (all rows if None), final normed hidden rows."""

    logits: Leaf  # float32 [rows, v]
    hidden: Leaf  # float32 [T, d]


def init_state(config: ModelConfig, runtime: RuntimeConfig | None = None) -> AnyState:
    """Returns an empty cache for `runtime.max_seqs` sequences in slots 1..max_seqs.

    Every slot owns `max_len` tokens' pages; an engine that shares pages writes the block table. On
    a mesh slots are dealt out to the replicas in turn, and leaves hold one replica's after the
    other's (`model.replicas`).
    """
    runtime = runtime or RuntimeConfig()
    layout = cache_layout(config, runtime, runtime.max_seqs + 1, runtime.longest(config))
    if config.execution.mesh is not None:
        return empty_replicas(config, layout)
    return empty_cache(config, layout)


def cache_layout(
    config: ModelConfig, runtime: RuntimeConfig, slots: int, tokens: int
) -> CacheLayout:
    """Returns the sizes of a cache whose slots hold `tokens` tokens each."""
    execution, pages = config.execution, -(-tokens // runtime.block_tokens)
    tile = rows_before_read(execution, (CONTEXT_AXIS,))
    if not execution.is_tiled:
        # Without row tiles a step writes all of its rows before it reads any.
        tile = plan_length(runtime.max_tokens_per_step, execution.row_step)
    return CacheLayout(
        num_slots=slots,
        num_blocks=1 + (slots - 1) * pages,
        max_blocks=pages,
        block_tokens=runtime.block_tokens,
        row_tile=tile,
    )


def prefill(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    """Runs the plan's rows, any number per sequence; returns (new state, logits of `plan.rows`).

    Compiled on first use for each plan length, and `state` is donated: use the returned one. Rows
    of a sequence must follow what its slot holds. `vmap` over states or plans becomes a `lax.map`.
    """
    return _program(params, config, state, plan)


def decode(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    """As `prefill`, for plans of one row per sequence."""
    return _program(params, config, state, plan)


def verify(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    """As `prefill`, for plans of an anchor and its drafts per sequence.

    Rejected rows need no repair: later rows at their positions overwrite them before they are read,
    as long as at most `CacheLayout.rollback` positions are taken back.
    """
    return _program(params, config, state, plan)


def make_plan(
    config: ModelConfig,
    ids: "np.ndarray | list[int]",
    position: "np.ndarray | list[int]",
    slot: "np.ndarray | list[int]",
    *,
    length: int | None = None,
    rows: "np.ndarray | list[int] | None" = None,
) -> Plan:
    """Returns the plan of host rows, padded to `length` (default: the shortest legal one)."""
    count = len(ids)
    length = length or plan_length(count, config.execution.row_step)

    def padded(values: "np.ndarray | list[int]") -> Array:
        return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, length - count)))

    return Plan(
        ids=padded(ids),
        position=padded(position),
        slot=padded(slot),
        count=jnp.int32(count),
        rows=None if rows is None else jnp.asarray(np.asarray(rows, np.int32)),
    )


def lower_program(params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan) -> Any:
    """Returns the lowered program of the three forms at the shapes of these arguments."""
    return _program.lower(params, config, state, plan)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def _program(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    mesh = config.execution.mesh
    if mesh is None:
        return sequential_vmap(partial(_run, config))(params, state, plan)
    held, whole = cache_partitions(state), PartitionSpec()
    run = jax.shard_map(
        partial(_run, config),
        mesh=mesh,
        in_specs=(partitions_like(params, config), held, whole),
        out_specs=(held, whole),
        check_vma=False,  # as in `on_mesh`
    )
    return run(params, state, plan)


def _run(
    config: ModelConfig, params: AnyParams, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    mesh, drafting = config.execution.mesh, config.draft is not None
    if mesh is None:
        state, hidden, _ = step(params, config, state, plan, drafting=drafting)
    else:
        own, order = own_rows(plan, mesh_sizes(mesh))
        state, hidden, _ = step(
            params, config, state, own, drafting=drafting, row_axes=(CONTEXT_AXIS,)
        )
        hidden = in_plan_order(hidden, own, order)
    wanted = hidden if plan.rows is None else hidden[plan.rows]
    return state, StepOutput(logits=logits(params, config, wanted), hidden=hidden)
