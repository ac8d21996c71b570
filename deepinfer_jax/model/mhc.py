"""Residual streams: coefficients, collapse before a sub-layer, update after it (model.md 3.3)."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from deepinfer_jax.config.model import MHCConfig, ModelConfig
from deepinfer_jax.model.params import MHCParams
from deepinfer_jax.numerics import kernels
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels.mhc_pre import reference

Streams = tuple[Float[Array, "t m d"], Float[Array, "t m"]]  # residual streams, next input mix


def mix_coefficients(
    ops: Ops, mhc: MHCConfig, eps: float, params: MHCParams, streams: Float[Array, "t m d"]
) -> tuple[Float[Array, "t m"], Float[Array, "t m"], Float[Array, "t m m"]]:
    """Returns (A, C, B): input mix for the next sub-layer, output gain, residual mixing matrix.

    B is indexed [i, j] with i the old stream. Float32 throughout; the projection comes before the
    RMS.
    """
    flat = streams.reshape(streams.shape[0], -1)
    kernel = ops.kernel("mhc_pre")
    if kernel != "xla":
        return kernels.mhc_pre(mhc, eps, flat, params.fn, params.scale, params.base, kernel)
    mixed = ops.contract_float32(flat, params.fn) * ops.rms_scale(flat, eps)[:, None]
    return reference.coefficients(
        mixed,
        params.scale,
        params.base,
        mhc.hc_mult,
        mhc.hc_eps,
        lambda matrix: sinkhorn(ops, mhc, matrix),
    )


def sinkhorn(ops: Ops, mhc: MHCConfig, matrix: Float[Array, "t m m"]) -> Float[Array, "t m m"]:
    """Returns exp(matrix) balanced by alternating row and column steps; ends on a column step."""
    # On a GPU every trip launches kernels and a copy. More steps a trip save launches, but all of
    # them at once took its compiler minutes.
    unroll = 2 if ops.static else 1
    return reference.sinkhorn(matrix, mhc.hc_sinkhorn_iters, mhc.hc_eps, ops.fold_sum, unroll)


def collapse(
    ops: Ops, mix: Float[Array, "t m"], streams: Float[Array, "t m d"]
) -> Float[Array, "t d"]:
    """Returns the input of a sub-layer: streams weighted by the mix of the previous sub-layer."""
    return ops.bf16(ops.fold_sum(mix[:, :, None] * streams, axis=1))


def update(
    ops: Ops,
    post: Float[Array, "t m"],
    matrix: Float[Array, "t m m"],
    output: Float[Array, "t d"],
    streams: Float[Array, "t m d"],
) -> Float[Array, "t m d"]:
    """Returns the new streams: X'[j] = C[j] * y + sum_i B[i, j] * X[i], one rounding."""
    carried = ops.fold_sum(matrix[:, :, :, None] * streams[:, :, None, :], axis=1)
    return ops.bf16(post[:, :, None] * output[:, None, :] + carried)


def residual(
    ops: Ops,
    config: ModelConfig,
    params: MHCParams,
    norm: Float[Array, " d"],
    flow: Streams,
    run: Callable[[Float[Array, "t d"]], tuple[Float[Array, "t d"], Any]],
) -> tuple[Streams, Any]:
    """Returns streams and next mix after one sub-layer, and what `run` returns beside its output.

    The coefficients come from the streams as they are now, the input mix from the sub-layer before.
    """
    streams, mix = flow
    eps = config.rms_norm_eps
    next_mix, post, matrix = mix_coefficients(ops, config.mhc, eps, params, streams)
    output, rest = run(ops.norm(collapse(ops, mix, streams), norm, eps))
    return (update(ops, post, matrix, output, streams), next_mix), rest


def initial_mix(rows: int, streams: int) -> Float[Array, "t m"]:
    """Returns the mix of the first sub-layer: stream 0 only (all streams are equal there)."""
    return jnp.zeros((rows, streams), jnp.float32).at[:, 0].set(1.0)
