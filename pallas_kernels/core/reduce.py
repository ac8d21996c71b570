"""Sums, norms and softmax with a fixed order, as whole-row bodies inside row tiles.

``tree_sum`` and ``fold_sum`` are float32 additions of pinned terms in a stated order, so their
bits are fixed by IEEE arithmetic and need no tiles. The others also hold transcendentals, whose
bits depend on the loop the compiler builds (determinism.md 5.1), and therefore run in tiles of
rows: axis 0 is the row axis, the last axis the one that is reduced, axes between them are free.
Results are float32. Supports every determinism level; the level "off" uses ``stock``.

Measured on jax 0.11.2, x86: inside a tile (called with exactly 8 rows, in a loop body or alone,
with producers and consumers around it) every function here has the bits of the tiled call. Before
terms were pinned, an eager call with 8 rows differed in rms_norm, rms_scale and mean_square: op by
op x * x is rounded before the addition, inside a fusion it was contracted.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.pin import pin
from pallas_kernels.core.tiles import ROW_TILE, map_row_tiles
from pallas_kernels.errors import KernelError

MAX_FOLD = 64


def tree_sum(x: jax.Array, axis: int = -1) -> jax.Array:
    """Returns the float32 sum over ``axis`` by halving: pad with zeros to 2^j, add the two halves.

    Element i meets i + n/2, then i + n/4, and so on; the order depends on the length only.
    """
    x = pin(jnp.moveaxis(jnp.asarray(x).astype(jnp.float32), axis, -1))
    size = x.shape[-1]
    if size == 0:
        return jnp.zeros(x.shape[:-1], jnp.float32)
    width = 1 << (size - 1).bit_length()
    if width != size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - size)])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def fold_sum(x: jax.Array, axis: int) -> jax.Array:
    """Returns ((x0 + x1) + x2) + ... over a short ``axis`` (at most 64), as float32.

    Raises:
        KernelError: the axis is longer than 64.
    """
    x = pin(jnp.asarray(x).astype(jnp.float32))
    axis = axis % x.ndim
    size = x.shape[axis]
    if size > MAX_FOLD:
        raise KernelError(f"fold_sum unrolls at most {MAX_FOLD} terms, got {size}")
    if size == 0:
        return jnp.zeros((*x.shape[:axis], *x.shape[axis + 1 :]), jnp.float32)
    # Slices where they lie: with the axis moved to the front first, a transposed copy is made.
    total = lax.index_in_dim(x, 0, axis, keepdims=False)
    for index in range(1, size):
        total = total + lax.index_in_dim(x, index, axis, keepdims=False)
    return total


def _mean_square(x: jax.Array) -> jax.Array:
    # times the reciprocal, as XLA would rewrite the division under jit but not in eager mode;
    # pinned against contraction with the + eps that follows
    return pin(tree_sum(x * x) * np.float32(1.0 / x.shape[-1]))


def mean_square(x: jax.Array) -> jax.Array:
    """Returns mean(x^2) over the last axis: x[m, ..., c] -> float32 [m, ...]; row-tiled."""
    return map_row_tiles(lambda rows: _mean_square(rows.astype(jnp.float32)), x)


def rms_scale(x: jax.Array, eps: float, tile: int = ROW_TILE) -> jax.Array:
    """Returns rsqrt(mean(x^2) + eps) over the last axis: x[m, ..., c] -> float32 [m, ...].

    tile: rows of a tile.
    """

    def body(rows: jax.Array) -> jax.Array:
        return lax.rsqrt(_mean_square(rows.astype(jnp.float32)) + np.float32(eps))

    return map_row_tiles(body, x, tile=tile)


def rms_norm(x: jax.Array, w: jax.Array, eps: float, tile: int = ROW_TILE) -> jax.Array:
    """Returns w * (x * rsqrt(mean(x^2) + eps)) in float32 without rounding (the caller rounds).

    Args:
        x: [m, ..., c] of any float dtype.
        w: [c] of any float dtype.
        eps: added to the mean square (1e-20 in the text network, 1e-6 in the vision tower).
        tile: rows of a tile.

    Returns:
        float32 [m, ..., c]; the whole norm is one row-tile body.
    """
    gain = jnp.asarray(w).astype(jnp.float32)

    def body(rows: jax.Array) -> jax.Array:
        rows = rows.astype(jnp.float32)
        scale = lax.rsqrt(_mean_square(rows) + np.float32(eps))
        return gain * (rows * scale[..., None])

    return map_row_tiles(body, x, tile=tile)


def _shifted(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (x - max, max, sum of exp(x - max)); a row of -inf uses max 0 and sums to 0."""
    x = pin(x.astype(jnp.float32))  # the caller's scale must not contract with the subtraction
    top = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    shifted = x - top
    return shifted, top[..., 0], tree_sum(jnp.exp(shifted))


def softmax(x: jax.Array) -> jax.Array:
    """Returns softmax over the last axis of x[m, ..., c] as float32; rows of -inf give zeros."""

    def body(rows: jax.Array) -> jax.Array:
        shifted, _, total = _shifted(rows)
        return jnp.exp(shifted) / jnp.where(total == 0, np.float32(1), total)[..., None]

    return map_row_tiles(body, x)


def log_softmax(x: jax.Array) -> jax.Array:
    """Returns log softmax over the last axis of x[m, ..., c]; rows of -inf stay -inf, no NaN."""

    def body(rows: jax.Array) -> jax.Array:
        shifted, _, total = _shifted(rows)
        return shifted - pin(jnp.log(jnp.where(total == 0, np.float32(1), total)))[..., None]

    return map_row_tiles(body, x)


def logsumexp(x: jax.Array) -> jax.Array:
    """Returns log sum exp over the last axis, x[m, ..., c] -> float32 [m, ...]; -inf rows -inf."""

    def body(rows: jax.Array) -> jax.Array:
        _, top, total = _shifted(rows)
        safe = jnp.where(total == 0, np.float32(1), total)
        return jnp.where(total == 0, -jnp.inf, top + pin(jnp.log(safe)))

    return map_row_tiles(body, x)
