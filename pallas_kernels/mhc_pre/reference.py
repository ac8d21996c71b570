"""The coefficients in plain jnp; the network runs `coefficients` and `sinkhorn` too."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core import stock

FoldSum = Callable[[jax.Array, int], jax.Array]


def sinkhorn(
    matrix: jax.Array, iterations: int, eps: float, fold_sum: FoldSum, unroll: int = 1
) -> jax.Array:
    """Returns exp(matrix) balanced by alternating row and column steps; ends on a column step.

    The first row step is a softmax plus eps, without a division (model.md 7.1.18).

    Args:
        matrix: float32 [t, n, n].
        iterations: row and column steps, the first pair included.
        eps: added to every sum.
        fold_sum: (x, axis) -> the sum over a short axis in ascending order.
        unroll: steps of a trip of the loop.
    """

    def columns(b: jax.Array) -> jax.Array:
        return b / (fold_sum(b, 1)[:, None, :] + eps)

    def rows_then_columns(_: jax.Array | int, b: jax.Array) -> jax.Array:
        return columns(b / (fold_sum(b, 2)[:, :, None] + eps))

    exponential = jnp.exp(matrix - matrix.max(axis=2, keepdims=True))
    first = exponential / fold_sum(exponential, 2)[:, :, None] + eps
    return lax.fori_loop(0, iterations - 1, rows_then_columns, columns(first), unroll=unroll)


def projected(x: jax.Array, fn: jax.Array, rms_eps: float) -> jax.Array:
    """Returns x [t, k] @ fn [n (n + 2), k]^T over the RMS of x as float32, in no stated order."""
    wide = x.astype(jnp.float32)
    return stock.contract(wide, fn) * stock.rms_scale(wide, rms_eps)[:, None]


def coefficients(
    mixed: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    streams: int,
    eps: float,
    balance: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (pre, post, matrix) of projected streams.

    Args:
        mixed: float32 [t, n (n + 2)], the projection of the streams over their RMS.
        scale: float32 [3], of the three parts.
        base: float32 [n (n + 2)].
        streams: n.
        eps: added to ``pre``.
        balance: logits [t, n, n] -> the matrix, as `sinkhorn`.
    """
    n = streams
    pre = jax.nn.sigmoid(mixed[:, :n] * scale[0] + base[:n]) + eps
    post = 2.0 * jax.nn.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    matrix = mixed[:, 2 * n :] * scale[2] + base[2 * n :]
    return pre, post, balance(matrix.reshape(-1, n, n))
