"""The coefficients as two Pallas-Triton kernels: the projection by parts of K, then the balancing.

24 columns cannot fill a GPU, so programs share K: each writes the products and the square sum of
one part of fixed size, and the second kernel adds the parts in ascending order (kernels.md 4.7).
The products are those of float32 on tensor cores: the streams are BF16 values, and a float32 weight
is the sum of three, so every product is exact, and the sums are float32.

The kernels read how many rows there are. No stride, mask or trip count in them is made from it, so
that all numbers of rows have the same sums in the same layouts, and a row the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.mhc_pre.configs import MHCConfig

Outputs = tuple[jax.Array, jax.Array, jax.Array]
_UPPER = -65536  # bits of a float32 that are a BF16 of their own


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _in_three(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns BF16 arrays whose sum is x, float32, but for parts below its smallest exponent."""

    def upper(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, jnp.int32) & _UPPER
        return lax.bitcast_convert_type(bits, jnp.float32)

    high = upper(x)
    middle = upper(x - high)
    low = x - high - middle
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), low.astype(jnp.bfloat16)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x [m, k] @ w [n, k]^T of BF16 values as float32."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class _Columns:
    """Where a row of partial sums keeps what belongs to n streams.

    The matrix comes first, in lines of `side`, then the gates, then the square sum.
    """

    n: int

    @property
    def side(self) -> int:
        """Returns the length of a line of the matrix, a power of two."""
        return pl.next_power_of_2(self.n)

    @property
    def gates(self) -> int:
        """Returns the first column of the gates: n of the inputs, n of the output."""
        return self.side**2

    @property
    def square(self) -> int:
        """Returns the column of the square sum."""
        return self.gates + 2 * self.n

    @property
    def count(self) -> int:
        """Returns how many columns there are, a power of two."""
        return pl.next_power_of_2(self.square + 1)

    def line_of(self, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the line of `fn` and `base` behind each column, whether there is one)."""
        n, gate = self.n, column - self.gates
        i, j = column // self.side, column % self.side
        line = jnp.where(gate < 0, (2 + i) * n + j, gate)
        return line, jnp.where(gate < 0, (i < n) & (j < n), gate < 2 * n)


def _spread(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns indices of rows and columns, both [r, c]."""
    shape = (row.shape[0], column.shape[0])
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)


def _rows(size: int) -> jax.Array:
    return pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32)


def _place(mask: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Returns the places, those without a value outside: the interpreter writes back what it read.

    An index of a masked value that is another's place too would undo the other's store there.
    """
    return jnp.where(mask, place, size)


def _projection(config: MHCConfig, columns: _Columns, channels: int) -> Callable[..., None]:
    """Returns the body that writes the products and the square sum of one part of some rows."""
    is_ragged = channels % config.part != 0

    def body(count_ref: Any, x_ref: Any, fn_ref: Any, out_ref: Any) -> None:
        part, row = pl.program_id(1), _rows(config.rows)
        column = jnp.arange(columns.count, dtype=jnp.int32)
        line, has_line = columns.line_of(column)

        def load(ref: Any, line: jax.Array, valid: jax.Array, place: jax.Array) -> jax.Array:
            at, places = _spread(line, place)
            mask = jnp.broadcast_to(valid[:, None], at.shape)
            if is_ragged:
                mask &= places < channels
            return plt.load(ref.at[at, places], mask=mask, other=0.0)

        def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            place = part * config.part + index * config.chunk
            place += jnp.arange(config.chunk, dtype=jnp.int32)
            weights = _in_three(load(fn_ref, line, has_line, place))  # its mask is there first
            x = load(x_ref, row, row < count_ref[0], place)
            narrow, wide = x.astype(jnp.bfloat16), x.astype(jnp.float32)
            *products, squares = sums
            found = [p + _product(narrow, w) for p, w in zip(products, weights, strict=True)]
            return *found, squares + wide * wide

        zeros = jnp.zeros((config.rows, columns.count), jnp.float32)
        start = (zeros, zeros, zeros, jnp.zeros((config.rows, config.chunk), jnp.float32))
        steps = -(-min(channels, config.part) // config.chunk)
        high, middle, low, squares = lax.fori_loop(0, steps, step, start)
        square = jnp.broadcast_to(jnp.sum(squares, axis=1)[:, None], zeros.shape)
        at, column = _spread(row, column)
        total = jnp.where(column == columns.square, square, low + middle + high)
        plt.store(out_ref.at[at, part, column], total, mask=at < count_ref[0])

    return body


def _balanced(square: jax.Array, n: int, iterations: int, eps: float) -> jax.Array:
    """Returns exp(square) after the row and column steps (reference.sinkhorn).

    Args:
        square: float32 [r, side, side], of which n lines and columns count.
        n: streams.
        iterations: row and column steps.
        eps: added to every sum.
    """

    def present(b: jax.Array, other: float) -> jax.Array:
        if square.shape[1] == n:
            return b
        line, column = (lax.broadcasted_iota(jnp.int32, b.shape, axis) for axis in (1, 2))
        return jnp.where((line < n) & (column < n), b, other)

    def divided(b: jax.Array, axis: int, eps: float) -> jax.Array:
        return b * (1.0 / (jnp.sum(b, axis=axis, keepdims=True) + eps))

    def steps(_: jax.Array, b: jax.Array) -> jax.Array:
        return divided(divided(b, 2, eps), 1, eps)

    highest = jnp.max(present(square, -jnp.inf), axis=2, keepdims=True)
    rows = divided(present(jnp.exp(square - highest), 0.0), 2, 0.0)
    return lax.fori_loop(0, iterations - 1, steps, divided(present(rows + eps, 0.0), 1, eps))


def _balancing(
    config: MHCConfig,
    columns: _Columns,
    channels: int,
    iterations: int,
    eps: float,
    rms_eps: float,
) -> Callable[..., None]:
    """Returns the body that adds the parts of some rows and writes their coefficients."""
    n, side, rows = columns.n, columns.side, config.balance_rows

    def body(
        count_ref: Any, parts_ref: Any, scale_ref: Any, base_ref: Any, pre: Any, post: Any, out: Any
    ) -> None:
        row, column = _spread(_rows(rows), jnp.arange(columns.count, dtype=jnp.int32))
        inside = row < count_ref[0]
        sums = [
            plt.load(parts_ref.at[row, jnp.full_like(row, part), column], mask=inside, other=0.0)
            for part in range(parts_ref.shape[1])
        ]
        total = sum(sums[1:], sums[0])
        # one term is not zero
        square = jnp.sum(jnp.where(column == columns.square, total, 0.0), axis=1, keepdims=True)
        mixed = total * lax.rsqrt(square * (1.0 / channels) + rms_eps)
        line, has_line = columns.line_of(column)
        group = jnp.minimum(line // n, 2)
        scale = plt.load(scale_ref.at[group], mask=has_line, other=0.0)
        logits = mixed * scale + plt.load(base_ref.at[line], mask=has_line, other=0.0)

        gate = column - columns.gates
        for k, (ref, value) in enumerate(
            ((pre, _sigmoid(logits) + eps), (post, 2.0 * _sigmoid(logits)))
        ):
            mask = (gate >= k * n) & (gate < (k + 1) * n)
            plt.store(ref.at[row, _place(mask, gate - k * n, n)], value, mask=inside & mask)
        # the first of equal pieces
        matrix = jnp.split(logits, columns.count // side**2, axis=1)[0].reshape(rows, side, side)
        matrix = _balanced(matrix, n, iterations, eps).reshape(rows, side**2)
        row, entry = _spread(_rows(rows), jnp.arange(side**2, dtype=jnp.int32))
        i, j = entry // side, entry % side
        mask = (i < n) & (j < n)
        at = out.at[row, _place(mask, i * n + j, n * n)]
        plt.store(at, matrix, mask=(row < count_ref[0]) & mask)

    return body


def build(
    config: MHCConfig,
    *,
    streams: int,
    iterations: int,
    eps: float,
    rms_eps: float,
    interpret: bool = False,
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Outputs]:
    """Returns the kernels: (x [t, k], fn [n (n + 2), k], scale [3], base) -> outputs.

    Args:
        config: tiles and launch parameters.
        streams: n.
        iterations: row and column steps.
        eps: added to the gates of the inputs and to every sum.
        rms_eps: added to the mean square of a row.
        interpret: run by the plain Pallas interpreter on CPU.
    """
    n, columns = streams, _Columns(streams)

    def call(x: jax.Array, fn: jax.Array, scale: jax.Array, base: jax.Array) -> Outputs:
        rows, channels = x.shape
        parts = -(-channels // config.part)
        count = jnp.full((1,), rows, jnp.int32)
        partial = pl.pallas_call(
            _projection(config, columns, channels),
            out_shape=jax.ShapeDtypeStruct((rows, parts, columns.count), jnp.float32),
            grid=(-(-rows // config.rows), parts),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            name="mhc_pre_project",
        )(count, x, fn)
        pre, post, matrix = pl.pallas_call(
            _balancing(config, columns, channels, iterations, eps, rms_eps),
            out_shape=tuple(
                jax.ShapeDtypeStruct((rows, size), jnp.float32) for size in (n, n, n * n)
            ),
            grid=(-(-rows // config.balance_rows),),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=config.balance_warps, num_stages=1),
            name="mhc_pre_balance",
        )(count, partial, scale, base)
        return pre, post, matrix.reshape(rows, n, n)

    return call
