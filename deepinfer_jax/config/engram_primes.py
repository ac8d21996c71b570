"""Constants of the Engram hash: bucket primes, row offsets, multipliers (model.md 3.10.2)."""

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

from deepinfer_jax.config.model import EngramConfig, ModelConfig
from deepinfer_jax.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramPrimes:
    """Hash constants; the first index of each is the position in `engram_layer_ids`.

    `primes[layer][order][head]` is a bucket count, `offsets[layer][column]` the first table row of
    a column (column = order * heads + head), `multipliers[layer][look_back]` an odd integer.
    """

    primes: tuple[tuple[tuple[int, ...], ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    multipliers: tuple[tuple[int, ...], ...]

    @property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each layer's table: the sum of its primes."""
        return tuple(sum(sum(heads) for heads in orders) for orders in self.primes)


@lru_cache(maxsize=16)
def engram_primes(config: ModelConfig | EngramConfig) -> EngramPrimes:
    """Returns the hash constants of a model's Engram layers.

    Raises:
        ConfigError: The model has no Engram layers.
    """
    engram = config if isinstance(config, EngramConfig) else config.engram
    if engram is None:
        raise ConfigError("hash constants need Engram layers; this model's engram_layer_ids is []")
    primes = bucket_primes(
        num_layers=len(engram.engram_layer_ids),
        num_orders=engram.engram_max_ngram_size - 1,
        num_heads=engram.engram_n_heads,
        vocab_size=engram.engram_vocab_size,
    )
    return EngramPrimes(
        primes=primes,
        offsets=tuple(_offsets(orders) for orders in primes),
        multipliers=tuple(
            _multipliers(layer, engram.engram_max_ngram_size, engram.engram_compressed_vocab_size)
            for layer in engram.engram_layer_ids
        ),
    )


@lru_cache(maxsize=16)
def bucket_primes(
    *, num_layers: int, num_orders: int, num_heads: int, vocab_size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns primes[layer][order][head]: per order the smallest unused primes >= `vocab_size`."""
    used: set[int] = set()
    layers = []
    for _ in range(num_layers):
        orders = []
        for _ in range(num_orders):
            running, heads = vocab_size - 1, []
            for _ in range(num_heads):
                running = _next_prime(running, used)
                used.add(running)
                heads.append(running)
            orders.append(tuple(heads))
        layers.append(tuple(orders))
    return tuple(layers)


def _next_prime(value: int, used: set[int]) -> int:
    value += 1
    while value in used or not _is_prime(value):
        value += 1
    return value


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    return value % 2 == 1 and all(value % factor for factor in range(3, isqrt(value) + 1, 2))


def _offsets(orders: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    offsets, total = [], 0
    for prime in (prime for heads in orders for prime in heads):
        offsets.append(total)
        total += prime
    return tuple(offsets)


def _multipliers(layer: int, count: int, compressed_vocab_size: int) -> tuple[int, ...]:
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    generator = np.random.Generator(np.random.PCG64(10007 * layer))
    return tuple(2 * int(v) + 1 for v in generator.integers(0, bound, count, dtype=np.int64))
