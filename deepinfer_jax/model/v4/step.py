"""The DeepSeek-V4 network over a plan of rows: tiles of fixed height, layers scanned inside.

The plan and the loop are those of V4.1 (`model.step`), with the same rules and traps.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.step import Plan
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.model.v4.layer import apply_layer
from deepinfer_jax.model.v4.role import V4Role, v4_role_table
from deepinfer_jax.model.v4.state import V4CacheState, require_float32
from deepinfer_jax.model.v4.streams import head_collapse
from deepinfer_jax.numerics.ops import Ops, ops_for


def step_v4(
    params: V4Params,
    config: ModelConfig,
    state: V4CacheState,
    plan: Plan,
    *,
    collect: tuple[str, ...] = (),
) -> tuple[V4CacheState, Float[Array, "n d"], dict[str, Array]]:
    """Returns (state after the plan's rows, final normed hidden [T, d], collected values).

    collect: names of `apply_layer`'s observations, returned as [layers, T, ...]. Rows beyond
    `plan.count` are not computed. float32 throughout; every determinism level.

    Raises:
        ConfigError: other arithmetic than float32 is asked for.
    """
    require_float32(config)
    ops = ops_for(config.execution)
    rows = plan.ids.shape[0]
    tile_rows = config.execution.row_tile if ops.fixed_order else rows

    def body(index: Int[Array, ""] | int, carry: tuple) -> tuple:
        state, hidden, collected = carry
        start = index * tile_rows
        cut = [
            lax.dynamic_slice_in_dim(a, start, tile_rows)
            for a in (plan.ids, plan.position, plan.slot)
        ]
        valid = start + jnp.arange(tile_rows) < plan.count
        # The barrier keeps row-only work from being hoisted out of the loop (determinism.md 12).
        tile = Rows(*lax.optimization_barrier((*cut, valid)))
        state, z, seen = _run_tile(ops, config, params, state, tile, collect)
        hidden = lax.dynamic_update_slice_in_dim(hidden, z, start, axis=0)
        collected = {
            name: lax.dynamic_update_slice_in_dim(buffer, seen[name], start, axis=1)
            for name, buffer in collected.items()
        }
        return state, hidden, collected

    hidden = jnp.zeros((rows, config.hidden_size), jnp.float32)
    zeros = jnp.zeros((tile_rows,), jnp.int32)
    blank = Rows(ids=zeros, position=zeros, slot=zeros, valid=zeros > 0)
    shapes = jax.eval_shape(lambda: _run_tile(ops, config, params, state, blank, collect)[2])
    collected = {
        name: jnp.zeros((s.shape[0], rows, *s.shape[2:]), s.dtype) for name, s in shapes.items()
    }
    carry = (state, hidden, collected)
    if not ops.fixed_order:
        return body(0, carry)
    return lax.fori_loop(0, -(-plan.count // tile_rows), body, carry)


def _run_tile(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    state: V4CacheState,
    tile: Rows,
    collect: tuple[str, ...],
) -> tuple[V4CacheState, Float[Array, "t d"], dict[str, Array]]:
    """Embedding, layers, learned head mix and final norm of one tile; lengths follow its rows."""
    reached = jnp.where(tile.valid, tile.position + 1, 0)
    state = replace(state, length=state.length.at[tile.slot].max(reached))
    embedded = params.embed[tile.ids].astype(jnp.float32)
    shape = (tile.ids.shape[0], config.mhc.hc_mult, config.hidden_size)
    streams = jnp.broadcast_to(embedded[:, None], shape)

    def layer(carry: tuple, role: V4Role) -> tuple:
        state, streams, seen = apply_layer(ops, config, params, role, carry[0], carry[1], tile)
        return (state, streams), {name: seen[name] for name in collect}

    (state, streams), seen = lax.scan(layer, (state, streams), v4_role_table(config))
    hidden = head_collapse(ops, config, params.hc_head, streams)
    return state, ops.norm(hidden, params.norm, config.rms_norm_eps), seen


def logits_v4(
    params: V4Params, config: ModelConfig, hidden: Float[Array, "n d"]
) -> Float[Array, "n v"]:
    """Returns float32 logits of final normed hidden rows."""
    return ops_for(config.execution).contract(hidden, params.head)
