"""Compressed rows and index keys of the source layers (model.md 3.7, 3.8)."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import CompressorParams
from deepinfer_jax.model.rope import apply_rope, rope_tables
from deepinfer_jax.numerics.ops import Ops


def project(ops: Ops, params: CompressorParams, v: Float[Array, "t d"]) -> Float[Array, "t 2 c"]:
    """Returns (gate, value) of every token, float32, unrounded; a row of the compressor tail."""
    value = ops.contract(v, params.wkv)
    return jnp.stack([ops.contract(v, params.wgate), value], axis=1)


def pool(
    ops: Ops, config: ModelConfig, params: CompressorParams, group: Float[Array, "t g 2 c"]
) -> Float[Array, "t c"]:
    """Returns the latent of a closed group: per-channel softmax over its tokens, sum, norm."""
    gate, value = group[:, :, 0], group[:, :, 1]
    weight = jnp.exp(gate - gate.max(axis=1, keepdims=True))
    weight = weight / ops.fold_sum(weight, axis=1)[:, None]
    pooled = ops.bf16(ops.fold_sum(weight * value, axis=1))
    return ops.norm(pooled, params.norm, config.rms_norm_eps)


def single(
    ops: Ops, config: ModelConfig, params: CompressorParams, v: Float[Array, "t d"]
) -> Float[Array, "t c"]:
    """Returns the latent of ratio 1: projection and norm, no gate."""
    return ops.norm(ops.bf16(ops.contract(v, params.wkv)), params.norm, config.rms_norm_eps)


def publish(
    ops: Ops,
    config: ModelConfig,
    params: CompressorParams,
    latent: Float[Array, "t c"],
    first: Int[Array, " t"],
    frequency: Float[Array, " r2"],
) -> tuple[Float[Array, "t c"], Float[Array, "t i"]]:
    """Returns (compressed row, index key), rotated at the group's first position, not yet
    quantised.

    The index key comes from the latent before its rotation.
    """
    rope = rope_tables(first, frequency)
    row = ops.bf16(apply_rope(latent, *rope))
    # In reverse mode index keys learn from the index loss, which must not reach the latent.
    latent = lax.stop_gradient(latent)
    key = ops.norm(
        ops.bf16(ops.contract(latent, params.index_wk)), params.index_k_norm, config.rms_norm_eps
    )
    return row, ops.bf16(apply_rope(key, *rope))
