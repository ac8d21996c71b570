"""Contractions whose row bits do not depend on the other rows: fixed tiles, K folded in order.

Every product accumulates in float32 at HIGHEST precision and comes back as float32; the caller
rounds. Weights are output-major, as in the checkpoint. Supports every determinism level; the
level "off" uses ``stock``. Reverse-mode differentiable in plain float operands (trip counts are
static).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.quant_array import QuantArray, dequantize, slice_channels
from pallas_kernels.core.tiles import K_CHUNK, ROW_TILE, map_row_tiles
from pallas_kernels.errors import KernelError

Weight = QuantArray | jax.Array


def _dot(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, w, precision=lax.Precision.HIGHEST)


def _fold(spec: str, x: jax.Array, w: Weight) -> jax.Array:
    """Returns einsum(spec, x, w) over their common last axis, in ascending chunks of K_CHUNK."""
    size = x.shape[-1]
    whole = size // K_CHUNK

    def part(start: int | jax.Array, length: int) -> jax.Array:
        left = lax.dynamic_slice_in_dim(x, start, length, axis=-1).astype(jnp.float32)
        return _dot(spec, left, dequantize(slice_channels(w, start, length)))

    if size <= K_CHUNK:
        return _dot(spec, x.astype(jnp.float32), dequantize(w))
    total = part(0, K_CHUNK)
    if whole > 1:
        total = lax.fori_loop(1, whole, lambda c, acc: acc + part(c * K_CHUNK, K_CHUNK), total)
    if size % K_CHUNK:
        total = total + part(whole * K_CHUNK, size % K_CHUNK)
    return total


def _check(name: str, x: jax.Array, w: Weight, x_rule: str, w_rule: str, agree: bool) -> None:
    ranks = (len(x_rule.split()), len(w_rule.split()))
    if (x.ndim, w.ndim) != ranks or not agree:
        raise KernelError(
            f"{name} needs [{x_rule}] and [{w_rule}], got shapes {x.shape} and {w.shape}"
        )


def contract(x: jax.Array, w: Weight, tile: int = ROW_TILE) -> jax.Array:
    """Returns x[m, k] @ w[n, k]^T as float32 [m, n].

    Args:
        x: [m, k] of any float dtype.
        w: [n, k] of any float dtype, or a QuantArray (dequantised inside the tile body).
        tile: rows of a tile; part of the arithmetic.

    Raises:
        KernelError: shapes do not fit.
    """
    agree = x.ndim == w.ndim == 2 and x.shape[1] == w.shape[1]
    _check("contract", x, w, "m k", "n k", agree)
    return map_row_tiles(lambda rows: _fold("mk,nk->mn", rows, w), x, tile=tile)


def contract_grouped(x: jax.Array, w: Weight, tile: int = ROW_TILE) -> jax.Array:
    """Returns, for every group, x[m, g, k] @ w[g, n, k]^T as float32 [m, g, n].

    Args:
        x: [m, g, k] of any float dtype.
        w: [g, n, k] of any float dtype, or a QuantArray.
        tile: rows of a tile; part of the arithmetic.

    Raises:
        KernelError: shapes do not fit.
    """
    agree = x.ndim == w.ndim == 3 and x.shape[1:] == (w.shape[0], w.shape[2])
    _check("contract_grouped", x, w, "m g k", "g n k", agree)
    return map_row_tiles(lambda rows: _fold("mgk,gnk->mgn", rows, w), x, tile=tile)


def contract_pairs(x: jax.Array, y: jax.Array, tile: int = ROW_TILE) -> jax.Array:
    """Returns every row's products x[m, h, k] . y[m, j, k] as float32 [m, h, j].

    Args:
        x: [m, h, k] of any float dtype (queries of a row).
        y: [m, j, k] of any float dtype (keys of the same row).
        tile: rows of a tile; part of the arithmetic.

    Raises:
        KernelError: shapes do not fit.
    """
    agree = x.ndim == y.ndim == 3 and (x.shape[0], x.shape[2]) == (y.shape[0], y.shape[2])
    _check("contract_pairs", x, y, "m h k", "m j k", agree)
    return map_row_tiles(lambda a, b: _fold("mhk,mjk->mhj", a, b), x, y, tile=tile)


def contract_values(p: jax.Array, y: jax.Array, tile: int = ROW_TILE) -> jax.Array:
    """Returns every row's weighted sum p[m, h, j] @ y[m, j, k] as float32 [m, h, k].

    Args:
        p: [m, h, j] of any float dtype (weights; j a few hundred at most, summed in one dot).
        y: [m, j, k] of any float dtype. Rows with p = 0 must still be finite (0 * inf is NaN).
        tile: rows of a tile; part of the arithmetic.

    Raises:
        KernelError: shapes do not fit.
    """
    agree = p.ndim == y.ndim == 3 and (p.shape[0], p.shape[2]) == (y.shape[0], y.shape[1])
    _check("contract_values", p, y, "m h j", "m j k", agree)

    def body(a: jax.Array, b: jax.Array) -> jax.Array:
        return _dot("mhj,mjk->mhk", a.astype(jnp.float32), b.astype(jnp.float32))

    return map_row_tiles(body, p, y, tile=tile)
