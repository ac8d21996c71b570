"""Shapes of sparse attention: short lists for the interpreter, the rows of kernels.md 4.1."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import core
from pallas_kernels.sparse_mla_decode import api
from pallas_kernels.sparse_mla_decode.configs import TABLE
from pallas_kernels.specs import ArgSpec, BenchCase

DIM, HEADS, WINDOW, SELECTED = 512, 64, 128, 512
Q8_BYTES, Q4N_BYTES = 528, 288
TOKENS = (1, 2, 6, 7, 64, 65, 384, 8192)


def _spec(
    name: str, tokens: int, heads: int, sets: tuple[tuple[int, int, int], ...], tier: Any
) -> ArgSpec:
    """Returns the shapes of (q, cache and ids of each set of (rows, bytes, ranks), sink)."""
    shapes: list[tuple[int, ...]] = [(tokens, heads, DIM)]
    for rows, row_bytes, ranks in sets:
        shapes += [(rows, row_bytes), (tokens, ranks)]
    dtypes = ("bfloat16", *("uint8", "int32") * len(sets), "float32")
    return ArgSpec(name, (*shapes, (heads,)), dtypes, MappingProxyType({}), tier)


def _sets(tokens: int, selected_bytes: int, selected: int) -> tuple[tuple[int, int, int], ...]:
    window = (134 * tokens, Q8_BYTES, WINDOW)
    return (window, (1 << 16, selected_bytes, selected)) if selected_bytes else (window,)


CASES: tuple[ArgSpec, ...] = (
    _spec("window only", 2, HEADS, ((90, Q8_BYTES, 64),), "interpret"),
    _spec("q4n", 3, HEADS, ((40, Q8_BYTES, 64), (150, Q4N_BYTES, 128)), "interpret"),
    _spec("q8, 128 heads", 1, 128, ((40, Q8_BYTES, 64), (80, Q8_BYTES, 64)), "interpret"),
    *(
        _spec(f"{name} t={t}", t, HEADS, _sets(t, row_bytes, SELECTED), "real")
        for name, row_bytes in (("q4n", Q4N_BYTES), ("q8", Q8_BYTES), ("window only", 0))
        for t in TOKENS
    ),
)


def compile_cases(arch: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Returns (label, function, shapes) of every configuration at the model's shapes.

    Args:
        arch: "sm_90"; no other architecture has a form of this op.
    """
    if arch != "sm_90":
        return []
    from pallas_kernels.sparse_mla_decode import pallas_sm90

    variants = [(row_bytes, config, lse) for row_bytes, config in TABLE.items() for lse in (0, 1)]
    cases = []
    for row_bytes, config, with_lse in variants:
        spec = _spec("", 384, HEADS, _sets(384, row_bytes, SELECTED), "real")
        q, *sets, sink = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        fn = pallas_sm90.build(config, with_lse=bool(with_lse))
        label = f"selected row of {row_bytes} bytes{', lse' if with_lse else ''}"
        cases.append((label, fn, [q, sink, *sets]))
    return cases


def random_cache(key: jax.Array, rows: int, row_bytes: int) -> jax.Array:
    """Returns cache rows of random normal keys, quantised; uint8 [rows, row_bytes]."""
    keys = jax.random.normal(key, (rows, DIM), jnp.float32)
    quantise = core.quantize_q8 if row_bytes == Q8_BYTES else core.quantize_q4n
    return jnp.concatenate(quantise(core.round_bf16(keys)), axis=1)


def random_ids(key: jax.Array, tokens: int, ranks: int, rows: int) -> jax.Array:
    """Returns distinct ascending row ids int32 [tokens, ranks], drawn from ``rows``.

    One id from each of ``ranks`` runs of neighbouring rows.
    """
    run = rows // ranks
    offset = jax.random.randint(key, (tokens, ranks), 0, run, jnp.int32)
    return offset + run * jnp.arange(ranks, dtype=jnp.int32)


def random_arguments(
    seed: int, tokens: int, heads: int, selected: int, selected_bytes: int, window: int = WINDOW
) -> tuple[Any, ...]:
    """Returns the arguments of api.sparse_mla_decode: full lists over random rows."""
    keys = jax.random.split(jax.random.key(seed), 6)
    rows = max(134 * tokens, 4 * window)
    q = jax.random.normal(keys[0], (tokens, heads, DIM), jnp.float32).astype(jnp.bfloat16)
    sink = jax.random.normal(keys[1], (heads,), jnp.float32)
    own = jax.jit(random_cache, static_argnums=(1, 2))(keys[2], rows, Q8_BYTES)
    ids = random_ids(keys[3], tokens, window, rows)
    if not selected_bytes:
        return q, own, ids, None, None, sink
    pages = min(max(1 << 16, 1024 * tokens), 1 << 19)  # most of it beyond any cache
    cache = jax.jit(random_cache, static_argnums=(1, 2))(keys[4], pages, selected_bytes)
    return q, own, ids, cache, random_ids(keys[5], tokens, selected, pages), sink


def work(
    tokens: int, heads: int, selected: int, selected_bytes: int, window: int = WINDOW
) -> tuple[float, float]:
    """Returns (multiplications and additions, bytes that must move once) of one call."""
    flop = 4.0 * tokens * heads * DIM * (window + selected)
    cache = window * Q8_BYTES + selected * selected_bytes
    return flop, float(tokens * (cache + 4 * heads * DIM))


def _bench_case(
    tokens: int, selected_bytes: int, heads: int = HEADS, selected: int = SELECTED
) -> BenchCase:
    def make(seed: int) -> tuple[Any, ...]:
        return random_arguments(seed, tokens, heads, selected, selected_bytes)

    def run(implementation: str, *args: Any) -> jax.Array:
        return api.sparse_mla_decode(*args, implementation=implementation)

    flop, moved = work(tokens, heads, selected, selected_bytes)
    form = "q4n" if selected_bytes == Q4N_BYTES else "q8"
    return BenchCase(
        name=f"{form} t={tokens} heads={heads} ranks={WINDOW}+{selected}",
        make=make,
        run=run,
        implementation="mosaic_sm90",
        flop=flop,
        bytes=moved,
        tolerance=0.05,
    )


def bench_cases() -> list[BenchCase]:
    """Returns steps with both forms of selected rows, and the eight cases of kernels.md 12."""
    steps = [_bench_case(tokens, size) for tokens in (384, 64) for size in (Q4N_BYTES, Q8_BYTES)]
    batches = (2, 64, 128, 256)  # two query rows a request
    return steps + [
        _bench_case(2 * batch, Q8_BYTES, heads, selected)
        for heads, selected in ((64, 512), (128, 1024))
        for batch in batches
    ]
