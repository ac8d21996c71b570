"""RMSNorm with Q8 output as a Pallas-Triton kernel: one program a row, the row kept in registers.

The square sum follows ``core.tree_sum`` exactly: element i meets i + n/2, then i + n/4, and so on.
Chunks of a row are added whole; the last chunk is halved by sums over an axis of length two, whose
order no compiler can choose. The quantiser has core's bits (q8.py).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.core.pin import pin
from pallas_kernels.rms_norm_quant.configs import NormConfig
from pallas_kernels.rms_norm_quant.q8 import q8_codes, q8_scale

_GROUP = 32


def _halve(x: jax.Array) -> jax.Array:
    """Returns the halving sum of float32 [n], n a power of two, as [1]."""
    while x.shape[0] > 1:
        x = jnp.sum(x.reshape(2, x.shape[0] // 2), axis=0)
    return x


def _chunk_tree(chunks: list[jax.Array | None]) -> jax.Array:
    """Returns the halving sum of whole chunks; None stands for a chunk of zeros."""
    while len(chunks) > 1:
        half = len(chunks) // 2
        pairs = zip(chunks[:half], chunks[half:], strict=True)
        chunks = [a if b is None else a + b for a, b in pairs if a is not None]
        chunks += [None] * (half - len(chunks))
    [total] = chunks
    assert total is not None
    return total


def _other(mask: jax.Array | None) -> float | None:
    """Returns what a load puts into masked places, if it has any."""
    return None if mask is None else 0.0


def build(
    config: NormConfig, *, eps: float, interpret: bool = False
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Returns the kernel: x bfloat16 [m, d], weight [d] -> (row, codes, scale).

    row is bfloat16 [m, d], codes float8_e4m3fn [m, d], scale uint8 [m, d / 32].

    Args:
        config: launch parameters.
        eps: added to the mean square.
        interpret: run by the plain Pallas interpreter on CPU.
    """

    def body(x_ref: Any, gain_ref: Any, row_ref: Any, codes_ref: Any, scale_ref: Any) -> None:
        [channels] = x_ref.shape
        width = 1 << (channels - 1).bit_length()
        chunk = min(width, config.chunk)
        lane = jnp.arange(chunk, dtype=jnp.int32)
        groups = jnp.arange(chunk // _GROUP, dtype=jnp.int32)
        starts = range(0, channels, chunk)

        def inside(place: jax.Array, start: int, size: int) -> jax.Array | None:
            return None if start + chunk <= channels else place < size

        parts = []
        for start in starts:
            mask = inside(start + lane, start, channels)
            part = plt.load(x_ref.at[start + lane], mask=mask, other=_other(mask))
            parts.append(part.astype(jnp.float32))
        squares: list[jax.Array | None] = [part * part for part in parts]
        mean = pin(
            _halve(_chunk_tree(squares + [None] * (width // chunk - len(parts))))
            * np.float32(1.0 / channels)
        )
        scale = lax.rsqrt(mean + np.float32(eps))
        for start, part in zip(starts, parts, strict=True):
            mask = inside(start + lane, start, channels)
            gain = plt.load(gain_ref.at[start + lane], mask=mask, other=_other(mask))
            row = (gain.astype(jnp.float32) * (part * scale)).astype(jnp.bfloat16)
            grouped = row.astype(jnp.float32).reshape(chunk // _GROUP, _GROUP)
            power, inverse = q8_scale(jnp.max(jnp.abs(grouped), axis=1))
            codes = q8_codes(grouped, inverse[:, None]).reshape(chunk)
            plt.store(codes_ref.at[start + lane], codes, mask=mask)
            exponents = lax.bitcast_convert_type(power, jnp.int32) >> 23
            place = start // _GROUP + groups
            plt.store(
                scale_ref.at[place],
                exponents.astype(jnp.uint8),
                mask=inside(place, start, channels // _GROUP),
            )
            plt.store(row_ref.at[start + lane], row, mask=mask)

    def call(x: jax.Array, gain: jax.Array) -> tuple[jax.Array, ...]:
        rows, channels = x.shape
        out = (
            jax.ShapeDtypeStruct((rows, channels), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, channels), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows, channels // _GROUP), jnp.uint8),
        )

        def row_spec(last: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, last), lambda i: (i, 0))

        return pl.pallas_call(
            body,
            out_shape=out,
            grid=(rows,),
            in_specs=[row_spec(channels), pl.BlockSpec((channels,), lambda i: (0,))],
            out_specs=tuple(row_spec(o.shape[1]) for o in out),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=1),
            name="rms_norm_quant",
        )(x, gain)

    return call
