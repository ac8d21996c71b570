"""Engram hash ids on the device against Python integers (A10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.model.engram import hashing

RELEASED = di.preset("deepseek-v4.1-flash")
TINY = di.preset("tiny-v41")


def by_integers(tables, layer, context, pad):
    """The rule of model.md 3.10.3 with Python's unbounded integers."""
    heads = [prime for order in tables.primes[layer] for prime in order]
    per_order = len(heads) // len(tables.primes[layer])
    out = []
    for row in context.tolist():
        seen, mixed, ids = [], 0, []
        for value in row:
            seen.append(value if value >= 0 and (not seen or seen[-1] is not None) else None)
        for back, value in enumerate(seen):
            mixed ^= (pad if value is None else value) * tables.multipliers[layer][back]
            if back:
                part = slice((back - 1) * per_order, back * per_order)
                ids += [
                    mixed % prime + offset
                    for prime, offset in zip(heads[part], tables.offsets[layer][part], strict=True)
                ]
        out.append(ids)
    return np.array(out)


def check(config, count, layers):
    tables, pad = engram_primes(config.engram), 2
    generator = np.random.default_rng(7)
    high = config.engram.engram_compressed_vocab_size
    context = generator.integers(0, high, (count, 4)).astype(np.int32)
    context[::17, 1], context[3::29, 2], context[5::31, 0] = -1, -1, -1
    context[: min(count, 8)] = [0, high - 1, 0, high - 1]
    for layer in layers:
        found = jax.jit(lambda c, layer=layer: hashing.hash_ids(tables, layer, c, pad))(context)
        np.testing.assert_array_equal(np.asarray(found), by_integers(tables, layer, context, pad))


@pytest.mark.parametrize("config", [RELEASED, TINY], ids=["released", "tiny"])
def test_hash_ids_equal_python_integers(config):
    check(config, 3000, (0, 1))


@pytest.mark.slow
@pytest.mark.accept(3)
def test_a_million_hashes_equal_python_integers():
    check(RELEASED, 1_000_000 // 24 + 1, (0, 1))  # 24 columns a row and layer


def test_limbs_at_their_edges():
    values = [0, 1, 2**16 - 1, 2**16, 2**17 - 1]
    multipliers = [1, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**46 + 12345, 2**47 - 1]
    primes = [2, 3, 127, 16000057, 2**25 - 39]
    for c in values:
        for m in multipliers:
            limbs = hashing.multiply(jnp.uint32(c), jnp.uint32(m >> 32), jnp.uint32(m & 0xFFFFFFFF))
            assert (int(limbs[0]) << 32 | int(limbs[1])) == c * m
            for prime in primes:
                assert int(hashing.modulo(limbs, jnp.uint32(prime))) == c * m % prime


def test_look_back_is_sticky():
    context = np.array([[5, -1, 7, 8], [5, 6, -1, 8], [-1, 6, 7, 8], [5, 6, 7, 8]], np.int32)
    expected = [[5, 2, 2, 2], [5, 6, 2, 2], [2, 2, 2, 2], [5, 6, 7, 8]]
    np.testing.assert_array_equal(hashing.look_back(jnp.asarray(context), 2), expected)
