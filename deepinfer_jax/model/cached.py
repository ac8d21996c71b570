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
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.errors import InputError
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
    """What one step returns: logits of `plan.rows` (all rows if None), final normed hidden rows.

    logits: float32 [rows, v]. hidden: float32 [T, d], T the plan's length with its padding. Made by
    `prefill`, `decode` and `verify`, which say what they raise.

    Examples:
        >>> di.StepOutput(logits=jnp.zeros((1, 2048)), hidden=jnp.zeros((16, 192))).logits.shape
        (1, 2048)
    """

    logits: Leaf  # float32 [rows, v]
    hidden: Leaf  # float32 [T, d]


def init_state(config: ModelConfig, runtime: RuntimeConfig | None = None) -> AnyState:
    """Returns an empty cache of a `config` for `runtime.max_seqs` sequences in slots 1..max_seqs.

    Every slot owns `max_len` tokens' pages; an engine that shares pages writes the block table. On
    a mesh slots are dealt out to the replicas in turn, and leaves hold one replica's after the
    other's (`model.replicas`). Leaves are float32, or the checkpoint's cache codes at numerics
    "checkpoint", with int32 tables beside them.

    Raises:
        ConfigError: `runtime` is refused when it is made, not here.

    Examples:
        >>> state = di.init_state(model.config, di.RuntimeConfig(max_seqs=2, max_len=256))
        >>> len(jax.tree.leaves(state)) > 0
        True
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

    Args:
        params: `Model.params`.
        config: `Model.config`, static.
        state: what `init_state` or the call before returned.
        plan: what `make_plan` returned: int32 [T] ids, positions and slots. Ids are not checked
            here, but by `score` and the engine.

    Raises:
        RuntimeError: `state` was given to an earlier call already (from JAX: it is donated).

    Examples:
        >>> state = di.init_state(model.config, di.RuntimeConfig(max_seqs=2, max_len=256))
        >>> plan = di.make_plan(model.config, [368, 440, 557], [0, 1, 2], [1, 1, 1])
        >>> state, out = di.prefill(model.params, model.config, state, plan)
        >>> out.logits.shape, out.hidden.shape  # 16 rows: the shortest plan, padded
        ((16, 2048), (16, 192))
    """
    return _program(params, config, state, plan)


def decode(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    """Returns as `prefill`, for plans of one row per sequence. Arguments and errors as there.

    Examples:
        >>> state = di.init_state(model.config, di.RuntimeConfig(max_seqs=2, max_len=256))
        >>> plan = di.make_plan(model.config, [368], [0], [1])
        >>> state, out = di.decode(model.params, model.config, state, plan)
        >>> out.logits[0].shape, out.logits.dtype  # what follows id 368
        ((2048,), dtype('float32'))
    """
    return _program(params, config, state, plan)


def verify(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan
) -> tuple[AnyState, StepOutput]:
    """Returns as `prefill`, for plans of an anchor and its drafts per sequence.

    Rejected rows need no repair: later rows at their positions overwrite them before they are read,
    as long as at most `CacheLayout.rollback` positions are taken back. Arguments and errors as
    `prefill`.

    Examples:
        >>> state = di.init_state(model.config, di.RuntimeConfig(max_seqs=2, max_len=256))
        >>> plan = di.make_plan(model.config, [368, 440, 557], [0, 1, 2], [1, 1, 1])
        >>> state, out = di.verify(model.params, model.config, state, plan)
        >>> out.logits.dtype  # row i says what follows draft i
        dtype('float32')
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
    image_rows: Float[Array, "m d"] | None = None,
    image_place: "np.ndarray | list[int] | None" = None,
) -> Plan:
    """Returns the plan of host rows, padded to `length` (default: the shortest legal one).

    Args:
        config: `Model.config`; its row tile decides which lengths are legal.
        ids: int32 [n] token ids.
        position: int32 [n], from 0, ascending within a sequence.
        slot: int32 [n], which sequence of the state; 0 is nobody's.
        length: of the plan, a multiple of the row tile and at least two tiles.
        rows: int32 [b], the rows whose logits are wanted; None for all.
        image_rows: of `encode_images`; None for text.
        image_place: int32 [n], which of these each row takes that holds the image token's id (any
            number for the others). Goes with image_rows.

    Raises:
        ValueError: `length` is less than the number of rows (from NumPy).
        InputError: one of the last two without the other, or not a place for every row.

    Examples:
        >>> plan = di.make_plan(model.config, [368, 440], [0, 1], [1, 1])
        >>> plan.ids.shape, int(plan.count)
        ((16,), 2)
    """
    count = len(ids)
    places = None if image_place is None else len(image_place)
    if (image_rows is None) != (image_place is None) or places not in (None, count):
        raise InputError(
            "image_rows and image_place go together, with one place for each row; got image_rows "
            f"{'absent' if image_rows is None else 'present'} and image_place with {places} "
            f"entries for {count} rows"
        )
    length = length or plan_length(count, config.execution.row_step)

    def padded(values: "np.ndarray | list[int]") -> Array:
        return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, length - count)))

    return Plan(
        ids=padded(ids),
        position=padded(position),
        slot=padded(slot),
        count=jnp.int32(count),
        rows=None if rows is None else jnp.asarray(np.asarray(rows, np.int32)),
        image_rows=image_rows,
        image_place=None if image_place is None else padded(image_place),
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
