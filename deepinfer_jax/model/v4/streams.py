"""Residual streams of DeepSeek-V4: each sub-layer uses its own mix, a learned head ends them
(model.md 3.3).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import mhc
from deepinfer_jax.model.params import MHCParams
from deepinfer_jax.numerics.ops import Ops


def residual(
    ops: Ops,
    config: ModelConfig,
    params: MHCParams,
    norm: Float[Array, " d"],
    streams: Float[Array, "t m d"],
    run: Callable[[Float[Array, "t d"]], tuple[Float[Array, "t d"], Any]],
) -> tuple[Float[Array, "t m d"], Any]:
    """Returns the streams after one sub-layer, and what `run` returns beside its output.

    Not shifted: the input mix comes from the streams as they are now.
    """
    eps = config.rms_norm_eps
    mix, post, matrix = mhc.mix_coefficients(ops, config.mhc, eps, params, streams)
    output, rest = run(ops.norm(mhc.collapse(ops, mix, streams), norm, eps))
    return mhc.update(ops, post, matrix, output, streams), rest


def head_collapse(
    ops: Ops, config: ModelConfig, params: MHCParams, streams: Float[Array, "t m d"]
) -> Float[Array, "t d"]:
    """Returns the streams weighted by the learned head mix; params: fn [m, m*d], base, scale."""
    flat = streams.reshape(streams.shape[0], -1)
    mixed = (
        ops.contract_float32(flat, params.fn) * ops.rms_scale(flat, config.rms_norm_eps)[:, None]
    )
    mix = jax.nn.sigmoid(mixed * params.scale[0] + params.base) + config.mhc.hc_eps
    return mhc.collapse(ops, mix, streams)
