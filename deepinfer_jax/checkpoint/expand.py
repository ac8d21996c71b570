"""Expands stored number formats to float32, exactly (`numerics="float32"`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.numerics.formats import dequantize_host
from pallas_kernels.core.quant_array import QuantArray, dequantize


def expand_float32(params: Any) -> Any:
    """Returns the tree with quantised and BF16 leaves as float32 arrays, one leaf at a time.

    Every conversion is exact. Integer and float32 leaves and `HostTable` nodes stay as they are.
    """
    return jax.tree.map(_expand, params, is_leaf=lambda leaf: isinstance(leaf, QuantArray))


def _expand(leaf: Any) -> Any:
    stored = leaf.payload if isinstance(leaf, QuantArray) else leaf
    is_done = stored.dtype == jnp.float32 or not jnp.issubdtype(stored.dtype, jnp.floating)
    if is_done and not isinstance(leaf, QuantArray):
        return leaf
    if not stored.is_fully_addressable or len(stored.sharding.device_set) > 1:
        return _dequantize(leaf)  # shards stay where they are
    # One device: NumPy expands in milliseconds what XLA would first compile for every shape.
    if isinstance(leaf, QuantArray):
        payload, scale = np.asarray(leaf.payload), np.asarray(leaf.scale)
        values = dequantize_host(payload, scale, leaf.format)
    else:
        values = np.asarray(leaf).astype(np.float32)
    return jax.device_put(values, stored.sharding)


@jax.jit
def _dequantize(leaf: Any) -> jax.Array:
    return dequantize(leaf)
