"""Shapes of rms_norm_quant: nano ones for the interpreter, the model's row widths."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm_quant import api
from pallas_kernels.rms_norm_quant.configs import TABLE
from pallas_kernels.specs import ArgSpec, BenchCase

EPS = 1e-20
#: Row widths of the network: hidden, query latent, keys, indexer keys.
WIDTHS = (5120, 1280, 512, 128)


def _spec(name: str, rows: int, width: int, tier: Any) -> ArgSpec:
    return ArgSpec(
        name=name,
        shapes=((rows, width), (width,)),
        dtypes=("bfloat16", "float32"),
        kwargs=MappingProxyType({"eps": EPS}),
        tier=tier,
    )


CASES: tuple[ArgSpec, ...] = (
    _spec("one group", 1, 32, "interpret"),
    _spec("nano", 9, 192, "interpret"),
    _spec("ragged chunk", 3, 1280, "interpret"),
    *(_spec(f"d={d} m={m}", m, d, "real") for d in WIDTHS for m in (1, 7, 64, 8192)),
)


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes) for each row width; the body is the same on every arch."""
    from pallas_kernels.rms_norm_quant import pallas_triton

    if arch not in ("sm_90", "sm_100"):
        return []
    run = pallas_triton.build(TABLE["row"], eps=EPS)
    return [
        (
            f"d={width}",
            run,
            [
                jax.ShapeDtypeStruct((256, width), jnp.bfloat16),
                jax.ShapeDtypeStruct((width,), jnp.float32),
            ],
        )
        for width in WIDTHS
    ]


def _bench_case(rows: int, width: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        first, second = jax.random.split(jax.random.key(seed))
        x = 3 * jax.random.normal(first, (rows, width), jnp.float32)
        return x.astype(jnp.bfloat16), jax.random.uniform(second, (width,), jnp.float32, 0.5, 1.5)

    def run(implementation: str, x: jax.Array, weight: jax.Array) -> Any:
        return api.rms_norm_quant(x, weight, EPS, implementation=implementation)

    return BenchCase(
        name=f"d={width} m={rows}",
        make=make,
        run=run,
        implementation="triton",
        flop=6.0 * rows * width,
        bytes=rows * width * (2 + 2 + 1 + 1 / 32) + 4.0 * width,
        tolerance=0.0,
    )


def bench_cases() -> list[BenchCase]:
    """Returns one prefill and one decode case."""
    return [_bench_case(8192, 5120), _bench_case(64, 5120)]
