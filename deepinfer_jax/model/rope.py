"""Rotary embedding on interleaved pairs of the last channels (model.md 3.4)."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.config.model import AttentionConfig


def inverse_frequencies(attention: AttentionConfig, *, yarn: bool) -> np.ndarray:
    """Returns float32 [r/2] frequencies: plain `rope_theta`, or `compress_rope_theta` with YaRN.

    YaRN edges follow model.md 9.8 (needed by small configs). No amplitude factor.
    """
    dim, one = attention.qk_rope_head_dim, np.float32(1)
    base = attention.compress_rope_theta if yarn else attention.rope_theta
    # The float32 steps of the released code: a frequency one ulp off moves cos by 1e-5 at p = 1000.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequency = one / (base ** exponent.astype(np.float64)).astype(np.float32)
    if not yarn:
        return frequency
    scaling = attention.rope_scaling

    def correction(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    place = np.arange(dim // 2, dtype=np.float32) - np.float32(low)
    ramp = np.clip(place / np.float32(max(high - low, 1e-3)), np.float32(0), one)
    return frequency / np.float32(scaling.factor) * ramp + frequency * (one - ramp)


def rope_frequencies(attention: AttentionConfig) -> Float[Array, "2 r2"]:
    """Returns both frequency rows: [0] plain, [1] YaRN."""
    return jnp.asarray(np.stack([inverse_frequencies(attention, yarn=y) for y in (False, True)]))


def rope_tables(
    position: Int[Array, " t"], frequency: Float[Array, " r2"]
) -> tuple[Float[Array, "t r2"], Float[Array, "t r2"]]:
    """Returns cos and sin of `position * frequency`, the product formed in float32."""
    angle = position.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x: Float[Array, "t *h c"],
    cos: Float[Array, "t r2"],
    sin: Float[Array, "t r2"],
    *,
    inverse: bool = False,
) -> Float[Array, "t *h c"]:
    """Rotates pairs (x[2i], x[2i+1]) of the last 2*r2 channels; float32, not rounded."""
    width = 2 * cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    if inverse:
        sin = -sin
    kept, turned = x[..., :-width], x[..., -width:]
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return jnp.concatenate([kept, rotated.reshape(turned.shape)], axis=-1)
