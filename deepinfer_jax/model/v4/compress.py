"""Compressed rows and index keys of DeepSeek-V4: gated pooling over 4 or 128 tokens (model.md 5.3,
10.4).
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from deepinfer_jax.model.params_v4 import V4CompressorParams
from deepinfer_jax.model.rope import apply_rope, rope_tables
from deepinfer_jax.numerics.ops import Ops


def pooled_tokens(ratio: int) -> int:
    """Returns how many tokens one entry pools: at ratio 4 also the window before."""
    return 2 * ratio if ratio == 4 else ratio


def pooled_positions(position: Int[Array, " t"], ratio: int) -> Int[Array, "t s"]:
    """Returns the token positions that the entry of each row pools, ascending.

    Those of the first window before are negative.
    """
    count = pooled_tokens(ratio)
    end = (position // ratio + 1) * ratio
    return (end - count)[:, None] + jnp.arange(count, dtype=jnp.int32)


def project(ops: Ops, params: V4CompressorParams, v: Float[Array, "t d"]) -> Float[Array, "t 2 w"]:
    """Returns (gate before ape, value) of every token: a row of the compressor tail."""
    return jnp.stack([ops.contract(v, params.wgate), ops.contract(v, params.wkv)], axis=1)


def pool(
    ops: Ops,
    params: V4CompressorParams,
    eps: float,
    tokens: Float[Array, "t s 2 w"],
    present: Bool[Array, "t s"],
) -> Float[Array, "t c"]:
    """Returns the entry of every row: per-channel softmax over its tokens, weighted sum, norm.

    tokens: tail rows in ascending position. At ratio 4 the window before gives its half A, the
    window itself its half B. present: tokens that exist; the others have weight 0.
    """
    ratio, dim = params.ape.shape[0], params.norm.shape[0]
    gates, values = [], []
    for half in range(tokens.shape[3] // dim):
        channels = slice(half * dim, (half + 1) * dim)
        part = tokens[:, half * ratio : (half + 1) * ratio, :, channels]
        gates.append(part[:, :, 0] + params.ape[:, channels])
        values.append(part[:, :, 1])
    gate = jnp.where(present[:, :, None], jnp.concatenate(gates, axis=1), -jnp.inf)
    value = jnp.where(present[:, :, None], jnp.concatenate(values, axis=1), 0.0)
    weight = jnp.exp(gate - gate.max(axis=1, keepdims=True))
    weight = weight / _sum_tokens(ops, weight)[:, None]
    return ops.norm(_sum_tokens(ops, weight * value), params.norm, eps)


def _sum_tokens(ops: Ops, x: Float[Array, "t s c"]) -> Float[Array, "t c"]:
    return ops.tree_sum(x.swapaxes(1, 2))  # 128 terms: too many to fold


def rotate(
    entry: Float[Array, "t c"],
    position: Int[Array, " t"],
    ratio: int,
    frequency: Float[Array, " r2"],
) -> Float[Array, "t c"]:
    """Returns pooled entries rotated at the first position of their window."""
    return apply_rope(entry, *rope_tables(position // ratio * ratio, frequency))
