"""The products of `contract` for programs that run all rows at once: fixed blocks of rows.

The same products, with K in one piece: a GPU waits for launches, and a loop over K or over small
tiles has many. A block has `rows` rows, whatever the number of rows is; fewer are padded with
zeros. Barriers keep what stands around a product out of it, so that a block alone and one among
many are the same program. Rows and weights pass one together: XLA would join products of the same
rows into a wider one, which it cannot where blocks are many, and cuts K by a product's width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.contract import Weight
from pallas_kernels.core.quant_array import dequantize

#: Parts that stand one after the other in a program; more are a loop. On a GPU every step of a loop
#: is several launches more, and nothing is joined across its border in one graph.
MOST_PARTS = 8


def in_turn(fn: Callable[..., jax.Array], parts: tuple[jax.Array, ...]) -> jax.Array:
    """Returns fn of every part, stacked: fn gets a tuple of a[i] for arrays a [n, ...]."""
    count = parts[0].shape[0]
    if count > MOST_PARTS:
        return lax.map(fn, parts)
    return jnp.stack([fn(tuple(part[i] for part in parts)) for i in range(count)])


def _by_blocks(
    fn: Callable[..., jax.Array], weights: tuple[Any, ...], arrays: tuple[Any, ...], rows: int
) -> jax.Array:
    """Returns fn(*blocks, *weights) for blocks of `rows` rows of the arrays [m, ...], joined."""
    count = arrays[0].shape[0]
    blocks = -(-count // rows)
    weights = tuple(dequantize(weight) for weight in weights)

    def one(parts: tuple[jax.Array, ...]) -> jax.Array:
        parts = tuple(part.astype(jnp.float32) for part in parts)
        given = lax.optimization_barrier((*parts, *weights))
        return lax.optimization_barrier(fn(*given))

    def cut(a: jax.Array) -> jax.Array:
        padding = [(0, blocks * rows - count)] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, padding).reshape(blocks, rows, *a.shape[1:])

    parts = tuple(cut(a) for a in arrays)
    out = in_turn(one, parts)
    return out.reshape(blocks * rows, *out.shape[2:])[:count]


def _dot(spec: str) -> Callable[..., jax.Array]:
    return lambda x, w: jnp.einsum(spec, x, w, precision=lax.Precision.HIGHEST)


def contract(x: jax.Array, w: Weight, rows: int) -> jax.Array:
    """Returns x[m, k] @ w[n, k]^T as float32 [m, n]; rows: of a block, part of the arithmetic."""
    return _by_blocks(_dot("mk,nk->mn"), (w,), (x,), rows)


def contract_grouped(x: jax.Array, w: Weight, rows: int) -> jax.Array:
    """Returns, for every group, x[m, g, k] @ w[g, n, k]^T as float32 [m, g, n]."""
    return _by_blocks(_dot("mgk,gnk->mgn"), (w,), (x,), rows)


def contract_pairs(x: jax.Array, y: jax.Array, rows: int) -> jax.Array:
    """Returns every row's products x[m, h, k] . y[m, j, k] as float32 [m, h, j]."""
    return _by_blocks(_dot("mhk,mjk->mhj"), (), (x, y), rows)


def contract_values(p: jax.Array, y: jax.Array, rows: int) -> jax.Array:
    """Returns every row's weighted sum p[m, h, j] @ y[m, j, k] as float32 [m, h, k]."""
    return _by_blocks(_dot("mhj,mjk->mhk"), (), (p, y), rows)
