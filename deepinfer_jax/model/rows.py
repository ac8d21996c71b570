"""Stored forms of cache rows (model.md 4.1): float32 values, or the checkpoint's bytes."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.numerics.straight_through import straight_through
from pallas_kernels import core


def _rounded(config: ModelConfig) -> bool:
    return config.execution.numerics == "checkpoint"


def _faked(config: ModelConfig) -> bool:
    """Says whether rows are kept as float32 at the values that their bytes would have."""
    return config.execution.numerics == "training"


def window_row(config: ModelConfig) -> tuple[int, jnp.dtype]:
    """Returns width and dtype of a window row: D values, or D codes followed by D/32 exponents."""
    dim = config.attention.head_dim
    return (
        (dim + dim // 32, jnp.dtype("uint8")) if _rounded(config) else (dim, jnp.dtype("float32"))
    )


def main_row(config: ModelConfig) -> tuple[int, jnp.dtype]:
    """Returns width and dtype of a compressed row: FP4 (D/2 + D/16 bytes) or the window format."""
    dim = config.attention.head_dim
    if _rounded(config) and config.attention.use_fp4_sparse_kv:
        return dim // 2 + dim // 16, jnp.dtype("uint8")
    return window_row(config)


def index_row(config: ModelConfig) -> tuple[tuple[int, jnp.dtype], int]:
    """Returns ((width, dtype), scale width) of an index key; scale width 0 in float32."""
    dim = config.indexer.index_head_dim
    if _rounded(config):
        return (dim // 2, jnp.dtype("uint8")), dim // 32
    return (dim, jnp.dtype("float32")), 0


def encode_window(config: ModelConfig, row: Float[Array, "*b c"]) -> Shaped[Array, "*b w"]:
    """Returns the stored form of window rows."""
    if _faked(config):
        return straight_through(core.fake_q8, row)
    if not _rounded(config):
        return row
    return jnp.concatenate(core.quantize_q8(row), axis=-1)


def decode_window(config: ModelConfig, stored: Shaped[Array, "*b w"]) -> Float[Array, "*b c"]:
    """Returns the values of stored window rows."""
    if not _rounded(config):
        return stored
    dim = config.attention.head_dim
    return core.dequantize_q8(stored[..., :dim], stored[..., dim:])


def encode_main(config: ModelConfig, row: Float[Array, "*b c"]) -> Shaped[Array, "*b w"]:
    """Returns the stored form of compressed rows."""
    if _faked(config) and config.attention.use_fp4_sparse_kv:
        return straight_through(core.fake_q4n, row)
    if _rounded(config) and config.attention.use_fp4_sparse_kv:
        return jnp.concatenate(core.quantize_q4n(row), axis=-1)
    return encode_window(config, row)


def decode_main(config: ModelConfig, stored: Shaped[Array, "*b w"]) -> Float[Array, "*b c"]:
    """Returns the values of stored compressed rows."""
    if _rounded(config) and config.attention.use_fp4_sparse_kv:
        half = config.attention.head_dim // 2
        return core.dequantize_q4n(stored[..., :half], stored[..., half:])
    return decode_window(config, stored)


def encode_index(
    config: ModelConfig, key: Float[Array, "*b c"]
) -> tuple[Shaped[Array, "*b w"], Array | None]:
    """Returns data and scales of index keys; scales None in float32."""
    if _faked(config):
        return straight_through(core.fake_q4m, key), None
    if not _rounded(config):
        return key, None
    return core.quantize_q4m(key)


def decode_index(
    config: ModelConfig, data: Shaped[Array, "*b w"], scale: Array | None
) -> Float[Array, "*b c"]:
    """Returns the values of stored index keys."""
    return data if scale is None else core.dequantize_q4m(data, scale)
