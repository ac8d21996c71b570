"""What the bridge asks of this package: rotations and Engram rows, by the network's functions."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.model.engram.hashing import hash_ids
from deepinfer_jax.model.rope import rope_frequencies, rope_tables


def rotation_of(config):
    frequency = rope_frequencies(config.attention)

    def rotation(position, yarn):
        return tuple(
            np.asarray(t) for t in rope_tables(jnp.asarray(position), frequency[int(yarn)])
        )

    return rotation


def engram_ids_of(config, token_map):
    if config.engram is None:
        return lambda tokens, first: ()
    compressed, primes = np.asarray(token_map.ids), engram_primes(config)
    pad = int(compressed[config.engram.engram_pad_token_id])

    def engram_ids(tokens, first):
        back = np.arange(config.engram.engram_max_ngram_size)
        position = np.arange(first, len(tokens))[:, None] - back
        found = compressed[tokens[np.maximum(position, 0)]]
        context = jnp.asarray(np.where(position >= 0, found, -1).astype(np.int32))
        layers = range(len(config.engram.engram_layer_ids))
        return tuple(np.asarray(hash_ids(primes, layer, context, pad)) for layer in layers)

    return engram_ids
