"""Shapes of the grouped product: nano ones for the interpreter, the rows of kernels.md 4.6."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import core
from pallas_kernels.grouped_matmul import api
from pallas_kernels.grouped_matmul.configs import TABLE
from pallas_kernels.grouped_matmul.layout import (
    SCALE_OFFSET,
    SCALE_ROW,
    UNIT_CHANNELS,
    UNIT_WORDS,
    ExpertWords,
)
from pallas_kernels.grouped_matmul.plan import gathered_rows, group_rows, max_tiles
from pallas_kernels.specs import ArgSpec, BenchCase

EXPERTS, TOP_K, CHANNELS, WIDTH = 384, 6, 5120, 2304
TOKENS = (1, 2, 6, 7, 64, 65, 384, 8192)


def _spec(
    name: str, tokens: int, top_k: int, experts: int, channels: int, width: int, tier: Any
) -> ArgSpec:
    """Returns the shapes of (codes, scale, w1, w3, w2 payloads, offsets, row_token, row_weight)."""
    rows = tokens * top_k
    return ArgSpec(
        name=name,
        shapes=(
            (tokens, channels),
            (tokens, channels // 32),
            (experts, width, channels // 2),
            (experts, width, channels // 2),
            (experts, channels, width // 2),
            (experts + 1,),
            (rows,),
            (rows,),
        ),
        dtypes=(*("uint8",) * 5, "int32", "int32", "float32"),
        kwargs=MappingProxyType({"limit": 10.0}),
        tier=tier,
    )


CASES: tuple[ArgSpec, ...] = (
    _spec("one row", 1, 1, 3, 64, 64, "interpret"),
    _spec("empty groups", 5, 2, 6, 192, 64, "interpret"),
    _spec("ragged tail", 11, 2, 2, 128, 96, "interpret"),
    *(_spec(f"t={t}", t, TOP_K, EXPERTS, CHANNELS, WIDTH, "real") for t in TOKENS),
)


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes) of every configuration at the model's shapes.

    Args:
        arch: "sm_90"; no other architecture has a form of this op.
    """
    if arch != "sm_90":
        return []
    from pallas_kernels.grouped_matmul import pallas_sm90

    cases = []
    for (product, bound), config in TABLE.items():
        gate_up = product == "gate_up"
        k = CHANNELS if gate_up else WIDTH
        units = WIDTH // 64 if gate_up else CHANNELS // 128
        rows = EXPERTS * min(bound, 128)
        padded = gathered_rows(rows, EXPERTS, config.tile_n)
        tiles = max_tiles(rows, EXPERTS, config.tile_n)
        shapes = [
            _struct((padded, k), jnp.bfloat16),
            _struct((EXPERTS, units, k // UNIT_CHANNELS, *UNIT_WORDS), jnp.int32),
            _struct((padded,), jnp.float32),
            *(_struct((tiles,), jnp.int32),) * 3,
            _struct((1,), jnp.int32),
        ]
        fn = pallas_sm90.build(config, gate_up=gate_up)
        cases.append((f"{product} n={config.tile_n}", fn, shapes))
    return cases


def random_words(key: jax.Array, rows: int, channels: int, interleaved: bool) -> ExpertWords:
    """Returns a full stack of random MXFP4 experts in the kernel layout (every word is valid)."""
    units = rows // 64 if interleaved else rows // 128
    shape = (units, channels // UNIT_CHANNELS)

    def one(key: jax.Array) -> jax.Array:
        codes, scales = jax.random.split(key)
        words = jax.random.bits(codes, (*shape, SCALE_ROW, UNIT_WORDS[1]), jnp.uint32)
        low, high = 117 + SCALE_OFFSET, 124 + SCALE_OFFSET
        bytes_ = jax.random.randint(scales, (*shape, 1, UNIT_WORDS[1], 4), low, high)
        spread = bytes_.astype(jnp.uint32) << np.arange(0, 32, 8, dtype=np.uint32)
        row = spread[..., 0] | spread[..., 1] | spread[..., 2] | spread[..., 3]
        return lax.bitcast_convert_type(jnp.concatenate([words, row], axis=-2), jnp.int32)

    words = jax.jit(lambda keys: lax.map(one, keys))(jax.random.split(key, EXPERTS))
    return ExpertWords(words, rows, channels, interleaved)


def _bench_case(tokens: int) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 5)
        codes, scale = jax.jit(core.quantize_q8)(jax.random.normal(keys[0], (tokens, CHANNELS)))
        ids = lax.top_k(jax.random.uniform(keys[1], (tokens, EXPERTS)), TOP_K)[1]
        groups = jax.jit(lambda ids: group_rows(ids, EXPERTS))(ids)
        weight = jax.random.uniform(keys[2], (tokens * TOP_K,), jnp.float32, 0.05, 0.6)
        return (
            codes,
            scale,
            random_words(keys[3], WIDTH, CHANNELS, True),
            None,
            random_words(keys[4], CHANNELS, WIDTH, False),
            groups.offsets,
            groups.order // TOP_K,
            weight,
        )

    def run(implementation: str, *args: Any) -> jax.Array:
        return api.routed_experts(*args, implementation=implementation)

    active = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    weights = 3 * WIDTH * CHANNELS * (1 / 2 + 1 / 32)
    return BenchCase(
        name=f"t={tokens}",
        make=make,
        run=run,
        implementation="mosaic_sm90",
        flop=6.0 * tokens * TOP_K * WIDTH * CHANNELS,
        bytes=active * weights + tokens * TOP_K * CHANNELS * 2 + tokens * CHANNELS,
        tolerance=0.1,
    )


def bench_cases() -> list[BenchCase]:
    """Returns decode and prefill cases at the model's shapes."""
    return [_bench_case(tokens) for tokens in (256, 8192, 64, 8)]
