"""Slow, independent forms of the sampler's rules in NumPy and Python integers."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import row_params


def kept(scores, probabilities, top_p, top_k, min_p):
    """Which tokens of one row stay: a sort, a running integer mass, three tests; top_k < 0 off."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    limit = int(np.float32(top_p) * 2.0**31) if top_p < 1 else 2**40
    floor = np.float32(min_p) * probabilities.max()
    stays = np.zeros(len(scores), bool)
    before = 0
    for rank, token in enumerate(order):
        inside = (top_k < 0 or rank < top_k) and before <= limit
        stays[token] = inside and probabilities[token] >= floor and scores[token] > -np.inf
        before += int(probabilities[token] * 2.0**31)
    return stays


def one(size, **fields):
    """RowParams of `size` equal rows with seeds 0, 1, ..."""
    return row_params([SamplingParams(**fields)] * size, list(range(size)))


def mixed_rows(size):
    """Parameters that differ from row to row: greedy, plain, and every truncation."""
    kinds = (
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.6, "min_p": 0.05},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.6, "top_k": 40, "min_p": 0.01},
        {"temperature": 1e-5},
    )
    params = [
        SamplingParams(
            **kinds[i % 7],
            presence_penalty=0.1 * (i % 3),
            frequency_penalty=0.3 * (i % 2),
            repetition_penalty=1.0 + 0.1 * (i % 4),
        )
        for i in range(size)
    ]
    return row_params(params, [1000 + 7 * i for i in range(size)])


def bits(array):
    """Bit patterns of an array, for exact comparison."""
    array = np.asarray(array)
    return array.view(np.uint32) if array.dtype == np.float32 else array


def normal(seed, shape, scale=3.0):
    """Float32 normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale)
