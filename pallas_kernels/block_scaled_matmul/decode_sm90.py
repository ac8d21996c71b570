"""Hopper body for few tokens: FP8 weights as the M operand, decoded in registers (P1, 4.5).

HBM moves one byte a weight: a warpgroup reads its e4m3 codes from shared memory, turns them into
exact bfloat16 with the 32x32 scales and multiplies them, from registers, with the tokens as the N
operand. The K order is that of ``pallas_sm90.matmul_bf16``.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import H200_SMS, load, pl, plgpu, tiled
from pallas_kernels.block_scaled_matmul.configs import DecodeTile
from pallas_kernels.block_scaled_matmul.ring import (
    COPY_REGISTERS,
    LINE,
    Ring,
    compute_registers,
    line_of,
    place_in_line,
    release_barrier,
)
from pallas_kernels.errors import KernelError

ROWS = 64  # weight rows of one MMA
WORD = 128  # K of one scale word
HALF = 64  # K of one decoded operand
GROUP = 32  # rows and channels of one scale
_FLOAT = jnp.float32


def _scale(word: jax.Array, byte: int) -> jax.Array:
    """Returns 2^(b - 127) of byte ``byte`` of int32 scale words, as bfloat16; b = 255 overflows."""
    shift = 23 - 8 * byte
    bits = lax.shift_left(word, shift) if shift > 0 else lax.shift_right_logical(word, -shift)
    # byte 0 means the subnormal 2^-127
    bits = jnp.maximum(bits & 0x7F800000, 0x00400000)
    return lax.bitcast_convert_type(bits, _FLOAT).astype(jnp.bfloat16)


def _decode(codes: jax.Array, words: jax.Array, half: int) -> jax.Array:
    """Returns one half of e4m3 codes [64, WORD] times their scales as bfloat16 [64, 64]; exact.

    ``words`` [64] hold the four scale bytes of every row.
    """

    def scaled(group: int) -> jax.Array:
        part = codes[:, group * GROUP : (group + 1) * GROUP].astype(_FLOAT).astype(jnp.bfloat16)
        return part * lax.broadcast_in_dim(_scale(words, group), part.shape, (0,))

    return lax.concatenate([scaled(2 * half), scaled(2 * half + 1)], 1)


def _body(*refs: Any, tile: DecodeTile, steps: int, grid: tuple[int, int], interpret: bool) -> None:
    x, w, scale, out, x_smem, w_smem, scale_smem, out_smem, full, empty, *staged = refs
    wg = lax.axis_index("wg")
    height = ROWS * tile.blocks * tile.warpgroups
    ring = Ring(tile.stages, full, empty)
    collective = "cluster" if tile.cluster > 1 else None

    def each_tile(visit: Any) -> Any:
        """Folds this block's tiles as visit((slot, steps so far), token, row) -> the next slot."""
        start = (jnp.int32(0), jnp.int32(0))

        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="sm", init_carry=start)
        def end(info: Any, carry: Any) -> Any:
            n, m = plgpu.planar_snake(info.index[0], grid, 0, tile.width)
            row = (n * tile.cluster + lax.axis_index("cluster")) * height
            return visit(carry, m * tile.tokens, row), carry[1] + steps

        return end

    @pl.when(wg == tile.warpgroups)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

        def visit(place: Any, token: jax.Array, row: jax.Array) -> jax.Array:
            first, before = place

            def one(k: jax.Array, slot: jax.Array) -> jax.Array:
                ring.acquire(slot, before + k)
                depth = pl.ds(k * tile.depth, tile.depth)
                plgpu.copy_gmem_to_smem(
                    w.at[pl.ds(row, height), depth], w_smem.at[slot], full.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(token, tile.tokens), depth],
                    x_smem.at[slot],
                    full.at[slot],
                    collective_axes=collective,
                )
                groups = line_of(lax.div(row, jnp.int32(GROUP)))
                words = pl.ds(k * (tile.depth // WORD), tile.depth // WORD)
                plgpu.copy_gmem_to_smem(scale.at[words, groups], scale_smem.at[slot], full.at[slot])

                return ring.after(slot)

            return lax.fori_loop(jnp.int32(0), jnp.int32(steps), one, first)

        ring.drain(*each_tile(visit))

    @pl.when(wg < tile.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(compute_registers(tile.warpgroups), action="increase")
        layout = plgpu.Layout.WGMMA.reduce(1)
        lane_row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout)
        is_low = lane_row < GROUP

        def visit(place: Any, token: jax.Array, row: jax.Array) -> jax.Array:
            rows = [(wg * tile.blocks + b) * ROWS for b in range(tile.blocks)]
            words = tile.depth // WORD
            place_of_row = place_in_line(lax.div(row, jnp.int32(GROUP)))

            def product(*accs: Any) -> tuple[list[jax.Array], jax.Array]:
                def multiply(acc: Any, part: jax.Array, tokens: Any) -> None:
                    """Issues acc += part @ tokens^T."""
                    if interpret:
                        staged[0][wg] = part
                        plgpu.commit_smem()
                        plgpu.wgmma(acc, staged[0].at[wg], tokens.T)
                    else:
                        plgpu.wgmma(acc, part, tokens.T)
                    if tile.in_flight:
                        plgpu.wgmma_wait(1)

                def body(k: jax.Array, slots: Any) -> Any:
                    last, slot = slots
                    ring.wait(slot)
                    parts = itertools.product(range(words), zip(accs, rows, strict=True))
                    for word, (acc, r) in parts:
                        codes = load(w_smem, (slot, pl.ds(r, ROWS), pl.ds(word * WORD, WORD)))
                        group = place_of_row + lax.div(r, jnp.int32(GROUP))
                        low = scale_smem[slot, word, group]
                        high = scale_smem[slot, word, group + 1]
                        row_words = jnp.where(is_low, low, high)
                        for half in range(2):
                            part = _decode(codes, row_words, half)
                            columns = pl.ds(word * WORD + half * HALF, HALF)
                            multiply(acc, part, x_smem.at[slot].at[:, columns])
                            if tile.in_flight and word == half == 0:
                                # the last product of the stage before is complete
                                @pl.when(k > 0)
                                def _free() -> None:
                                    ring.release(last)

                    if not tile.in_flight:
                        plgpu.wgmma_wait(0)
                        ring.release(slot)
                    return slot, ring.after(slot)

                start = (place[0], place[0])
                last, after = lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, start)
                values = [acc[...] for acc in accs]
                if tile.in_flight:
                    ring.release(last)
                return values, after

            shape = plgpu.ACC((ROWS, tile.tokens), _FLOAT)
            values, after = pl.run_scoped(product, *([shape] * tile.blocks))
            stage_out = out_smem.at[wg]
            for r, value in zip(rows, values, strict=True):
                for start in range(0, tile.tokens, tile.store):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    stage_out.T[...] = value[:, start : start + tile.store].astype(out.dtype)
                    plgpu.commit_smem()
                    target = out.at[pl.ds(token + start, tile.store), pl.ds(row + r, ROWS)]
                    plgpu.copy_smem_to_gmem(stage_out, target)
            return after

        each_tile(visit)
        plgpu.wait_smem_to_gmem(0)


def matmul_decode(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile: DecodeTile,
    interpret: bool = False,
    num_sms: int = H200_SMS,
) -> jax.Array:
    """Returns x[m, k] @ (w * scale)[n, k]^T as bfloat16 [m, n].

    Args:
        x: bfloat16 [m, k], k a multiple of ``tile.depth``.
        w: float8_e4m3fn [n, k].
        w_scale: int32 [k / 128, ceil(n / 32)], four E8M0 bytes a word, lowest K first; padded to
            a multiple of 4 columns.
        tile: the configuration.
        interpret: build the form the CPU interpreter can run.
        num_sms: blocks to launch.
    """
    m, (n, k) = x.shape[0], w.shape
    if k % tile.depth:
        raise KernelError(f"K must be a multiple of the depth of a stage, got {k} and {tile}")
    height = ROWS * tile.blocks * tile.warpgroups
    empty = release_barrier(tile.stages, tile.warpgroups, tile.cluster)
    scratch = [
        plgpu.SMEM(
            (tile.stages, tile.tokens, tile.depth),
            x.dtype,
            transforms=tiled(tile.depth, x.dtype, 128),
        ),
        plgpu.SMEM(
            (tile.stages, height, tile.depth), w.dtype, transforms=tiled(tile.depth, w.dtype, 128)
        ),
        plgpu.SMEM((tile.stages, tile.depth // WORD, LINE), jnp.int32),
        plgpu.SMEM((tile.warpgroups, tile.store, ROWS), x.dtype, transforms=tiled(ROWS, x.dtype)),
        plgpu.Barrier(num_arrivals=3, num_barriers=tile.stages),
        empty,
    ]
    if interpret:
        scratch.append(
            plgpu.SMEM((tile.warpgroups, ROWS, ROWS), x.dtype, transforms=tiled(ROWS, x.dtype))
        )
    grid = (-(-n // (height * tile.cluster)), -(-m // tile.tokens))
    return plgpu.kernel(
        functools.partial(_body, tile=tile, steps=k // tile.depth, grid=grid, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_types=scratch,
        grid=(num_sms // tile.cluster,),
        grid_names=("sm",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        kernel_name="block_scaled_matmul_sm90_decode",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, w, w_scale)
