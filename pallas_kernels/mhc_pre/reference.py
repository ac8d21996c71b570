"""The coefficients in plain jnp; `sinkhorn` is what the network runs too."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

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


def mhc_pre(
    mixed: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    streams: int,
    eps: float,
    balance: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (pre, post, matrix); arguments as in api.mhc_pre, balance as `sinkhorn`."""
    n = streams
    pre = jax.nn.sigmoid(mixed[:, :n] * scale[0] + base[:n]) + eps
    post = 2.0 * jax.nn.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    matrix = mixed[:, 2 * n :] * scale[2] + base[2 * n :]
    return pre, post, balance(matrix.reshape(-1, n, n))
