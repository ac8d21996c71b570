"""The coefficients as one Pallas-Triton kernel: a row is a lane, its matrix stays in registers.

XLA runs every step of the balancing as a kernel of its own. Here all sums are chains of additions
in ascending order, lane by lane, so a row's bits depend on nothing else.
"""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.mhc_pre.configs import MHCConfig

Square = tuple[tuple[jax.Array, ...], ...]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _transposed(square: Square) -> Square:
    return tuple(zip(*square, strict=True))


def _rows_divided(square: Square, eps: float) -> Square:
    """Returns every row over its sum plus eps."""
    sums = [reduce(add, row) + eps for row in square]
    return tuple(
        tuple(entry / total for entry in row) for row, total in zip(square, sums, strict=True)
    )


def _columns_divided(square: Square, eps: float) -> Square:
    return _transposed(_rows_divided(_transposed(square), eps))


def _balanced(square: Square, iterations: int, eps: float) -> Square:
    """Returns exp(square) after the row and column steps (reference.sinkhorn)."""
    first = []
    for row in square:
        highest = reduce(jnp.maximum, row)
        exponential = tuple(jnp.exp(entry - highest) for entry in row)
        first.append(tuple(entry + eps for entry in _rows_divided((exponential,), 0.0)[0]))

    def steps(_: jax.Array, b: Square) -> Square:
        return _columns_divided(_rows_divided(b, eps), eps)

    return lax.fori_loop(0, iterations - 1, steps, _columns_divided(tuple(first), eps))


def build(
    config: MHCConfig, *, streams: int, iterations: int, eps: float, interpret: bool = False
) -> Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns the kernel: (mixed float32 [t, n (n + 2)], scale [3], base [n (n + 2)]) -> outputs.

    Args:
        config: launch parameters.
        streams: n.
        iterations: row and column steps.
        eps: added to the gates of the inputs and to every sum.
        interpret: run by the plain Pallas interpreter on CPU.
    """
    n = streams

    def body(
        count_ref: Any, x_ref: Any, scale_ref: Any, base_ref: Any, pre: Any, post: Any, out: Any
    ) -> None:
        row = pl.program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
        inside = row < count_ref[0]

        def column(place: int, group: int) -> jax.Array:
            x = plt.load(x_ref.at[row, place], mask=inside, other=0.0)
            return x * scale_ref[group] + base_ref[place]

        for k in range(n):
            plt.store(pre.at[row, k], _sigmoid(column(k, 0)) + eps, mask=inside)
            plt.store(post.at[row, k], 2.0 * _sigmoid(column(n + k, 1)), mask=inside)
        places = [[2 * n + i * n + j for j in range(n)] for i in range(n)]
        square = tuple(tuple(column(place, 2) for place in line) for line in places)
        for i, line in enumerate(_balanced(square, iterations, eps)):
            for j, entry in enumerate(line):
                plt.store(out.at[row, i * n + j], entry, mask=inside)

    def call(
        mixed: jax.Array, scale: jax.Array, base: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows = mixed.shape[0]
        pre, post, matrix = pl.pallas_call(
            body,
            out_shape=tuple(
                jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in (n, n, n * n)
            ),
            grid=(-(-rows // config.rows),),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=1),
            name="mhc_pre",
        )(jnp.full((1,), rows, jnp.int32), mixed, scale, base)
        return pre, post, matrix.reshape(rows, n, n)

    return call
