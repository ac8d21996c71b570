"""What single operations of nano cost at level "batch", beside the same in stock XLA.

Used by `benchmarks.determinism_cost`. At "off" and "run" an operation runs on all rows at once, as
the network runs it there; at "batch" in row tiles, as inside the network's tile loop.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.loading import Model
from deepinfer_jax.model import mhc, moe
from deepinfer_jax.model.attention import core as attention
from deepinfer_jax.model.attention import indexer
from deepinfer_jax.model.layer import layer_at
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import row_params
from deepinfer_jax.sampling.sample import sample
from pallas_kernels import core

LAYER = 6  # has all parts
KEYS = 192  # of a row's attention list: 64 of the window, 128 selected
SCORED = 1024  # index scores that a selection looks at
TOLERANCE = 0.02  # of the largest value: BF16 rounding points turn last bits into these
FEW = 3
LEAST_S = 0.1  # of a measurement


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: run(ops, params, *rows) on rows [m, ...]. in_tiles: as levels decide."""

    name: str
    run: Callable[..., Any]
    rows: tuple[Any, ...]
    in_tiles: bool = True


def operations(model: Model, count: int) -> Iterator[Operation]:
    """Yields the operations on `count` rows of random values at nano's shapes."""
    config, rng = model.config, np.random.default_rng(3)
    heads, dim = config.attention.num_attention_heads, config.attention.head_dim

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((count, *shape), np.float32))

    def of_layer(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ops, params, *rows: run(ops, layer_at(params.layers, LAYER), *rows)

    d, latent = config.hidden_size, model.params.layers.wq_b.shape[-1]
    grouped = (config.attention.o_groups, heads * dim // config.attention.o_groups)
    yield Operation(
        "contract, query down",
        of_layer(lambda ops, layer, x: ops.contract(ops.q8(x), layer.wq_a)),
        (draw(d),),
    )
    yield Operation(
        "contract, query up",
        of_layer(lambda ops, layer, x: ops.contract(ops.q8(x), layer.wq_b)),
        (draw(latent),),
    )
    yield Operation(
        "contract, output groups",
        of_layer(
            lambda ops, layer, x: ops.contract_grouped(
                x, layer.wo_a.reshape(x.shape[1], -1, layer.wo_a.shape[-1])
            )
        ),
        (draw(*grouped),),
    )
    yield Operation(
        "mHC coefficients",
        of_layer(
            lambda ops, layer, x: mhc.mix_coefficients(
                ops, config.mhc, config.rms_norm_eps, layer.hc_attn, x
            )[2]
        ),
        (draw(config.mhc.hc_mult, d),),
    )
    yield Operation(
        "norm",
        of_layer(lambda ops, layer, x: ops.norm(x, layer.attn_norm, config.rms_norm_eps)),
        (draw(d),),
    )
    yield Operation(
        f"attention fold, {KEYS} keys",
        of_layer(
            lambda ops, layer, q, keys, valid: attention.attend(
                ops, q, keys, valid, layer.attn_sink
            )
        ),
        (draw(heads, dim), draw(KEYS, dim), jnp.ones((count, KEYS), bool)),
    )
    index_heads, index_dim = config.indexer.index_n_heads, config.indexer.index_head_dim
    yield Operation(
        "index scores, 64 keys",
        lambda ops, params, q, w, keys: indexer.score_block(ops, config, q, w, keys),
        (draw(index_heads, index_dim), draw(index_heads), draw(64, index_dim)),
    )
    yield Operation(
        f"top-k, {config.indexer.index_topk} of {SCORED}",
        lambda ops, params, scores: core.select_topk(scores, config.indexer.index_topk),
        (draw(SCORED),),
    )
    yield Operation(
        "MoE",
        of_layer(
            lambda ops, layer, v, valid: moe.moe_layer(ops, config.moe, layer, LAYER, v, valid)[0]
        ),
        (draw(d), jnp.ones((count,), bool)),
    )
    yield Operation("head", lambda ops, params, x: ops.contract(x, params.head), (draw(d),))
    rules = row_params([SamplingParams(temperature=1.0, top_p=0.9)] * count, list(range(count)))
    yield Operation(
        "sampler (the same at all levels)",
        lambda ops, params, *rows: sample(*rows).token,
        (draw(config.vocab_size), rules, jnp.arange(count, dtype=jnp.int32)),
        in_tiles=False,
    )


def program(model: Model, operation: Operation) -> Any:
    """Returns the operation at the model's level, jitted: (params, *rows) -> values.

    Also of fewer rows than the operation has; those are computed as all are, in a loop or not.
    """
    ops, tile = ops_for(model.config.execution), model.config.execution.row_tile
    size = len(jax.tree.leaves(operation.rows)[0])

    def run(params: Any, *rows: Any) -> Any:
        body = partial(operation.run, ops, params)
        if not ops.fixed_order or not operation.in_tiles:
            return body(*rows)
        if size > tile:
            return core.map_row_tiles(body, *rows, tile=tile)
        count = rows[0].shape[0]
        # One tile, as the network's loop would run it, not the two that a lone primitive makes.
        rows = tuple(jnp.pad(a, [(0, tile - count)] + [(0, 0)] * (a.ndim - 1)) for a in rows)
        return body(*lax.optimization_barrier(rows))[:count]

    return jax.jit(run)


def prepare(
    model: Model, params: Any, counts: tuple[int, ...]
) -> list[tuple[int, Operation, Any, Any]]:
    """Returns (rows, operation, compiled, compiled for `FEW` rows) of all points.

    Compiled side by side; nothing for few rows unless at "batch". params: the weights in the form
    in which the engine runs them.
    """
    found = [(count, one) for count in counts for one in operations(model, count)]

    is_batch = model.config.execution.determinism == "batch"

    def compiled(point: tuple[int, Operation]) -> tuple[Any, Any]:
        run, rows = program(model, point[1]), point[1].rows
        few = run.lower(params, *first_rows(rows)).compile() if is_batch else None
        return run.lower(params, *rows).compile(), few

    with ThreadPoolExecutor(8) as pool:
        return [(*point, *one) for point, one in zip(found, pool.map(compiled, found), strict=True)]


def first_rows(rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the first `FEW` rows of an operation's rows."""
    return jax.tree.map(lambda leaf: leaf[:FEW], rows)


def fault(
    params: Any, operation: Operation, values: np.ndarray, stock: Any, alone: Any
) -> str | None:
    """Returns what is wrong with values: beside stock XLA's; at "batch", bits of few rows alone."""
    if stock is not None:
        if values.dtype == np.float32:
            error = float(np.abs(values - stock).max() / np.abs(stock).max())
        else:
            error = float((values != stock).mean())
        if not error <= TOLERANCE:
            return f"{error:.1e} away from stock XLA"
    if alone is not None:
        few = np.asarray(alone(params, *first_rows(operation.rows)))
        if few.tobytes() != values[:FEW].tobytes():
            return f"{FEW} rows alone have other bits than among {len(values)}"
    return None


def seconds(run: Callable[[], Any]) -> float:
    """Returns the best of three means, each over as many calls as `LEAST_S` needs."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, round(LEAST_S / max(time.perf_counter() - begin, 1e-6)))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        best = min(best, (time.perf_counter() - begin) / calls)
    return best
