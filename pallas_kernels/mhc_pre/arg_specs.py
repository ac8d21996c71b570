"""Shapes of mhc_pre: the model's four streams, nano's, and what the interpreter runs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mhc_pre import api
from pallas_kernels.mhc_pre.configs import config_for
from pallas_kernels.specs import ArgSpec, BenchCase

STREAMS, ITERATIONS, EPS, RMS_EPS = 4, 20, 1e-6, 1e-20
WIDTH = STREAMS * (STREAMS + 2)
CHANNELS, NANO = 4 * 5120, 4 * 192
_KEYWORDS: Mapping[str, Any] = MappingProxyType(
    {"streams": STREAMS, "iterations": ITERATIONS, "eps": EPS, "rms_eps": RMS_EPS}
)


def _spec(rows: int, channels: int, tier: Any) -> ArgSpec:
    return ArgSpec(
        name=f"m={rows} k={channels}",
        shapes=((rows, channels), (WIDTH, channels), (3,), (WIDTH,)),
        dtypes=("float32",) * 4,
        kwargs=_KEYWORDS,
        tier=tier,
    )


# around a tile of rows, and channels that fill one part, many, and none
CASES: tuple[ArgSpec, ...] = (
    *(_spec(rows, NANO, "interpret") for rows in (1, 15, 17, 63, 64, 65)),
    *(_spec(33, channels, "interpret") for channels in (12, 200, 512, 1028, 2048)),
    *(_spec(rows, CHANNELS, "real") for rows in (1, 32, 64, 256, 8192)),
)


def random_arguments(seed: int, rows: int, channels: int = CHANNELS) -> tuple[jax.Array, ...]:
    """Returns (x, fn, scale, base) whose logits are a few units large; x holds BF16 values."""
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (rows, channels), jnp.bfloat16).astype(jnp.float32)
    return (
        x,
        jax.random.normal(keys[1], (WIDTH, channels)) * (2 / channels**0.5),
        jax.random.uniform(keys[2], (3,), jnp.float32, 0.5, 1.5),
        jax.random.normal(keys[3], (WIDTH,)),
    )


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes); the body is the same on every arch."""
    from pallas_kernels.mhc_pre import pallas_triton

    if arch not in ("sm_90", "sm_100"):
        return []

    def case(rows: int, channels: int) -> tuple[str, Callable[..., Any], list[Any]]:
        run = pallas_triton.build(config_for(rows), **_KEYWORDS)
        shapes = list(jax.eval_shape(lambda: random_arguments(0, rows, channels)))
        return f"n={STREAMS} k={channels} m={rows}", run, shapes

    return [case(rows, channels) for rows in (64, 256) for channels in (CHANNELS, NANO)]


def work(rows: int, channels: int, width: int) -> tuple[float, float]:
    """Returns (multiplications and additions, bytes read and written once), float32 throughout."""
    moved = rows * channels + width * channels + rows * width
    return 2.0 * rows * channels * (width + 1), 4.0 * moved


def _bench_case(rows: int) -> BenchCase:
    def run(implementation: str, *args: jax.Array) -> Any:
        return api.mhc_pre(*args, **_KEYWORDS, implementation=implementation)

    flop, moved = work(rows, CHANNELS, WIDTH)
    return BenchCase(
        name=f"m={rows}",
        make=lambda seed: random_arguments(seed, rows),
        run=run,
        implementation="triton",
        flop=flop,
        bytes=moved,
        tolerance=1e-4,
    )


def bench_cases() -> list[BenchCase]:
    """Returns one prefill and two decode cases."""
    return [_bench_case(rows) for rows in (8192, 64, 1)]
