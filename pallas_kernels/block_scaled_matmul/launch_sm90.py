"""From the op's arrays to the Hopper bodies: exact decoding, padding, the choice of a tile.

The choice between the body for few tokens and the one for many does not change a bit of a row:
both multiply the same bfloat16 values and add them in the same order (tests, and on the H200 the
row-bits table of benchmarks/results).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import core
from pallas_kernels._mosaic import H200_SMS, round_up
from pallas_kernels.block_scaled_matmul import configs
from pallas_kernels.block_scaled_matmul.decode_sm90 import matmul_decode
from pallas_kernels.block_scaled_matmul.pallas_sm90 import matmul_bf16, matmul_fp8
from pallas_kernels.core.codes import as_bytes

INTERPRETED_SMS = 2
LANES = 8  # TMA of a swizzled tile: rows of an array come in eights
_E4M3 = jnp.float8_e4m3fn


def _sms(interpret: bool) -> int:
    return INTERPRETED_SMS if interpret else H200_SMS


def _pad(x: jax.Array, *multiples: int) -> jax.Array:
    """Pads trailing axes with zeros to multiples; nothing is copied where they are already."""
    lead = [(0, 0)] * (x.ndim - len(multiples))
    sizes = x.shape[x.ndim - len(multiples) :]
    widths = [(0, round_up(s, m) - s) for s, m in zip(sizes, multiples, strict=True)]
    return jnp.pad(x, [*lead, *widths]) if any(high for _, high in widths) else x


def _as_e4m3(codes: jax.Array) -> jax.Array:
    return codes if codes.dtype == _E4M3 else lax.bitcast_convert_type(codes, _E4M3)


def _scale_words(scale: jax.Array) -> jax.Array:
    """Returns E8M0 bytes [n / 32, k / 32] as int32 [k / 128, n / 32], four of K a word."""
    scale = _pad(as_bytes(scale), 4, 4)
    words = scale.reshape(scale.shape[0], -1, 4)
    return lax.bitcast_convert_type(words, jnp.int32).T


def block_scaled(x: jax.Array, w: core.QuantArray, interpret: bool = False) -> jax.Array:
    """Returns x[m, k] @ w[n, k]^T as bfloat16 [m, n] for 32x32 blocks (P1, exact operands).

    Args:
        x: Q8 values, decoded to bfloat16.
        w: "fp8_block32".
        interpret: run by the CPU interpreter.
    """
    rows, n = x.shape[0], w.payload.shape[0]
    if rows > configs.FEW_TOKENS:
        # decoded once a call, exactly: two bytes a weight for thousands of tokens
        decoded = core.dequantize(w).astype(jnp.bfloat16)
        return bf16(x, decoded, jnp.bfloat16, interpret, name="block_scaled_matmul_sm90")
    x = _pad(x, LANES, 128)
    tile = configs.decode_tile(n, x.shape[1], rows)
    out = matmul_decode(
        x,
        _pad(_as_e4m3(w.payload), LANES, 128),
        _scale_words(w.scale),
        tile,
        interpret=interpret,
        num_sms=_sms(interpret),
    )
    return out[:rows, :n]


def bf16(
    x: jax.Array,
    w: jax.Array,
    out_dtype: Any,
    interpret: bool = False,
    name: str = "matmul_bf16_sm90",
) -> jax.Array:
    """Returns x[m, k] @ w[n, k]^T, or one product per group of x[m, g, k] and w[g, n, k]."""
    if w.ndim == 2:
        x, w = x[:, None], w[None]
        return bf16(x, w, out_dtype, interpret, name)[:, 0]
    rows, groups, n = x.shape[0], w.shape[0], w.shape[1]
    tile = configs.bf16_tile(n, rows, jnp.dtype(out_dtype).itemsize, groups > 1)
    x = _pad(jnp.pad(x, [(0, -rows % LANES), (0, 0), (0, 0)]), tile.depth)
    w = _pad(w, tile.cols if groups > 1 else LANES, tile.depth)
    width = w.shape[1]
    out = matmul_bf16(
        x.reshape(x.shape[0], -1),
        w.reshape(groups * width, -1),
        tile,
        out_dtype,
        groups,
        interpret=interpret,
        num_sms=_sms(interpret),
        name=name,
    )
    return out.reshape(-1, groups, width)[:rows, :, :n]


def fp8_block128(
    x_codes: jax.Array,
    x_scale: jax.Array,
    w_codes: jax.Array,
    w_scale: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product with 1x128 by 128x128 float32 scales as bfloat16 [m, n] (P2)."""
    rows, n = x_codes.shape[0], w_codes.shape[0]
    tile = configs.fp8_tile(rows)
    out = matmul_fp8(
        _pad(_as_e4m3(x_codes), LANES, 1),
        _pad(x_scale.T, 4),
        _pad(_as_e4m3(w_codes), LANES, 1),
        _pad(w_scale.T, 4),
        tile,
        interpret=interpret,
        num_sms=_sms(interpret),
    )
    return out[:rows, :n]
