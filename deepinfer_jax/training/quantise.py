"""Storage quantisers of the checkpoint, and their straight-through form (model.md 2.6).

A weight that is stored in FP8 or FP4 is trained as float32 and used at its stored value: the
forward pass sees the round trip through the format, the backward pass the identity. The export
writes the codes of the same functions, so a checkpoint holds exactly what the forward pass used.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.spec import ParamSpec
from deepinfer_jax.numerics.formats import BLOCKS
from deepinfer_jax.numerics.straight_through import straight_through
from pallas_kernels import core
from pallas_kernels.core.codes import bits_float, float_bits

#: Smallest magnitude a block's scale is made for: keeps scales and their inverses normal numbers.
SMALLEST = 2.0**-100
_EXPONENT = np.uint32(0x7F800000)
#: Largest magnitude of a format as (exponent, mantissa bits): 448 = 1.75 * 2^8, 6 = 1.5 * 2^2.
_LARGEST = {"fp8": (8, 0x600000), "fp4": (2, 0x400000)}


def quantise(weight: Float[Array, "*s i"], format: str) -> core.QuantArray:
    """Returns the stored form of float32 weights in a quantised format of `ParamSpec`.

    Per block: scale = pow2ceil(max |w| / largest), code = nearest(w / scale), ties to even. Edge
    blocks hold what is there.
    """
    scale = _block_scales(weight, format)
    inverse = bits_float(np.uint32(254 << 23) - float_bits(scale))  # of a power of two
    scaled = weight * _spread(inverse, weight.shape, format)
    if format == "fp4_row32":
        payload = core.pack_nibbles(core.encode_e2m1(scaled))
    else:
        payload = core.encode_e4m3(jnp.clip(scaled, -448.0, 448.0))
    return core.QuantArray(payload, core.encode_e8m0(scale), format)


def stored_value(weight: Float[Array, "*s i"], spec: ParamSpec) -> Float[Array, "*s i"]:
    """Returns the float32 values that weights of a leaf have once stored."""
    if spec.format != "plain":
        return core.dequantize(quantise(weight, spec.format))
    return core.round_bf16(weight) if spec.dtype == "BF16" else weight


def trained_value(weight: Float[Array, "*s i"], spec: ParamSpec) -> Float[Array, "*s i"]:
    """Returns `stored_value`, with the derivative of the identity."""
    return straight_through(partial(stored_value, spec=spec), weight)


def quantised_params(params: Any, config: ModelConfig) -> Any:
    """Returns the tree with every leaf at its stored value, gradients passing straight through."""
    return map_specs(trained_value, params, config)


def map_specs(function: Any, params: Any, config: ModelConfig) -> Any:
    """Returns the tree of function(leaf, spec); the token map of the Engram stays in place."""
    specs = jax.tree.leaves(spec_tree(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([function(*pair) for pair in zip(leaves, specs, strict=True)])


def _block_scales(weight: Float[Array, "*s i"], format: str) -> Array:
    """Returns pow2ceil(max |w| / largest) of every block, by bit operations (exact)."""
    rows, channels = BLOCKS[format]
    size = jnp.abs(weight)
    pad = [(0, 0)] * (weight.ndim - 1) + [(0, -weight.shape[-1] % channels)]
    if rows > 1:
        pad[-2] = (0, -weight.shape[-2] % rows)
    size = jnp.pad(size, pad)
    size = size.reshape(*size.shape[:-1], -1, channels).max(axis=-1)
    if rows > 1:
        size = size.reshape(*size.shape[:-2], -1, rows, size.shape[-1]).max(axis=-2)
    bits = float_bits(jnp.maximum(size, np.float32(SMALLEST)))
    exponent, mantissa = _LARGEST[format[:3]]
    up = ((bits & np.uint32(0x007FFFFF)) > np.uint32(mantissa)).astype(jnp.uint32)
    return bits_float((bits & _EXPONENT) + (up << 23) - np.uint32(exponent << 23))


def _spread(scale: Array, shape: tuple[int, ...], format: str) -> Array:
    """Repeats block values over their blocks and cuts the last ones at the edges of `shape`."""
    rows, channels = BLOCKS[format]
    if rows > 1:
        scale = jnp.repeat(scale, rows, axis=-2)[..., : shape[-2], :]
    return jnp.repeat(scale, channels, axis=-1)[..., : shape[-1]]
