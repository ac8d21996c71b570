"""Shapes of the indexer: nano ones for the interpreter, the rows of kernels.md 4.3."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import core
from pallas_kernels.indexer_logits import api
from pallas_kernels.specs import ArgSpec, BenchCase

HEADS, CHANNELS = 32, 128
#: (rows, lists of pages, keys of a sequence, keys of a page).
_REAL = (
    (1, 1, 131072, 128),
    (32, 32, 131072, 128),
    (64, 64, 16384, 64),
    (6, 1, 131072, 128),
    (384, 64, 16384, 128),
    (8192, 1024, 4096, 64),
)


def _spec(
    name: str, rows: int, tiles: int, keys: int, page: int, tier: Any, heads: int = HEADS
) -> ArgSpec:
    count = tiles * (keys // page) + 1
    return ArgSpec(
        name=name,
        shapes=(
            (rows, heads, CHANNELS // 2),
            (rows, heads, CHANNELS // 32),
            (rows, heads),
            (count, page, CHANNELS // 2),
            (count, page, CHANNELS // 32),
            (tiles, keys // page),
            (rows,),
        ),
        dtypes=("uint8", "uint8", "bfloat16", "uint8", "uint8", "int32", "int32"),
        kwargs=MappingProxyType({}),
        tier=tier,
    )


CASES: tuple[ArgSpec, ...] = (
    _spec("one row", 1, 1, 128, 64, "interpret"),
    _spec("one row each", 3, 3, 192, 64, "interpret", heads=8),
    _spec("three rows share", 6, 2, 256, 128, "interpret", heads=8),
    _spec("eight rows share", 8, 1, 128, 128, "interpret"),
    *(_spec(f"t={t} tiles={g} n={n}", t, g, n, page, "real") for t, g, n, page in _REAL),
)


def make(spec: ArgSpec, seed: int) -> tuple[jax.Array, ...]:
    """Returns the arguments of a case: normal queries and keys, lengths up to the capacity."""
    keys = jax.random.split(jax.random.key(seed), 4)
    (rows, heads, _), (count, page, _), (tiles, listed) = (spec.shapes[i] for i in (0, 3, 5))
    query = core.quantize_q4m(jax.random.normal(keys[0], (rows, heads, CHANNELS)))
    cache = core.quantize_q4m(jax.random.normal(keys[1], (count, page, CHANNELS)))
    weight = (jax.random.normal(keys[2], (rows, heads)) / 64).astype(jnp.bfloat16)
    pages = 1 + jax.random.permutation(keys[3], tiles * listed).reshape(tiles, listed)
    length = jnp.asarray(np.linspace(listed * page, listed * page // 2, rows), jnp.int32)
    return (*query, weight, *cache, pages.astype(jnp.int32), length)


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes) of every configuration.

    Args:
        arch: "sm_90"; no other architecture has a form of this op.
    """
    if arch != "sm_90":
        return []
    from pallas_kernels.indexer_logits import launch_sm90

    return [
        (
            spec.name,
            launch_sm90.indexer_logits,
            [
                jax.ShapeDtypeStruct(shape, dtype)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ],
        )
        for spec in CASES
        if spec.tier == "real"
    ]


def _bench_case(spec: ArgSpec) -> BenchCase:
    (rows, _, _), (tiles, listed), (_, page, _) = (spec.shapes[i] for i in (0, 5, 3))
    pairs = float(rows * listed * page)

    def full(seed: int) -> tuple[jax.Array, ...]:
        *arguments, length = make(spec, seed)
        return *arguments, jnp.full_like(length, listed * page)

    def run(implementation: str, *arguments: Any) -> jax.Array:
        return api.indexer_logits(*arguments, implementation=implementation)

    return BenchCase(
        name=spec.name,
        make=full,
        run=run,
        implementation="mosaic_sm90",
        flop=2.0 * HEADS * CHANNELS * pairs,
        bytes=tiles * listed * page * (CHANNELS / 2 + CHANNELS / 32) + 2 * pairs,
        tolerance=0.0,
    )


def bench_cases() -> list[BenchCase]:
    """Returns decode, verify and prefill rows."""
    return [_bench_case(spec) for spec in CASES if spec.tier == "real"]
