"""Shapes of the selection: nano ones for the interpreter, the rows of kernels.md 4.4."""

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.select_topk import api, reference
from pallas_kernels.select_topk.configs import TABLE
from pallas_kernels.specs import ArgSpec, BenchCase

BLOCK, BLOCKS = 8, 2048
#: (entries of a row, ids kept).
SIZES = ((16384, 512), (16384, 2048), (131072, 512), (131072, 2048))


def _spec(name: str, rows: int, size: int, k: int, tier: Any, dtype: str = "bfloat16") -> ArgSpec:
    return ArgSpec(name, ((rows, size),), (dtype,), MappingProxyType({"k": k}), tier)


CASES: tuple[ArgSpec, ...] = (
    _spec("one", 1, 1, 1, "interpret"),
    _spec("below a power of two", 5, 63, 8, "interpret"),
    _spec("above a power of two", 5, 65, 8, "interpret", "float32"),
    _spec("everything", 3, 40, 64, "interpret"),
    *(_spec(f"n={n} k={k} m={m}", m, n, k, "real") for n, k in SIZES for m in (1, 64, 256)),
)


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes); the body is the same on every architecture."""
    from pallas_kernels.select_topk import pallas_triton

    if arch not in ("sm_90", "sm_100"):
        return []
    run = pallas_triton.build(TABLE["row"])
    cases = []
    for dtype in (jnp.bfloat16, jnp.float32):

        def add(label: str, fn: Callable[..., Any], size: int, dtype: Any = dtype) -> None:
            shapes = [
                jax.ShapeDtypeStruct((64, size), dtype),
                jax.ShapeDtypeStruct((64,), jnp.int32),
            ]
            cases.append((f"{label} {jnp.dtype(dtype).name}", fn, shapes))

        # the last one holds more than fits a program and cannot be cut
        for size, k in ((512, 512), *SIZES, (131072, 16384)):
            add(f"n={size} k={k}", functools.partial(run.topk, k=k), size)
        for size in (16384, 131072):
            add(f"blocks={size}", functools.partial(run.blocks, k=BLOCKS), size)
    return cases


def _bench_case(rows: int, size: int, k: int, dtype: Any, ties: bool) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        scores = jax.random.normal(jax.random.key(seed), (rows, size))
        # about thirty values in all
        return ((jnp.round(scores * 4) / 4 if ties else scores).astype(dtype),)

    def run(implementation: str, scores: jax.Array) -> jax.Array:
        return api.select_topk(scores, k, implementation=implementation)

    def stock(scores: jax.Array) -> Any:
        return jax.lax.top_k(scores, k)

    kind = f"{jnp.dtype(dtype).name} {'ties' if ties else 'normal'}"
    moved = rows * (float(jnp.dtype(dtype).itemsize) * size + 4.0 * k)
    name = f"n={size} k={k} m={rows} {kind}"
    return BenchCase(name, make, run, "triton", 0.0, moved, 0.0, stock=stock)


def _block_case(rows: int, size: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        scores = jax.random.normal(jax.random.key(seed), (rows, size)).astype(jnp.bfloat16)
        return scores, jnp.full((rows,), size - 3, jnp.int32)

    def run(implementation: str, scores: jax.Array, length: jax.Array) -> jax.Array:
        return api.select_blocks(scores, length, BLOCK, BLOCKS, implementation=implementation)

    def stock(scores: jax.Array, length: jax.Array) -> Any:
        return jax.lax.top_k(reference.block_maxima(scores, length, BLOCK), BLOCKS)

    moved = rows * (2.0 * size + size / BLOCK)
    name = f"blocks n={size} m={rows}"
    return BenchCase(name, make, run, "triton", 0.0, moved, 0.0, stock=stock)


def bench_cases() -> list[BenchCase]:
    """Returns decode rows of both operations, of the selection without and with many ties."""
    rows = (64, 256, 1)
    kinds = [(dtype, ties) for dtype in (jnp.bfloat16, jnp.float32) for ties in (False, True)]
    return [
        *(_bench_case(m, n, k, *kind) for m in rows for n, k in SIZES for kind in kinds),
        *(_block_case(m, 131072) for m in rows),
    ]
