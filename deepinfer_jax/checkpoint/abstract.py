"""Parameter trees without data, for shapes, memory plans and `jax.eval_shape`."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.engram.vocabulary import TokenMap
from deepinfer_jax.model.spec import ParamSpec
from pallas_kernels.core import QuantArray

_DTYPES = {
    "BF16": jnp.bfloat16,
    "F32": jnp.float32,
    "F8_E4M3": jnp.float8_e4m3fn,
    "I8": jnp.uint8,  # two FP4 codes a byte
    "I64": jnp.int32,
}


def abstract_params(config: ModelConfig) -> Any:
    """Returns the tree `load_params` would return, its arrays as `jax.ShapeDtypeStruct`.

    The token map is a stand-in of the right length: shapes do not depend on it.
    """
    tree = jax.tree.map(
        abstract_leaf, spec_tree(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    if getattr(tree, "engram", None) is None:
        return tree
    stand_in = TokenMap(np.zeros((config.vocab_size,), np.int32))
    return replace(tree, engram=replace(tree.engram, token_map=stand_in))


def abstract_leaf(spec: ParamSpec) -> jax.ShapeDtypeStruct | QuantArray:
    """Returns the shape and dtype of one loaded leaf."""
    if spec.load_as_bf16:
        return jax.ShapeDtypeStruct((*spec.stack, *spec.shape), jnp.bfloat16)
    payload = jax.ShapeDtypeStruct((*spec.stack, *spec.payload_shape), _DTYPES[spec.dtype])
    if spec.scale_shape is None:
        return payload
    scale = jax.ShapeDtypeStruct((*spec.stack, *spec.scale_shape), jnp.uint8)
    return QuantArray(payload, scale, spec.format)
