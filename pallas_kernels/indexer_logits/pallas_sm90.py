"""Index scores on sm_90: keys are the wgmma M operand, read from the cache straight to registers.

A program scores a stretch of one sequence's keys for one tile of query rows. Its warpgroups take
tiles of 64 keys in turn; a thread reads the 16 bytes of its next key while the products of the
present one run. The queries stay in shared memory: the columns of the product are (head, row), so
that the eight rows of one head are one accumulator fragment and the sum over heads adds fragments
in ascending order. A single row has only its heads as columns; lanes exchange them (`sum_heads`).
BF16 at every stage and the head order are those of the reference (model.md 9.3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import core
from pallas_kernels._mosaic import load, pl, plgpu, round_up, tiled
from pallas_kernels.indexer_logits.configs import IndexerConfig
from pallas_kernels.indexer_logits.decode_sm90 import (
    CHANNELS,
    CODES,
    KEYS,
    PER_KEY,
    SCALES,
    decode_keys,
    decode_keys_plain,
    sum_heads,
    sum_heads_plain,
)

ROWS = 8  # query rows of a tile that shares its keys
_HALF = 64  # K columns of one product


class _Refs(NamedTuple):
    """What the body gets: seven inputs, the output, then scratch."""

    queries: Any
    weight: Any
    codes: Any
    scale: Any
    pages: Any
    most: Any
    length: Any
    out: Any
    q_smem: Any
    w_smem: Any
    ready: Any
    out_smem: Any = None
    decoded: Any = None  # the interpreter's operand, which cannot be in registers there


@dataclass(frozen=True)
class _Launch:
    """Static facts of a launch.

    Attributes:
        config: launch parameters.
        rows: query rows of a tile, 1 or 8.
        columns: of the product: heads times rows.
        span: keys of a program.
        blocks: tiles of 64 keys that the cache of a sequence holds.
        page_keys: keys of a page.
        interpret: build the form that the CPU interpreter can run.
    """

    config: IndexerConfig
    rows: int
    columns: int
    span: int
    blocks: int
    page_keys: int
    interpret: bool

    @property
    def taken(self) -> int:
        """Tiles of keys that a warpgroup takes at once."""
        return 2 if self.rows == 1 else 1

    @property
    def steps(self) -> int:
        """Steps of a warpgroup."""
        return self.span // (KEYS * self.taken * self.config.warpgroups)

    def block(self, step: Any) -> jax.Array:
        """Returns the first tile of keys of this warpgroup's step."""
        group = step * self.config.warpgroups + lax.axis_index("wg")
        start = lax.axis_index("part") * (self.span // KEYS)
        return start + group * self.taken


def _read(launch: _Launch, refs: _Refs, step: Any) -> tuple[jax.Array, ...]:
    """Returns the bytes of a step's keys: codes and scales of each of its tiles."""
    found = []
    for extra in range(launch.taken):
        # what lies behind the cache is computed from its last keys and never seen
        block = jnp.minimum(launch.block(step) + extra, launch.blocks - 1)
        first = block * KEYS
        page = refs.pages[lax.axis_index("tile"), lax.div(first, np.int32(launch.page_keys))]
        rows = pl.ds(lax.rem(first, np.int32(launch.page_keys)), KEYS)
        found.append(load(refs.codes, (page, rows), layout=CODES, optimized=False))
        found.append(load(refs.scale, (page, rows), layout=SCALES, optimized=False))
    return tuple(found)


def _dots(launch: _Launch, refs: _Refs, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the float32 products [64, columns] of one tile of keys with the queries."""
    if launch.interpret:
        staged = refs.decoded.at[lax.axis_index("wg")]
        staged[...] = decode_keys_plain(codes, scale)
        plgpu.commit_smem()
        parts = [staged.at[:, pl.ds(k, _HALF)] for k in range(0, CHANNELS, _HALF)]
    else:
        keys = decode_keys(codes, scale)
        parts = [keys[:, k : k + _HALF] for k in range(0, CHANNELS, _HALF)]

    def scoped(acc: Any) -> jax.Array:
        for i, part in enumerate(parts):
            plgpu.wgmma(acc, part, refs.q_smem.at[:, pl.ds(i * _HALF, _HALF)].T)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(scoped, plgpu.ACC((KEYS, launch.columns), jnp.float32))


def _weighted(launch: _Launch, dots: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns bf16(relu(bf16(dots)) * weight) of float32 dots [64, n] and bfloat16 weight [n]."""
    weight = lax.broadcast_in_dim(weight, dots.shape, (1,))
    if launch.interpret:
        # on a CPU, XLA may leave out the rounding of a bfloat16 product
        positive = jnp.maximum(core.round_bf16(dots), 0)
        return core.round_bf16(positive * weight.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.maximum(dots.astype(jnp.bfloat16), jnp.bfloat16(0)) * weight


def _by_column(ref: Any, first: Any, size: int) -> jax.Array:
    """Returns values [size] of a reference as factors of the product's columns."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    return load(ref, pl.ds(first, size), layout=layout, optimized=False)


def _score_rows(launch: _Launch, refs: _Refs, held: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the float32 sums over heads [64, 8] of one tile of keys with eight rows."""
    dots = _dots(launch, refs, *held)
    total = None
    for first in range(0, launch.columns, ROWS):
        part = _weighted(
            launch, dots[:, first : first + ROWS], _by_column(refs.w_smem, first, ROWS)
        )
        value = part.astype(jnp.float32)
        total = value if total is None else total + value
    assert total is not None
    return total


def _score_row(launch: _Launch, refs: _Refs, held: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the float32 sums over heads [128] of two tiles of keys with one row."""
    weight = _by_column(refs.weight.at[lax.axis_index("tile")], 0, launch.columns)
    low = _weighted(launch, _dots(launch, refs, *held[:2]), weight)
    high = _weighted(launch, _dots(launch, refs, *held[2:]), weight)
    return (sum_heads_plain if launch.interpret else sum_heads)(low, high)


def _places(launch: _Launch, first: Any) -> jax.Array:
    """Returns the index of every key of a step in the layout of its scores."""
    shape = (2 * KEYS,) if launch.rows == 1 else (KEYS, ROWS)
    layout = PER_KEY if launch.rows == 1 else plgpu.Layout.WGMMA
    return first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)


def _store(launch: _Launch, refs: _Refs, step: jax.Array, scores: jax.Array) -> None:
    """Writes the scores of a step, float32, rounded once."""
    tile, first = lax.axis_index("tile"), launch.block(step) * KEYS
    scores = scores.astype(jnp.bfloat16)
    if launch.rows == 1:
        refs.out[tile, pl.ds(first, 2 * KEYS)] = scores
        return
    stage = refs.out_smem.at[lax.axis_index("wg")]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stage.T[...] = scores
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, refs.out.at[pl.ds(tile * ROWS, ROWS), pl.ds(first, KEYS)])


def _body(*arguments: Any, launch: _Launch) -> None:
    refs, tile = _Refs(*arguments), lax.axis_index("tile")
    score = _score_row if launch.rows == 1 else _score_rows

    @pl.when(lax.axis_index("wg") == 0)
    def _() -> None:
        queries = pl.ds(tile * launch.columns, launch.columns)
        plgpu.copy_gmem_to_smem(refs.queries.at[queries], refs.q_smem, refs.ready)
        if launch.rows > 1:
            plgpu.copy_gmem_to_smem(refs.weight.at[tile], refs.w_smem, refs.ready)

    most = refs.most[tile]
    # steps with a visible key come first
    ahead = most - launch.block(np.int32(0)) * KEYS
    span = KEYS * launch.taken * launch.config.warpgroups
    busy = jnp.clip(lax.div(ahead + (span - 1), np.int32(span)), 0, launch.steps)
    busy = jnp.where(ahead > 0, busy, 0)
    if launch.rows == 1:
        limit = refs.length[tile]
    else:
        lengths = _by_column(refs.length, tile * ROWS, ROWS)
        limit = lax.broadcast_in_dim(lengths, (KEYS, ROWS), (1,))
    held = _read(launch, refs, np.int32(0))
    plgpu.barrier_wait(refs.ready)

    def visit(step: jax.Array, held: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        following = _read(launch, refs, jnp.minimum(step + 1, launch.steps - 1))
        total = score(launch, refs, held)
        visible = _places(launch, launch.block(step) * KEYS) < limit
        _store(launch, refs, step, jnp.where(visible, total, -jnp.inf))
        return following

    lax.fori_loop(0, busy, visit, held)

    def blank(step: jax.Array, _: None) -> None:
        nothing = jnp.where(_places(launch, np.int32(0)) < 0, np.float32(0), -jnp.inf)
        _store(launch, refs, step, nothing)

    lax.fori_loop(busy, launch.steps, blank, None)
    plgpu.wait_smem_to_gmem(0)


def build(config: IndexerConfig, *, rows: int, interpret: bool = False) -> Callable[..., jax.Array]:
    """Returns the kernel as a function of arrays.

    The function takes
        queries: bfloat16 [tiles * heads * rows, 128], (tile, head, row) major to minor, channels in
            the order of decode_sm90.key_order.
        weight: bfloat16 [tiles, heads * rows], in that order.
        codes, scale: uint8 [pages, page_keys, 64] and [pages, page_keys, 4], the index cache.
        pages: int32 [tiles, l].
        most: int32 [tiles], the largest length of a tile.
        length: int32 [tiles * rows].
    and returns bfloat16 [tiles * rows, at least l * page_keys], -inf at indices >= length.

    Args:
        config: launch parameters; do not change bits.
        rows: query rows of a tile, 1 or 8.
        interpret: build the form that the CPU interpreter can run.
    """

    def call(
        queries: jax.Array,
        weight: jax.Array,
        codes: jax.Array,
        scale: jax.Array,
        pages: jax.Array,
        most: jax.Array,
        length: jax.Array,
    ) -> jax.Array:
        tiles, columns = weight.shape
        page_keys = codes.shape[1]
        keys = pages.shape[1] * page_keys
        span = min(config.keys, round_up(keys, 2 * KEYS * config.warpgroups))
        launch = _Launch(config, rows, columns, span, keys // KEYS, page_keys, interpret)
        parts = -(-keys // span)

        def body(*refs: Any) -> None:
            _body(*refs, launch=launch)

        def operand(*shape: int) -> Any:
            transforms = tiled(shape[-1], jnp.bfloat16, 128)
            return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

        scratch = [
            operand(columns, CHANNELS),
            plgpu.SMEM((columns,), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=min(rows, 2)),
        ]
        stage = (config.warpgroups, ROWS, KEYS)
        scratch.append(plgpu.SMEM(stage, jnp.bfloat16, transforms=tiled(32, jnp.bfloat16, 64)))
        if interpret:
            scratch.append(operand(config.warpgroups, KEYS, CHANNELS))
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((tiles * rows, parts * span), jnp.bfloat16),
            scratch_types=scratch,
            grid=(tiles, parts),
            grid_names=("tile", "part"),
            num_threads=config.warpgroups,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=False
            ),
            kernel_name=f"indexer_logits_{'row' if rows == 1 else 'rows'}_sm90",
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(queries, weight, codes, scale, pages, most, length)

    return call
