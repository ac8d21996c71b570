"""Shapes of the dense products: for the interpreter, the compile lane and the benchmark."""

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import core
from pallas_kernels.block_scaled_matmul import api
from pallas_kernels.specs import ArgSpec, BenchCase

#: N and K of the checkpoint's FP8 linears (kernels.md 4.5).
LINEARS = MappingProxyType(
    {
        "wq_a+wkv": (1792, 5120),
        "wq_b": (32768, 1280),
        "wo_b": (5120, 8192),
        "shared w1+w3": (4608, 5120),
        "shared w2": (5120, 2304),
        "engram wkv": (25600, 6144),
        "main_proj": (5120, 15360),
    }
)
#: N and K of a weight with fewer rows than a tile has columns.
NARROW = (64, 192)
#: Groups, N and K of the BF16 products.
BF16 = MappingProxyType(
    {"wo_a": (8, 1024, 4096), "router": (1, 384, 5120), "head": (1, 129280, 5120)}
)
#: M, N, K at which the FP8 form is compared with DeepGEMM (kernels.md 12).
FP8 = (
    (4096, 4096, 4096),
    (4096, 7168, 2048),
    (8192, 8192, 8192),
    (128, 7168, 2048),
    (64, 4096, 7168),
)
ROWS = (1, 6, 64, 65, 384, 8192)


def _block(m: int, n: int, k: int, name: str, tier: Any) -> ArgSpec:
    shapes = ((m, k), (m, k // 32), (n, k), (-(-n // 32), k // 32))
    return ArgSpec(name, shapes, ("uint8",) * 4, tier=tier)


CASES: tuple[ArgSpec, ...] = (
    _block(1, 64, 128, "one row", "interpret"),
    _block(9, 192, 192, "nano, half a stage", "interpret"),
    _block(65, 100, 96, "two token tiles, ragged N and K", "interpret"),
    _block(140, 160, 256, "three token tiles", "interpret"),
    *(_block(m, n, k, f"{name} m={m}", "real") for name, (n, k) in LINEARS.items() for m in ROWS),
)


def _spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _sm90_cases() -> list[tuple[str, Callable[..., Any], list[Any]]]:
    from pallas_kernels.block_scaled_matmul import launch_sm90

    cases: list[tuple[str, Callable[..., Any], list[Any]]] = []

    def block(m: int, n: int, k: int) -> None:
        def run(x: jax.Array, payload: jax.Array, scale: jax.Array) -> jax.Array:
            return launch_sm90.block_scaled(x, core.QuantArray(payload, scale, "fp8_block32"))

        w = [_spec((n, k), jnp.uint8), _spec((n // 32, k // 32), jnp.uint8)]
        cases.append((f"q8 m={m} n={n} k={k}", run, [_spec((m, k), jnp.bfloat16), *w]))

    block(512, *NARROW)
    for m in (8, 16, 32, 64, 257, 8192):
        block(m, *LINEARS["wq_b"])
        block(m, *LINEARS["wo_b"])
    block(8192, *LINEARS["wq_a+wkv"])
    block(4096, *LINEARS["shared w1+w3"])
    for name, (groups, n, k) in BF16.items():
        for m in (64, 4096):
            for dtype in (jnp.bfloat16, jnp.float32):
                run = functools.partial(launch_sm90.bf16, out_dtype=dtype)
                x, w = (
                    _spec((m, groups, k), jnp.bfloat16),
                    _spec((groups, n, k), jnp.bfloat16),
                )
                cases.append((f"bf16 {name} m={m} {jnp.dtype(dtype).name}", run, [x, w]))
    for m, n, k in (FP8[0], FP8[-1]):
        e4m3, blocks = jnp.float8_e4m3fn, k // 128
        specs = [
            _spec((m, k), e4m3),
            _spec((m, blocks), jnp.float32),
            _spec((n, k), e4m3),
        ]
        specs.append(_spec((n // 128, blocks), jnp.float32))
        cases.append((f"fp8 m={m} n={n} k={k}", launch_sm90.fp8_block128, specs))
    return cases


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns what dispatch may select for an architecture as (label, function, specs)."""
    if arch == "sm_90":
        return _sm90_cases()
    from pallas_kernels.block_scaled_matmul import pallas_sm100

    return [
        (
            f"bf16 m={m} {jnp.dtype(dtype).name}",
            functools.partial(pallas_sm100.matmul, out_dtype=dtype),
            [_spec((m, 5120), jnp.bfloat16), _spec((4608, 5120), jnp.bfloat16)],
        )
        for m in (64, 4096)
        for dtype in (jnp.bfloat16, jnp.float32)
    ]


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape).astype(dtype)


def _q8_case(name: str, m: int, n: int, k: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        x = core.fake_q8(_normal(keys[0], (m, k), jnp.float32)).astype(jnp.bfloat16)
        blocks = jax.random.randint(keys[2], (n // 32, k // 32), 118, 124).astype(jnp.uint8)
        payload = _normal(keys[1], (n, k), jnp.float8_e4m3fn)
        return x, None, core.QuantArray(payload, blocks, "fp8_block32")

    def run(implementation: str, *args: Any) -> jax.Array:
        return api.block_scaled_matmul(*args, implementation=implementation)

    moved = n * k + n * k / 1024 + 2 * m * k + 2 * m * n
    label = f"{name} m={m}"
    return BenchCase(label, make, run, "mosaic_sm90", 2.0 * m * n * k, moved, 2.0**-5)


def _bf16_case(name: str, m: int, groups: int, n: int, k: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 2)
        x, w = (m, groups, k), (groups, n, k)
        return _normal(keys[0], x, jnp.bfloat16), _normal(keys[1], w, jnp.bfloat16)

    def run(implementation: str, *args: Any) -> jax.Array:
        return api.matmul_bf16(*args, out_dtype=jnp.bfloat16, implementation=implementation)

    flop = 2.0 * m * groups * n * k
    moved = 2.0 * groups * (m * k + n * k + m * n)
    return BenchCase(f"{name} m={m}", make, run, "mosaic_sm90", flop, moved, 2.0**-5)


def _fp8_case(m: int, n: int, k: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        x = _normal(keys[0], (m, k), jnp.float8_e4m3fn)
        w = _normal(keys[1], (n, k), jnp.float8_e4m3fn)
        sx = jax.random.uniform(keys[2], (m, k // 128), minval=0.5, maxval=2.0)
        sw = jax.random.uniform(keys[3], (n // 128, k // 128), minval=0.5, maxval=2.0)
        return x, sx, w, sw

    def run(implementation: str, *args: Any) -> jax.Array:
        return api.matmul_fp8(*args, implementation=implementation)

    label, moved = f"fp8 {m}x{n}x{k}", float(m * k + n * k + 2 * m * n)
    flop, peer = 2.0 * m * n * k, (m, n, k)
    return BenchCase(label, make, run, "mosaic_sm90_fp8", flop, moved, 2.0**-4, peer)


def bench_cases() -> list[BenchCase]:
    """Returns the rows of the benchmark, most telling first."""
    return [
        *(_fp8_case(*shape) for shape in FP8),
        *(_q8_case(name, m, *shape) for name, shape in LINEARS.items() for m in (1, 64, 4096)),
        _q8_case("narrower than a tile", 512, *NARROW),
        *(_bf16_case(name, m, *BF16[name]) for name in ("wo_a", "router") for m in (64, 4096)),
        _bf16_case("head", 64, *BF16["head"]),
    ]
