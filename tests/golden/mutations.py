"""Wrong versions of shipped functions: the conventions that bite (model.md 7.2), each broken once.

A mutation is a function of a MonkeyPatch. `everywhere` replaces a function under every name by
which a module of the package or of these tests imported it.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import layer as layer_module
from deepinfer_jax.model import mhc, moe, network, rope
from deepinfer_jax.model.attention import compress, core, indexer, projections, sublayer, window
from deepinfer_jax.model.engram import hashing
from pallas_kernels import core as primitives
from pallas_kernels.core import quant_array

Patch = pytest.MonkeyPatch


def everywhere(patch: Patch, home: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replaces `home.name` in every module that holds the same object under that name."""
    right = getattr(home, name)
    for label, module in list(sys.modules.items()):
        inside = label.startswith(("deepinfer_jax", "pallas_kernels", "tests.golden"))
        if inside and getattr(module, name, None) is right:
            patch.setattr(module, name, wrong)


def rotary_half_split(patch: Patch) -> None:
    """Channel i turns with channel i + r/2, not with its neighbour."""

    def wrong(x, cos, sin, *, inverse=False):
        half = cos.shape[-1]
        shape = (cos.shape[0],) + (1,) * (x.ndim - 2) + (half,)
        cos, sin = cos.reshape(shape), sin.reshape(shape) * (-1 if inverse else 1)
        kept, a, b = x[..., : -2 * half], x[..., -2 * half : -half], x[..., -half:]
        return jnp.concatenate([kept, a * cos - b * sin, a * sin + b * cos], axis=-1)

    everywhere(patch, rope, "apply_rope", wrong)


def inverse_rotation_missing(patch: Patch) -> None:
    right = projections.apply_rope

    def wrong(x, cos, sin, *, inverse=False):
        return x if inverse else right(x, cos, sin)

    patch.setattr(projections, "apply_rope", wrong)


def yarn_missing_in_window_keys(patch: Patch) -> None:
    """Window keys of a compressing layer turn with the plain theta of layers 0 and 1."""
    tables, key, positions = sublayer.rope_tables, projections.window_key, []

    def noted(position, frequency):
        positions.append(position)
        return tables(position, frequency)

    def wrong(ops, config, layer, v, _):
        plain = rope.rope_frequencies(config.attention)[0]
        return key(ops, config, layer, v, tables(positions[-1], plain))

    patch.setattr(sublayer, "rope_tables", noted)
    patch.setattr(projections, "window_key", wrong)


def per_head_query_norm(patch: Patch) -> None:
    """V4's unweighted RMS per head, which V4.1 does not have."""
    right = projections.queries

    def wrong(ops, config, layer, latent, turn):
        q = right(ops, config, layer, latent, turn)
        return q * jax.lax.rsqrt(jnp.mean(q * q, axis=-1, keepdims=True) + 1e-6)

    patch.setattr(projections, "queries", wrong)


def mixing_matrix_transposed(patch: Patch) -> None:
    right = mhc.update

    def wrong(ops, post, matrix, output, streams):
        return right(ops, post, matrix.swapaxes(1, 2), output, streams)

    patch.setattr(mhc, "update", wrong)


def sinkhorn_ends_on_rows(patch: Patch) -> None:
    right = mhc.sinkhorn

    def wrong(ops, settings, matrix):
        return right(ops, settings, matrix.swapaxes(1, 2)).swapaxes(1, 2)

    patch.setattr(mhc, "sinkhorn", wrong)


def own_mix_used(patch: Patch) -> None:
    """The attention sub-layer collapses with the mix it computes itself, as in V4."""
    right = layer_module.apply_layer

    def wrong(ops, config, params, role, state, flow, tile):
        entering = layer_module._engram(ops, config, params, role, state, flow.streams, tile)
        own = layer_module.layer_at(params.layers, role.layer).hc_attn
        mix = mhc.mix_coefficients(ops, config.mhc, config.rms_norm_eps, own, entering)[0]
        return right(ops, config, params, role, state, flow.replace(mix=mix), tile)

    patch.setattr(network, "apply_layer", wrong)


def mix_delayed_by_a_layer(patch: Patch) -> None:
    """The MoE sub-layer collapses with the mix of the layer before, as the attention did."""
    apply, collapse, first = network.apply_layer, mhc.collapse, []

    def remembered(ops, mix, streams):
        if first and first[0] is not None:
            return collapse(ops, first[0], streams)
        if first:
            first[0] = mix
        return collapse(ops, mix, streams)

    def wrong(*args):
        first[:] = [None]
        try:
            return apply(*args)
        finally:
            first.clear()

    patch.setattr(mhc, "collapse", remembered)
    patch.setattr(network, "apply_layer", wrong)


def sink_scaled(patch: Patch) -> None:
    right = core.attend

    def wrong(ops, q, keys, valid, sink):
        return right(ops, q, keys, valid, sink * q.shape[-1] ** -0.5)

    patch.setattr(core, "attend", wrong)


def absent_keys_clamped_to_row_0(patch: Patch) -> None:
    right = core.attend

    def wrong(ops, q, keys, valid, sink):
        return right(ops, q, keys, jnp.ones_like(valid), sink)

    patch.setattr(core, "attend", wrong)


def softmax_blocks_of_32(patch: Patch) -> None:
    patch.setattr(core, "BLOCK", 32)


def window_off_by_one(patch: Patch) -> None:
    """A row of a full window sees the key before it instead of its own."""

    def wrong(position, size, lowest):
        first = jnp.maximum(position - size, lowest)[:, None]
        ranks = first + jnp.arange(size, dtype=jnp.int32)
        return jnp.where(ranks <= position[:, None], ranks, -1)

    patch.setattr(window, "window_ranks", wrong)


def _visible_shifted(patch: Patch, by: int) -> None:
    right = sublayer._select

    def wrong(ops, config, params, role, state, selection, tile, *rest):
        moved = tile.replace(position=tile.position + by)
        return right(ops, config, params, role, state, selection, moved, *rest)

    patch.setattr(sublayer, "_select", wrong)


def visible_floor_p_over_r(patch: Patch) -> None:
    """floor(p / r) visible rows instead of floor((p + 1) / r)."""
    _visible_shifted(patch, -1)


def visible_open_pair(patch: Patch) -> None:
    """A pair is visible to its first token, whose row is not written yet."""
    _visible_shifted(patch, 1)


def rotated_at_last_token(patch: Patch) -> None:
    right = compress.publish

    def wrong(ops, config, params, latent, first, frequency):
        return right(ops, config, params, latent, first + 1, frequency)

    patch.setattr(compress, "publish", wrong)


def candidate_blocks_shifted(patch: Patch) -> None:
    right = indexer.candidate_positions

    def wrong(config, mask, capacity):
        return jnp.roll(right(config, mask, capacity), 1, axis=1)

    patch.setattr(indexer, "candidate_positions", wrong)


def last_block_not_forced(patch: Patch) -> None:
    right = primitives.select_blocks

    def wrong(scores, length, size, blocks):
        last = (jnp.maximum(length, 1) - 1)[:, None] // size * size
        inside = jnp.arange(scores.shape[1]) // size * size == last
        lowered = jnp.where(inside, scores - 1e6, scores)
        kept = right(lowered, jnp.full_like(length, scores.shape[1]), size, blocks)
        return kept & (jnp.arange(kept.shape[1]) * size < length[:, None])

    patch.setattr(primitives, "select_blocks", wrong)


def _clamps(patch: Patch, gate_low: float, up_low: float) -> None:
    def wrong(ops, settings, expert, x, weight=None):
        limit = settings.swiglu_limit
        gate = jnp.clip(ops.bf16(ops.contract(x, expert.w1)), gate_low * limit, limit)
        up = jnp.clip(ops.bf16(ops.contract(x, expert.w3)), up_low * limit, limit)
        active = jax.nn.silu(gate) * up * (1.0 if weight is None else weight)
        return ops.bf16(ops.contract(ops.q8(ops.bf16(active)), expert.w2))

    patch.setattr(moe, "swiglu", wrong)


def up_clamped_from_above_only(patch: Patch) -> None:
    _clamps(patch, -np.inf, -np.inf)


def gate_clamped_on_both_sides(patch: Patch) -> None:
    _clamps(patch, -1.0, -1.0)


def weight_after_the_quantiser(patch: Patch) -> None:
    """The routing weight multiplies the output, so the FP8 scales miss it."""
    right = moe.swiglu

    def wrong(ops, settings, expert, x, weight=None):
        y = right(ops, settings, expert, x)
        return y if weight is None else ops.bf16(y * weight)

    patch.setattr(moe, "swiglu", wrong)


def gate_and_up_exchanged(patch: Patch) -> None:
    right = moe.swiglu

    def wrong(ops, settings, expert, x, weight=None):
        return right(ops, settings, expert.replace(w1=expert.w3, w3=expert.w1), x, weight)

    patch.setattr(moe, "swiglu", wrong)


def bias_inside_weights(patch: Patch) -> None:
    def wrong(ops, settings, gate, bias, v):
        scores = moe.router_scores(ops.contract(v, gate)) + bias
        chosen, ids = primitives.top_k(scores, settings.num_experts_per_tok)
        total = ops.fold_sum(chosen, axis=1)[:, None] + 1e-20
        return ids, chosen / total * settings.routed_scaling_factor

    patch.setattr(moe, "route", wrong)


def nibbles_swapped(patch: Patch) -> None:
    right = quant_array._unpack
    patch.setattr(quant_array, "_unpack", lambda codes: right((codes << 4) | (codes >> 4)))


def _scales_read_column_major(patch: Patch, for_blocks: bool) -> None:
    right = quant_array._spread

    def wrong(scale, shape, rows, channels):
        if (rows > 1) is for_blocks:
            scale = scale.swapaxes(-1, -2).reshape(scale.shape)
        return right(scale, shape, rows, channels)

    patch.setattr(quant_array, "_spread", wrong)


def dense_scale_axes_exchanged(patch: Patch) -> None:
    _scales_read_column_major(patch, for_blocks=True)


def expert_scale_axes_exchanged(patch: Patch) -> None:
    _scales_read_column_major(patch, for_blocks=False)


def engram_columns_head_major(patch: Patch) -> None:
    right = hashing.hash_ids

    def wrong(tables, place, context, pad):
        ids = right(tables, place, context, pad)
        heads = len(tables.primes[place][0])
        return ids.reshape(ids.shape[0], -1, heads).swapaxes(1, 2).reshape(ids.shape)

    patch.setattr(hashing, "hash_ids", wrong)


def engram_look_back_reversed(patch: Patch) -> None:
    right = hashing.look_back
    patch.setattr(hashing, "look_back", lambda context, pad: right(context, pad)[:, ::-1])


def engram_images_not_sticky(patch: Patch) -> None:
    patch.setattr(hashing, "look_back", lambda context, pad: jnp.where(context < 0, pad, context))


def eps_of_1e_minus_6(patch: Patch) -> None:
    scale, norm = primitives.rms_scale, primitives.rms_norm
    patch.setattr(primitives, "rms_scale", lambda x, eps: scale(x, 1e-6))
    patch.setattr(primitives, "rms_norm", lambda x, w, eps: norm(x, w, 1e-6))
