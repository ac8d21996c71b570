"""The V4 network on one tile of rows: embedding, layers scanned, learned head mix, final norm."""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.model.v4.layer import apply_layer
from deepinfer_jax.model.v4.role import V4Role, v4_role_table
from deepinfer_jax.model.v4.state import V4CacheState, check_execution
from deepinfer_jax.model.v4.streams import head_collapse
from deepinfer_jax.numerics.ops import Ops


def run_tile(
    ops: Ops,
    config: ModelConfig,
    params: V4Params,
    state: V4CacheState,
    tile: Rows,
    drafting: bool,
    collect: tuple[str, ...],
) -> tuple[V4CacheState, Float[Array, "t d"], dict[str, Array]]:
    """Embedding, layers, learned head mix and final norm of one tile; lengths follow its rows."""
    check_execution(config)
    if drafting:
        raise InputError("draft stages of deepseek_v4 are recognised but not loaded: do not draft")
    written = tile if tile.whole is None else tile.whole
    reached = jnp.where(written.valid, written.position + 1, 0)
    state = replace(state, length=state.length.at[written.slot].max(reached))
    embedded = params.embed[tile.ids].astype(jnp.float32)
    shape = (tile.ids.shape[0], config.mhc.hc_mult, config.hidden_size)
    streams = jnp.broadcast_to(embedded[:, None], shape)

    def layer(carry: tuple, role: V4Role) -> tuple:
        state, streams, seen = apply_layer(ops, config, params, role, carry[0], carry[1], tile)
        return (state, streams), {name: seen[name] for name in collect}

    (state, streams), seen = lax.scan(layer, (state, streams), v4_role_table(config))
    hidden = head_collapse(ops, config, params.hc_head, streams)
    return state, ops.norm(hidden, params.norm, config.rms_norm_eps), seen
