"""Engram hash constants against the golden file and the numbers of model.md 3.10.2."""

from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from deepinfer_jax.config.engram_primes import bucket_primes, engram_primes
from deepinfer_jax.config.presets import preset
from deepinfer_jax.errors import ConfigError


@pytest.fixture(scope="module")
def golden(fixtures_dir):
    return load_file(fixtures_dir / "modules" / "engram.safetensors")


def test_released_constants(golden):
    constants = engram_primes(preset("deepseek-v4.1-flash"))
    assert constants.primes == as_tuples(golden["real.primes"])
    assert constants.multipliers == as_tuples(golden["real.multipliers_compressed_99092"])
    assert constants.num_embeddings == (384006168, 384016682)
    assert constants.primes[0][0][:3] == (16000057, 16000079, 16000081)
    assert constants.multipliers[1][0] == 67716810739261


def test_tiny_constants(golden):
    constants = engram_primes(preset("tiny-v41"))
    assert constants.primes == as_tuples(golden["tiny.primes"])
    assert constants.offsets == as_tuples(golden["tiny.offsets"])
    assert constants.multipliers == as_tuples(golden["tiny.multipliers"])
    assert constants.num_embeddings == (384, 552)


def test_multipliers_of_another_vocabulary_are_odd_and_bounded():
    engram = preset("tiny-v41").engram
    assert engram is not None
    other = replace(engram, engram_compressed_vocab_size=1000)
    for row in engram_primes(other).multipliers:
        for value in row:
            assert value % 2 == 1
            assert value * 999 < 2**63
    assert engram_primes(other).multipliers != engram_primes(engram).multipliers
    assert engram_primes(other).primes == engram_primes(engram).primes


def test_small_buckets_are_distinct_primes():
    primes = bucket_primes(num_layers=2, num_orders=2, num_heads=3, vocab_size=1)
    assert primes == (((2, 3, 5), (7, 11, 13)), ((17, 19, 23), (29, 31, 37)))


def test_model_without_engram_is_refused():
    with pytest.raises(ConfigError, match="engram_layer_ids"):
        engram_primes(preset("deepseek-v4-flash"))


def as_tuples(array):
    def convert(value):
        return tuple(map(convert, value)) if isinstance(value, list) else value

    return convert(array.tolist())
