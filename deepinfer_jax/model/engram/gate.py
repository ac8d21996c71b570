"""Lookup, gate and injection of Engram rows into the residual streams (model.md 3.10.4)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.model.params import EngramParams
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import core


def lookup(table: Any, ids: Int[Array, "t k"]) -> Float[Array, "t k w"]:
    """Returns dequantised rows of a table on the device, or of a `HostTable` through a callback."""
    if isinstance(table, HostTable):
        shape = jax.ShapeDtypeStruct((*ids.shape, table.shape[1]), np.float32)
        return jax.pure_callback(table.lookup, shape, ids, vmap_method="sequential")
    return core.dequantize(table[ids])


def inject(
    ops: Ops,
    config: ModelConfig,
    params: EngramParams,
    rows: Float[Array, "t k w"],
    streams: Float[Array, "t m d"],
    is_text: Bool[Array, " t"],
) -> Float[Array, "t m d"]:
    """Returns the streams plus gated values; image positions unchanged.

    params: leaves of one Engram layer. The gate is sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)), so a
    dot of +0 gives 0.50025 (model.md 9.7).
    """
    tokens, count, width = streams.shape
    eps = config.rms_norm_eps
    projected = ops.bf16(ops.contract(ops.q8(rows.reshape(tokens, -1)), params.wkv))
    keys = projected[:, : count * width].reshape(tokens, count, width)
    value = projected[:, count * width :]
    weight = params.q_weight.astype(jnp.float32) * params.k_weight.astype(jnp.float32)

    def inverse_rms(x: Float[Array, "t m d"]) -> Float[Array, "t m"]:
        return jnp.stack([ops.rms_scale(x[:, i], eps) for i in range(count)], axis=1)

    dot = (
        ops.tree_sum(streams * weight * keys)
        * inverse_rms(streams)
        * inverse_rms(keys)
        * width**-0.5
    )
    gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)), dot))
    added = ops.bf16(streams + gate[:, :, None] * value[:, None, :])
    return jnp.where(is_text[:, None, None], added, streams)
