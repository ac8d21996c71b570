"""Random weights in the stored formats, for measurements and tests without a checkpoint."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.model import ModelConfig

#: Stored exponents (2^(byte - 127)) with which products of normal rows stay near one.
EXPERT_SCALE, DENSE_SCALE = 119, 121


def random_params(config: ModelConfig, seed: int) -> Any:
    """Returns the tree `load_params` would return, with seeded values that keep rows near one.

    Every leaf is a function of the seed and its place in the tree. The token map is a stand-in, and
    outputs mean nothing; formats, shapes and costs are those of a checkpoint.

    Args:
        config: of the model.
        seed: an integer from 0, below 2^32.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    root = jax.random.key(seed, impl="rbg")
    found = []
    for place, (path, spec) in enumerate(leaves):
        if isinstance(spec, np.ndarray):  # the token map
            found.append(spec)
            continue
        key = jax.random.fold_in(root, place)
        name = jax.tree_util.keystr(path)
        found.append(jax.jit(lambda key, n=name, s=spec: _draw(n, s, key))(key))
    return jax.tree.unflatten(tree, found)


def _draw(name: str, spec: jax.ShapeDtypeStruct, key: Array) -> Array:
    if spec.dtype == jnp.uint8:
        if "scale" in name:
            return jnp.full(spec.shape, EXPERT_SCALE if "experts" in name else DENSE_SCALE, "u1")
        return jax.random.bits(key, spec.shape, jnp.uint8)
    if "norm" in name or name.endswith(("scale", "_weight")):
        return jnp.ones(spec.shape, spec.dtype)
    x = jax.random.normal(key, spec.shape, jnp.float32 if spec.dtype == jnp.float32 else "bfloat16")
    if spec.dtype == jnp.float8_e4m3fn or "embed" in name:
        return x.astype(spec.dtype)
    return (x * (spec.shape[-1] ** -0.5 if len(spec.shape) > 2 else 0.01)).astype(spec.dtype)
