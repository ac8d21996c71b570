"""Sparse attention on sm_90: one block of threads a query token and 64 heads (kernels.md 4.1).

Two gathering warpgroups turn cache rows into bfloat16 key blocks of 64 ranks in shared memory. Two
multiplying warpgroups fold them (fold_sm90.py); each owns 256 of the 512 output channels. Blocks
are folded in the order of the list with the arithmetic of model.md 3.6: the running maximum moves
once a block, probabilities are rounded to BF16 against it, the sink joins at the end.
The grid is persistent, so that the next token's rows are gathered while a token is finished; what a
token computes depends on its own list only. Prefill is the same kernel with many tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._mosaic import H200_SMS, load, pl, plgpu, tiled
from pallas_kernels.sparse_mla_decode import gather_sm90, reference
from pallas_kernels.sparse_mla_decode.configs import MlaConfig
from pallas_kernels.sparse_mla_decode.fold_sm90 import (
    HALF_RANKS,
    HEADS,
    PART,
    ROWS,
    Blocks,
    fold,
    over,
)
from pallas_kernels.sparse_mla_decode.gather_sm90 import (
    BLOCK,
    DIM,
    FIRST_GATHERER,
    GATHERERS,
    HALF,
)
from pallas_kernels.sparse_mla_decode.reference import LOWEST

SLOTS = 2
STORE = 64  # columns of one output piece
_CONSUMERS = FIRST_GATHERER
_PART = BLOCK // GATHERERS  # rows of a block that one gathering warpgroup brings


class _Set(NamedTuple):
    """Cache rows and the ids of every token."""

    cache: Any
    ids: Any


class _Refs(NamedTuple):
    """What the body gets, inputs first."""

    q: Any
    sink: Any
    sets: tuple[_Set, ...]
    out: Any
    lse: Any
    blocks: Blocks
    out_smem: Any
    q_full: Any
    q_empty: Any
    full: Any
    empty: Any
    lse_smem: Any = None


@dataclass(frozen=True)
class _Launch:
    """Static facts of a launch."""

    config: MlaConfig
    interpret: bool
    blocks: int  # of threads
    groups: int  # of 64 heads
    items: int

    @property
    def mine(self) -> jax.Array:
        """Returns how many (token, group of heads) items this block works on."""
        left = self.items - lax.axis_index("sm") + (self.blocks - 1)
        return lax.div(left, np.int32(self.blocks))

    def item(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (token, first head) of this block's item i."""
        linear = lax.axis_index("sm") + i * self.blocks
        groups = np.int32(self.groups)
        return lax.div(linear, groups), lax.rem(linear, groups) * HEADS

    def used(self, ids: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (bits of the blocks of a token's ids that hold one, their number)."""
        if not self.interpret:
            return gather_sm90.used_blocks(ids)
        some = (ids[...] >= 0).reshape(-1, BLOCK).any(axis=1).astype(jnp.int32)
        places = jnp.arange(some.shape[0], dtype=jnp.int32)
        return jnp.sum(some << places, dtype=jnp.int32), jnp.sum(some, dtype=jnp.int32)


def _slot(step: jax.Array) -> jax.Array:
    return lax.rem(step, np.int32(SLOTS))


def _first(bits: jax.Array) -> jax.Array:
    """Returns the place of the lowest set bit; 0 if there is none."""
    return jnp.maximum(np.int32(31) - lax.clz(bits & -bits), np.int32(0))


def _gather_set(
    launch: _Launch, refs: _Refs, rows: _Set, used: Any, token: jax.Array, step: jax.Array
) -> jax.Array:
    """Fills a slot with every used block of one set of a token; returns the next step."""
    bits, count = used

    def ids_of(bits: jax.Array) -> jax.Array:
        return gather_sm90.load_ids(rows.ids.at[token, pl.ds(_first(bits) * BLOCK, BLOCK)])

    def acquire(step: jax.Array) -> None:
        @pl.when(step >= SLOTS)
        def _() -> None:
            plgpu.barrier_wait(refs.empty.at[_slot(step)])

    def release(slot: jax.Array) -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.full.at[slot])

    def interpreted(i: jax.Array, carry: Any) -> Any:
        bits, step = carry
        acquire(step)
        ids = rows.ids[token, pl.ds(_first(bits) * BLOCK, BLOCK)]
        keys = reference.read_rows(rows.cache[...], ids, DIM).astype(jnp.bfloat16)
        mine = pl.ds((lax.axis_index("wg") - _CONSUMERS) * _PART, _PART)
        mask = jnp.where(ids >= 0, 0.0, -jnp.inf)
        first = (lax.axis_index("wg") - _CONSUMERS) * _PART
        keys = lax.dynamic_slice_in_dim(keys, first, _PART)
        for half in range(2):
            columns = slice(half * HALF, (half + 1) * HALF)
            refs.blocks.keys[_slot(step), half, mine] = keys[:, columns]
        refs.blocks.mask[_slot(step), mine] = lax.dynamic_slice_in_dim(mask, first, _PART)
        release(_slot(step))
        return bits & (bits - 1), step + 1

    def compiled(i: jax.Array, carry: Any) -> Any:
        bits, step, ids, registers = carry
        rest, slot = bits & (bits - 1), _slot(step)
        # on their way while this block is decoded
        following = ids_of(rest) | jnp.where(rest != 0, np.int32(0), np.int32(-1))
        acquire(step)
        gather_sm90.store_mask(ids, refs.blocks.mask.at[slot])
        gather_sm90.store_rows(registers, refs.blocks.keys.at[slot])
        # the next rows are read behind the fence, which waits for every load before it
        release(slot)
        return rest, step + 1, following, gather_sm90.load_rows(rows.cache, following)

    if launch.interpret:
        return lax.fori_loop(0, count, interpreted, (bits, step))[1]
    ids = ids_of(bits)
    registers = gather_sm90.load_rows(rows.cache, ids)
    return lax.fori_loop(0, count, compiled, (bits, step, ids, registers))[1]


def _gather(launch: _Launch, refs: _Refs) -> None:
    """Brings the key blocks of all items of this block, and (one warpgroup alone) the queries."""
    brings_queries = lax.axis_index("wg") == FIRST_GATHERER

    def visit(i: jax.Array, step: jax.Array) -> jax.Array:
        token, head = launch.item(i)

        @pl.when(brings_queries & (i > 0))
        def _() -> None:
            plgpu.barrier_wait(refs.q_empty)

        @pl.when(brings_queries)
        def _() -> None:
            for half in range(2):
                source = refs.q.at[token, pl.ds(head, HEADS), pl.ds(half * HALF, HALF)]
                plgpu.copy_gmem_to_smem(source, refs.blocks.q.at[half], refs.q_full)

        # of all sets at once: a set's ids would be waited for behind the rows of the one before
        used = [launch.used(rows.ids.at[token]) for rows in refs.sets]
        for rows, blocks in zip(refs.sets, used, strict=True):
            step = _gather_set(launch, refs, rows, blocks, token, step)
        return step

    mine = launch.mine
    done = lax.fori_loop(0, mine, visit, np.int32(0))

    # what was handed over last is waited for once more, so that no barrier is left armed
    @pl.when(brings_queries & (mine > 0))
    def _() -> None:
        plgpu.barrier_wait(refs.q_empty)

    def drain(step: jax.Array, _: None) -> None:
        plgpu.barrier_wait(refs.empty.at[_slot(step)])

    lax.fori_loop(jnp.maximum(done - SLOTS, 0), done, drain, None)


def _finish(refs: _Refs, carry: Any, token: jax.Array, head: jax.Array) -> None:
    """Lets the sink join, divides, and stores this warpgroup's channels."""
    wg = lax.axis_index("wg")
    maximum, denominator, total = carry
    heads = pl.ds(head, HEADS)
    sink = load(refs.sink, heads, layout=ROWS, optimized=False)
    final = jnp.maximum(maximum, sink)
    shrink = jnp.exp(maximum - final)
    denominator = denominator * shrink + jnp.exp(sink - final)
    slots = refs.out_smem.shape[1]
    for i, column in enumerate(range(0, HALF, STORE)):
        first = column % PART
        piece = total[column // PART][:, first : first + STORE]
        piece = piece * over(shrink, piece.shape, 0) / over(denominator, piece.shape, 0)
        plgpu.wait_smem_to_gmem(slots - 1 if i else 0, wait_read_only=True)
        staged = refs.out_smem.at[wg, i % slots]
        staged[...] = piece.astype(jnp.bfloat16)
        plgpu.commit_smem()
        columns = pl.ds(wg * HALF + column, STORE)
        plgpu.copy_smem_to_gmem(staged, refs.out.at[token, heads, columns])
    if refs.lse is not None:

        @pl.when(wg == 0)
        def _() -> None:
            refs.lse_smem[...] = final + jnp.log(denominator)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.lse_smem, refs.lse.at[token, heads])


def _attend(launch: _Launch, refs: _Refs) -> None:
    """Folds the key blocks of all items of this block."""

    def rows_of(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), ROWS)

    def visit(i: jax.Array, step: jax.Array) -> jax.Array:
        token, head = launch.item(i)
        count = sum((launch.used(rows.ids.at[token])[1] for rows in refs.sets), np.int32(0))
        plgpu.barrier_wait(refs.q_full)

        def visit_block(b: jax.Array, carry: Any, total: Any) -> Any:
            slot = _slot(step + b)
            plgpu.barrier_wait(refs.full.at[slot])
            folded = fold(refs.blocks, slot, carry, total, launch.interpret)
            plgpu.barrier_arrive(refs.empty.at[slot])
            return folded

        start = (rows_of(LOWEST), rows_of(0.0))

        def accumulate(*total: Any) -> Any:
            sums = lax.fori_loop(0, count, lambda b, carry: visit_block(b, carry, total)[0], start)
            return (*sums, tuple(part[...] for part in total))

        if launch.interpret:
            empty = (jnp.zeros((HEADS, PART), jnp.float32),) * (HALF // PART)
            sums, total = lax.fori_loop(0, count, lambda b, c: visit_block(b, *c), (start, empty))
            folded = (*sums, total)
        else:
            parts = [plgpu.ACC((HEADS, PART), jnp.float32)] * (HALF // PART)
            folded = pl.run_scoped(accumulate, *parts)
        plgpu.barrier_arrive(refs.q_empty)
        _finish(refs, folded, token, head)
        return step + count

    lax.fori_loop(0, launch.mine, visit, np.int32(0))
    plgpu.wait_smem_to_gmem(0)


def build(
    config: MlaConfig, *, with_lse: bool = False, interpret: bool = False, num_sms: int = H200_SMS
) -> Callable[..., Any]:
    """Returns the kernel as a function of arrays.

    The function takes
        q: bfloat16 [t, heads, 512], heads a multiple of 64.
        sink: float32 [heads].
        caches: one or two uint8 [rows, 528] (Q8) or [rows, 288] (Q4n), in the order of the list.
        ids: int32 [t, n] beside each cache, n a multiple of 64 and at most 2048; -1 for no row.
    and returns bfloat16 [t, heads, 512], with the log-sum-exp float32 [t, heads] if asked for.

    Args:
        config: launch parameters; do not change bits.
        with_lse: return the log-sum-exp too.
        interpret: build the form that the CPU interpreter can run.
        num_sms: size of the persistent grid.
    """

    def call(q: jax.Array, sink: jax.Array, *caches_and_ids: jax.Array) -> Any:
        tokens, heads, dim = q.shape
        groups = heads // HEADS
        items = tokens * groups
        launch = _Launch(config, interpret, min(num_sms, items), groups, items)
        sets = len(caches_and_ids) // 2

        def body(q: Any, sink: Any, *refs: Any) -> None:
            rows = tuple(_Set(*refs[2 * i : 2 * i + 2]) for i in range(sets))
            out, *rest = refs[2 * sets :]
            lse = rest.pop(0) if with_lse else None
            shared, handed = rest[:shared_count], rest[shared_count:]
            mine = _Refs(q, sink, rows, out, lse, Blocks(*shared), *handed)
            wg = lax.axis_index("wg")

            @pl.when(wg >= _CONSUMERS)
            def _() -> None:
                plgpu.set_max_registers(config.gather_registers, action="decrease")
                _gather(launch, mine)

            @pl.when(wg < _CONSUMERS)
            def _() -> None:
                plgpu.set_max_registers(config.registers, action="increase")
                _attend(launch, mine)

        wide = tiled(HALF, jnp.bfloat16, 128)
        scratch = [
            plgpu.SMEM((2, HEADS, HALF), jnp.bfloat16, transforms=wide),
            plgpu.SMEM((SLOTS, 2, BLOCK, HALF), jnp.bfloat16, transforms=wide),
            plgpu.SMEM((SLOTS, BLOCK), jnp.float32),
        ]
        narrow = tiled(HALF_RANKS, jnp.bfloat16, 64)
        scratch += [
            plgpu.SMEM((2, HEADS, HALF_RANKS), jnp.bfloat16, transforms=narrow),
            plgpu.SMEM((2, HEADS), jnp.float32),
            plgpu.SMEM((2, HEADS), jnp.float32),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
        ]
        shared_count = len(scratch)
        pieces = (_CONSUMERS, config.out_slots, HEADS, STORE)
        scratch += [
            plgpu.SMEM(pieces, jnp.bfloat16, transforms=tiled(STORE, jnp.bfloat16, 128)),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
            plgpu.Barrier(num_arrivals=GATHERERS, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=SLOTS),
        ]
        out: Any = jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16)
        if with_lse:
            scratch.append(plgpu.SMEM((HEADS,), jnp.float32))
            out = (out, jax.ShapeDtypeStruct((tokens, heads), jnp.float32))
        return plgpu.kernel(
            body,
            out_type=out,
            scratch_types=scratch,
            grid=(launch.blocks,),
            grid_names=("sm",),
            num_threads=_CONSUMERS + GATHERERS,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=False
            ),
            kernel_name="sparse_mla_decode_sm90",
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(q, sink, *caches_and_ids)

    return call
