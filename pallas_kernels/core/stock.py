"""The same operations as stock XLA, for determinism "off": no tiles, no fixed order, no promise.

Signatures, dtypes and edge cases are those of ``contract``, ``reduce`` and ``combine``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.quant_array import QuantArray, dequantize

Weight = QuantArray | jax.Array
#: Products of float32 values in float32, whatever the backend would rather do.
EXACT = lax.Precision.HIGHEST


def _einsum(spec: str, x: jax.Array, w: Weight, precision: lax.Precision) -> jax.Array:
    return jnp.einsum(spec, dequantize(x), dequantize(w), precision=precision)


def contract(x: jax.Array, w: Weight, precision: lax.Precision = EXACT) -> jax.Array:
    """Returns x[m, k] @ w[n, k]^T as float32 [m, n]."""
    return _einsum("mk,nk->mn", x, w, precision)


def contract_grouped(x: jax.Array, w: Weight, precision: lax.Precision = EXACT) -> jax.Array:
    """Returns x[m, g, k] @ w[g, n, k]^T by group as float32 [m, g, n]."""
    return _einsum("mgk,gnk->mgn", x, w, precision)


def contract_pairs(x: jax.Array, y: jax.Array, precision: lax.Precision = EXACT) -> jax.Array:
    """Returns x[m, h, k] . y[m, j, k] as float32 [m, h, j]."""
    return _einsum("mhk,mjk->mhj", x, y, precision)


def contract_values(p: jax.Array, y: jax.Array, precision: lax.Precision = EXACT) -> jax.Array:
    """Returns p[m, h, j] @ y[m, j, k] as float32 [m, h, k]."""
    return _einsum("mhj,mjk->mhk", p, y, precision)


def tree_sum(x: jax.Array, axis: int = -1) -> jax.Array:
    """Returns the float32 sum over ``axis``."""
    return jnp.sum(jnp.asarray(x).astype(jnp.float32), axis=axis)


def fold_sum(x: jax.Array, axis: int) -> jax.Array:
    """Returns the float32 sum over ``axis``."""
    return tree_sum(x, axis)


def mean_square(x: jax.Array) -> jax.Array:
    """Returns mean(x^2) over the last axis as float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)


def rms_scale(x: jax.Array, eps: float) -> jax.Array:
    """Returns rsqrt(mean(x^2) + eps) over the last axis as float32."""
    return lax.rsqrt(mean_square(x) + np.float32(eps))


def rms_norm(x: jax.Array, w: jax.Array, eps: float) -> jax.Array:
    """Returns w * (x * rsqrt(mean(x^2) + eps)) as float32."""
    return jnp.asarray(w).astype(jnp.float32) * (
        x.astype(jnp.float32) * rms_scale(x, eps)[..., None]
    )


def _shifted(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    top = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    return x - top, top[..., 0], jnp.sum(jnp.exp(x - top), axis=-1)


def softmax(x: jax.Array) -> jax.Array:
    """Returns softmax over the last axis as float32; rows of -inf give zeros."""
    shifted, _, total = _shifted(x)
    return jnp.exp(shifted) / jnp.where(total == 0, np.float32(1), total)[..., None]


def log_softmax(x: jax.Array) -> jax.Array:
    """Returns log softmax over the last axis as float32; rows of -inf stay -inf."""
    shifted, _, total = _shifted(x)
    return shifted - jnp.log(jnp.where(total == 0, np.float32(1), total))[..., None]


def logsumexp(x: jax.Array) -> jax.Array:
    """Returns log sum exp over the last axis as float32; rows of -inf give -inf."""
    _, top, total = _shifted(x)
    safe = jnp.where(total == 0, np.float32(1), total)
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


def combine(expert_out: jax.Array, shared: jax.Array | None) -> jax.Array:
    """Returns the sum over expert slots plus the shared expert as float32 [m, d]."""
    total = jnp.sum(expert_out.astype(jnp.float32), axis=1)
    return total if shared is None else total + shared.astype(jnp.float32)
