"""Number formats of the checkpoint on the host, in NumPy; every conversion is exact (model.md 2.6).

The functions use tables and products with powers of two, so they agree bit for bit with the
device forms of `pallas_kernels.core`. `lookup_fp8` only moves bits: XLA runs host callbacks in
threads that flush subnormal numbers.
"""

import ml_dtypes
import numpy as np

#: Value of every E8M0 byte: 2^(byte - 127); 255 is NaN.
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
#: Value of every E4M3 byte.
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
#: Value of every E2M1 code: a sign and eight magnitudes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
#: Values of both codes of a byte, low nibble (even channel) first.
_E2M1_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=-1)

with np.errstate(over="ignore", invalid="ignore"):
    _SCALED_E4M3 = E8M0[:, None] * E4M3

#: Rows and channels that share one scale.
BLOCKS = {
    "fp8_block32": (32, 32),
    "fp8_block128": (128, 128),
    "fp8_row32": (1, 32),
    "fp4_row32": (1, 32),
}


def dequantize_host(payload: np.ndarray, scale: np.ndarray, format: str) -> np.ndarray:
    """Returns the float32 values of a quantised array; leading axes stack independent arrays.

    Args:
        payload: Codes in their stored layout, one byte each (FP4: two codes a byte).
        scale: E8M0 bytes, one per block.
        format: A quantised format of `ParamSpec`.
    """
    codes = payload.view(np.uint8)
    if format == "fp4_row32":
        values = _E2M1_PAIRS[codes].reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    else:
        values = E4M3[codes]
    rows, channels = BLOCKS[format]
    factors = np.repeat(E8M0[scale.view(np.uint8)], channels, axis=-1)[..., : values.shape[-1]]
    if rows > 1:
        factors = np.repeat(factors, rows, axis=-2)[..., : values.shape[-2], :]
    with np.errstate(over="ignore", invalid="ignore"):
        values *= factors
    return values


def lookup_fp8(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns float32 values of E4M3 rows with one scale per 32 channels, without arithmetic."""
    groups = codes.view(np.uint8).reshape(*scale.shape, 32)
    return _SCALED_E4M3[scale[..., None], groups].reshape(codes.shape)
