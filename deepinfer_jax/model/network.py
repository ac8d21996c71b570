"""The V4.1 network on one tile of rows: embedding, layers scanned, final norm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import encoder_layers
from deepinfer_jax.model import mhc
from deepinfer_jax.model.attention.sublayer import empty_selection
from deepinfer_jax.model.draft import draft_params, draft_settings, write_context
from deepinfer_jax.model.engram.hashing import compressed_ids
from deepinfer_jax.model.layer import OwnLayer, apply_layer
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.tile import Flow, Role, Rows, role_table, scan_first, static_roles
from deepinfer_jax.model.vision.positions import image_mask
from deepinfer_jax.numerics.ops import Ops


def run_tile(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    state: CacheState,
    tile: Rows,
    drafting: bool,
    collect: tuple[str, ...],
    *,
    remat: bool | None = None,
) -> tuple[CacheState, Float[Array, "t d"], dict[str, Array]]:
    """Embedding, layers and final norm of one tile.

    remat: None for inference. A bool is for reverse mode: the layers' leaves go through the scan as
    inputs, so that their gradients are stacked rather than added into the whole tree once a layer;
    True recomputes a layer in the backward pass, all but its selection. Same values either way.

    With `replay="compact"` a tile without a row at or above its slot's floor passes the encoder and
    the last KV source only (engine.md 4.2). The values of rows below the floor mean nothing then.
    """
    state = _remember(config, params, state, tile)
    start = first_flow(config, params, state, tile)
    wanted = (*collect, "tap") if drafting else collect

    def layer(carry: tuple, scanned: tuple[Role, LayerParams | None]) -> tuple:
        role, own = scanned
        held = params if own is None else replace(params, layers=jax.tree.map(OwnLayer, own))
        state, flow, seen = apply_layer(ops, config, held, role, carry[0], carry[1], tile)
        return (state, flow), {name: seen[name]() for name in wanted}

    if remat:
        kept = jax.checkpoint_policies.save_only_these_names("selection")
        layer = jax.checkpoint(layer, policy=kept, prevent_cse=False)
    scanned = (role_table(config), None if remat is None else params.layers)
    if config.execution.replay == "compact":
        kept = tile.valid & (tile.position >= state.floor[tile.slot])
        published = encoder_layers(config) + 1  # the last KV source needs every row
        trips = ops.agree(jnp.where(kept.any(), config.num_hidden_layers, published))
        carry, seen = scan_first(layer, (state, start), scanned, trips)
    elif ops.static:
        carry, seen = _one_by_one(layer, (state, start), static_roles(config))
    else:
        carry, seen = lax.scan(layer, (state, start), scanned)
    state, flow = carry
    if drafting:
        tapped = draft_settings(config).dspark_target_layer_ids
        if ops.static:
            taps = jnp.stack([seen["tap"][place] for place in tapped])
        else:
            taps = seen["tap"][np.asarray(tapped)]
        state = write_context(ops, config, draft_params(params), state, tile, taps)
    hidden = mhc.collapse(ops, flow.mix, flow.streams)
    final = ops.norm(hidden, params.norm, config.rms_norm_eps)
    return state, final, {name: jnp.asarray(seen[name]) for name in collect}


def first_flow(config: ModelConfig, params: Params, state: CacheState, tile: Rows) -> Flow:
    """Returns what enters the first layer: every stream is the embedding, or the image's row."""
    embedded = params.embed[tile.ids].astype(jnp.float32)
    is_image = image_mask(config, tile.ids)
    if tile.image is not None and is_image is not None:
        embedded = jnp.where(is_image[:, None], tile.image, embedded)
    count, streams = tile.ids.shape[0], config.mhc.hc_mult
    return Flow(
        streams=jnp.broadcast_to(embedded[:, None], (count, streams, config.hidden_size)),
        mix=mhc.initial_mix(count, streams),
        selection=empty_selection(config, state, count),
    )


def _one_by_one(
    layer: Callable[..., tuple[Any, dict[str, Array]]], carry: Any, roles: list[Role]
) -> tuple[Any, dict[str, list[Array]]]:
    """Returns what a scan over the layers returns, observations in lists; roles are known."""
    seen: dict[str, list[Array]] = {}
    for role in roles:
        carry, found = layer(carry, (role, None))
        for name, value in found.items():
            seen.setdefault(name, []).append(value)
    return carry, seen


def _remember(config: ModelConfig, params: Params, state: CacheState, tile: Rows) -> CacheState:
    """Writes lengths, and compressed ids to the look-back ring before any row reads it."""
    tile = tile if tile.whole is None else tile.whole
    length = jnp.where(tile.valid, tile.position + 1, 0)
    state = replace(state, length=state.length.at[tile.slot].max(length))
    if params.engram is None:
        return state
    compressed = compressed_ids(config, params.engram, tile.ids)
    slot = jnp.where(tile.valid, tile.slot, state.engram_ids.shape[0])
    ring = tile.position % state.engram_ids.shape[1]
    return replace(state, engram_ids=state.engram_ids.at[slot, ring].set(compressed, mode="drop"))
