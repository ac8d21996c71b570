"""Shapes of mhc_pre: the model's four streams, and what the interpreter runs."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mhc_pre import api
from pallas_kernels.mhc_pre.configs import TABLE
from pallas_kernels.specs import ArgSpec, BenchCase

STREAMS, ITERATIONS, EPS = 4, 20, 1e-6
WIDTH = STREAMS * (STREAMS + 2)
_KEYWORDS = MappingProxyType({"streams": STREAMS, "iterations": ITERATIONS, "eps": EPS})


def _spec(rows: int, tier: Any) -> ArgSpec:
    return ArgSpec(
        name=f"m={rows}",
        shapes=((rows, WIDTH), (3,), (WIDTH,)),
        dtypes=("float32", "float32", "float32"),
        kwargs=_KEYWORDS,
        tier=tier,
    )


CASES: tuple[ArgSpec, ...] = (
    *(_spec(rows, "interpret") for rows in (1, 31, 33)),
    *(_spec(rows, "real") for rows in (1, 64, 256, 8192)),
)


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes); the body is the same on every arch."""
    from pallas_kernels.mhc_pre import pallas_triton

    if arch not in ("sm_90", "sm_100"):
        return []
    run = pallas_triton.build(TABLE["rows"], streams=STREAMS, iterations=ITERATIONS, eps=EPS)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, WIDTH), (3,), (WIDTH,))]
    return [(f"n={STREAMS}", run, shapes)]


def _bench_case(rows: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        first, second, third = jax.random.split(jax.random.key(seed), 3)
        return (
            jax.random.normal(first, (rows, WIDTH)),
            jax.random.uniform(second, (3,), jnp.float32, 0.5, 1.5),
            jax.random.normal(third, (WIDTH,)),
        )

    def run(implementation: str, *args: jax.Array) -> Any:
        return api.mhc_pre(*args, **_KEYWORDS, implementation=implementation)

    return BenchCase(
        name=f"m={rows}",
        make=make,
        run=run,
        implementation="triton",
        flop=float(rows * ITERATIONS * 4 * STREAMS**2),
        bytes=8.0 * rows * WIDTH,
        tolerance=1e-4,
    )


def bench_cases() -> list[BenchCase]:
    """Returns one prefill and one decode case."""
    return [_bench_case(8192), _bench_case(64)]
