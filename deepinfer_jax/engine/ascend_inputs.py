"""What the Ascend bridge asks of the network for every step: rotations and Engram rows."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.engram.hashing import hash_ids
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.rope import rope_frequencies, rope_tables

Rotation = Callable[[np.ndarray, bool], tuple[np.ndarray, np.ndarray]]
EngramIds = Callable[[np.ndarray, int], tuple[np.ndarray, ...]]


def rotation_of(config: ModelConfig) -> Rotation:
    """Returns positions int32 [t], whether YaRN -> (cos, sin), float32 [t, r / 2]."""
    frequency = rope_frequencies(config.attention)

    def rotation(position: np.ndarray, yarn: bool) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = rope_tables(jnp.asarray(position), frequency[int(yarn)])
        return np.asarray(cos), np.asarray(sin)

    return rotation


def engram_ids_of(config: ModelConfig, params: Params) -> EngramIds:
    """Returns token ids [n], first position -> rows int32 [t, columns] of every Engram layer."""
    if config.engram is None or params.engram is None:
        return lambda tokens, first: ()
    compressed, primes = np.asarray(params.engram.token_map.ids), engram_primes(config)
    pad = int(compressed[config.engram.engram_pad_token_id])
    reach, layers = config.engram.engram_max_ngram_size, len(config.engram.engram_layer_ids)

    def engram_ids(tokens: np.ndarray, first: int) -> tuple[np.ndarray, ...]:
        position = np.arange(first, len(tokens))[:, None] - np.arange(reach)
        found = compressed[tokens[np.maximum(position, 0)]]
        context = jnp.asarray(np.where(position >= 0, found, -1).astype(np.int32))
        return tuple(np.asarray(hash_ids(primes, layer, context, pad)) for layer in range(layers))

    return engram_ids
