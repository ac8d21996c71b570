"""Hopper bodies with activations as the M operand: bf16 x bf16, and FP8 with 128-blocks (4.5).

One persistent, warp-specialised kernel: a copying warpgroup streams (x, w) stages through shared
memory for every output tile without a bubble between tiles; ``warpgroups`` computing warpgroups
own 64 or 128 rows of a tile each. The K loop of an output element is the same sequence of
instructions for every M, every tile shape, every order of tiles and every stage count.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import H200_SMS, load, pl, plgpu, tiled
from pallas_kernels.block_scaled_matmul.configs import Tile
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

ROWS = 64  # rows of one MMA and of one store
BLOCK = 128  # K and N of one FP8 weight scale, K of one activation scale


def _store(pieces: list[jax.Array], out_smem: Any, out: Any) -> None:
    """Sends one warpgroup's tile to GMEM, piece by piece through ``out_smem``.

    Pieces are [ROWS, tile.store], the columns of the first ROWS rows first.
    """
    slots, rows, width = out_smem.shape
    across = out.shape[1] // width
    for i, piece in enumerate(pieces):
        # the tile before may have ended in any slot
        plgpu.wait_smem_to_gmem(slots - 1 if i else 0, wait_read_only=True)
        out_smem[i % slots] = piece.astype(out.dtype)
        plgpu.commit_smem()
        down, col = divmod(i, across)
        target = out.at[pl.ds(down * rows, rows), pl.ds(col * width, width)]
        plgpu.copy_smem_to_gmem(out_smem.at[i % slots], target)


def _bf16_tile(
    ring: Ring, slot: jax.Array, steps: int, x: Any, w: Any, tile: Tile
) -> tuple[list[jax.Array], jax.Array]:
    """One warpgroup's product over ``steps`` stages; one wgmma group stays in flight."""

    def product(acc: Any) -> tuple[jax.Array, jax.Array]:
        def issue(slot: jax.Array) -> None:
            ring.wait(slot)
            plgpu.wgmma(acc, x.at[slot], w.at[slot].T)

        def body(_: jax.Array, last: jax.Array) -> jax.Array:
            slot = ring.after(last)
            issue(slot)
            plgpu.wgmma_wait(1)
            ring.release(last)
            return slot

        issue(slot)
        last = lax.fori_loop(jnp.int32(1), jnp.int32(steps), body, slot)
        value = acc[...]
        ring.release(last)
        return value, ring.after(last)

    acc = plgpu.ACC((tile.rows, tile.cols), jnp.float32)
    value, slot = pl.run_scoped(product, acc)
    places = [
        (row, col) for row in range(0, tile.rows, ROWS) for col in range(0, tile.cols, tile.store)
    ]
    return [value[row : row + ROWS, col : col + tile.store] for row, col in places], slot


def _fp8_tile(
    ring: Ring,
    slot: jax.Array,
    steps: int,
    x: Any,
    w: Any,
    scales: Callable[[jax.Array, int], list[jax.Array]],
    tile: Tile,
    interpret: bool,
) -> tuple[list[jax.Array], jax.Array]:
    """One warpgroup's scaled product: every K step starts at zero and is promoted in FP32.

    A K step is one product for every ROWS rows. While ``tile.ahead`` products run, the one before
    them is promoted; ``tile.unroll`` steps follow each other without a gap.
    ``scales(slot, row)`` returns the factors of ROWS rows from ``row`` on, by chunk of columns.
    """
    chunks, halves = tile.cols // tile.store, tile.rows // ROWS
    shape = (ROWS, tile.store)

    def group(carry: Any, count: int) -> Any:
        slots = [carry[1]]
        for _ in range(count):
            slots.append(ring.after(slots[-1]))
        products = [(slot, half) for slot in slots[:count] for half in range(halves)]

        def promote(total: tuple[Any, ...], running: list[Any]) -> tuple[tuple[Any, ...], list]:
            """Adds the oldest product once no more than the younger ones run."""
            (acc, slot, half, factors), *younger = running
            value = plgpu.wgmma_accumulator_load(acc, wait_n=len(younger))
            if half == halves - 1:
                if interpret:  # it wants a fence between these reads of scales and the next copy
                    plgpu.commit_smem()
                ring.release(slot)
            parts = list(total)
            for c in range(chunks):
                factor = lax.broadcast_in_dim(factors[c], shape, (0,))
                part = value[:, c * tile.store : (c + 1) * tile.store]
                parts[half * chunks + c] += part * factor
            return tuple(parts), younger

        def multiply(index: int, total: tuple[Any, ...], running: list[Any]) -> tuple[Any, ...]:
            """Issues the products from ``index`` on; each accumulator is zeroed when it is due."""
            if index == len(products):
                while running:
                    total, running = promote(total, running)
                return total
            slot, half = products[index]
            if half == 0:
                ring.wait(slot)

            def issue(acc: Any) -> tuple[Any, ...]:
                plgpu.wgmma(acc, x.at[slot].at[pl.ds(half * ROWS, ROWS)], w.at[slot].T)
                issued = [*running, (acc, slot, half, scales(slot, half * ROWS))]
                if len(issued) <= tile.ahead:
                    return multiply(index + 1, total, issued)
                return multiply(index + 1, *promote(total, issued))

            return pl.run_scoped(issue, plgpu.ACC((ROWS, tile.cols), jnp.float32))

        return multiply(0, carry[0], []), slots[-1]

    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    count = min(tile.unroll, steps)
    carry = lax.fori_loop(
        jnp.int32(0),
        jnp.int32(steps // count),
        lambda _, carry: group(carry, count),
        ((zero,) * (halves * chunks), slot),
    )
    if steps % count:
        carry = group(carry, steps % count)
    return list(carry[0]), carry[1]


def _body(
    x: Any,
    w: Any,
    *refs: Any,
    tile: Tile,
    steps: int,
    grid: tuple[int, int],
    groups: int,
    scaled: bool,
    interpret: bool,
) -> None:
    if scaled:
        sx, sw, out, x_smem, w_smem, out_smem, full, empty, sx_smem, sw_smem = refs
    else:
        out, x_smem, w_smem, out_smem, full, empty = refs
        sx = sw = sx_smem = sw_smem = cast(Any, None)
    wg = lax.axis_index("wg")
    height = tile.rows * tile.warpgroups
    ring = Ring(tile.stages, full, empty)
    collective = {tile.share: "cluster"} if tile.cluster > 1 else {}
    # tiles of a cluster lie one below the other, or side by side if they share the rows of x
    stack = (1, tile.cluster) if tile.share == "x" else (tile.cluster, 1)
    blocks = (-(-grid[0] // stack[0]), -(-grid[1] // stack[1]))

    def origin(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        m, n = plgpu.planar_snake(index, blocks, tile.minor, tile.width)
        rank = lax.axis_index("cluster")
        if tile.share == "x":
            return m * height, (n * tile.cluster + rank) * tile.cols
        return (m * tile.cluster + rank) * height, n * tile.cols

    def each_tile(visit: Callable[[Any, jax.Array, jax.Array], Any]) -> Any:
        """Folds this block's tiles as visit((slot, steps so far), row, column) -> the next slot."""
        start = (jnp.int32(0), jnp.int32(0))

        @plgpu.nd_loop((blocks[0] * blocks[1],), collective_axes="sm", init_carry=start)
        def end(info: Any, carry: Any) -> Any:
            return visit(carry, *origin(info.index[0])), carry[1] + steps

        return end

    @pl.when(wg == tile.warpgroups)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

        def visit(place: Any, row: jax.Array, col: jax.Array) -> jax.Array:
            first, before = place
            offset = lax.div(col, jnp.int32(w.shape[0] // groups)) * (steps * tile.depth)

            def one(k: jax.Array, slot: jax.Array) -> jax.Array:
                ring.acquire(slot, before + k)
                depth = pl.ds(k * tile.depth, tile.depth)
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(row, height), pl.ds(offset + k * tile.depth, tile.depth)],
                    x_smem.at[slot],
                    full.at[slot],
                    collective_axes=collective.get("x"),
                )
                plgpu.copy_gmem_to_smem(
                    w.at[pl.ds(col, tile.cols), depth],
                    w_smem.at[slot],
                    full.at[slot],
                    collective_axes=collective.get("w"),
                )
                if scaled:
                    line = line_of(lax.div(col, jnp.int32(BLOCK)))
                    plgpu.copy_gmem_to_smem(sw.at[k, line], sw_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        sx.at[k, pl.ds(row, height)], sx_smem.at[slot], full.at[slot]
                    )

                return ring.after(slot)

            return lax.fori_loop(jnp.int32(0), jnp.int32(steps), one, first)

        ring.drain(*each_tile(visit))

    @pl.when(wg < tile.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(compute_registers(tile.warpgroups), action="increase")
        mine = pl.ds(wg * tile.rows, tile.rows)

        def visit(place: Any, row: jax.Array, col: jax.Array) -> jax.Array:
            x_rows = x_smem.at[:, mine]

            def scales(slot: jax.Array, first: int) -> list[jax.Array]:
                layout = plgpu.Layout.WGMMA.reduce(1)
                own = pl.ds(wg * tile.rows + first, ROWS)
                rows = load(sx_smem, (slot, own), layout=layout, optimized=False)
                base = 0 if tile.cols % BLOCK == 0 else lax.rem(col, jnp.int32(BLOCK))
                place = place_in_line(lax.div(col, jnp.int32(BLOCK)))
                ends = [place + (base + c) // BLOCK for c in range(0, tile.cols, tile.store)]
                return [rows * sw_smem[slot, end] for end in ends]

            if scaled:
                pieces, slot = _fp8_tile(
                    ring, place[0], steps, x_rows, w_smem, scales, tile, interpret
                )
            else:
                pieces, slot = _bf16_tile(ring, place[0], steps, x_rows, w_smem, tile)
            # A store beyond a result as narrow as one would land in it: Mosaic (jax 0.11) leaves
            # axes of one tile out of a copy, and their index with them.
            across, stored = tile.cols // tile.store, -(-min(tile.cols, out.shape[1]) // tile.store)
            pieces = [piece for i, piece in enumerate(pieces) if i % across < stored]
            columns = pl.ds(col, stored * tile.store)
            target = out.at[pl.ds(row + wg * tile.rows, tile.rows), columns]
            _store(pieces, out_smem.at[wg], target)
            return slot

        each_tile(visit)
        plgpu.wait_smem_to_gmem(0)


def _kernel(
    x: jax.Array,
    w: jax.Array,
    scales: tuple[jax.Array, ...],
    tile: Tile,
    out_dtype: Any,
    groups: int,
    interpret: bool,
    num_sms: int,
    name: str,
) -> jax.Array:
    rows, (n, k) = x.shape[0], w.shape
    height = tile.rows * tile.warpgroups
    if groups > 1 and tile.share == "x":
        raise KernelError(f"{name}: blocks beside each other may be of two groups, not {tile}")
    if tile.share == "x" and -(-w.shape[0] // tile.cols) % tile.cluster:
        raise KernelError(
            f"{name}: every block of a cluster needs columns, of {w.shape} for {tile}"
        )
    # every copy of a stage arrives once; every computing warpgroup of every block that shares
    # the stage releases it
    full = plgpu.Barrier(num_arrivals=4 if scales else 2, num_barriers=tile.stages)
    empty = release_barrier(tile.stages, tile.warpgroups, tile.cluster)
    stage = tiled(tile.depth, x.dtype)
    scratch = [
        plgpu.SMEM((tile.stages, height, tile.depth), x.dtype, transforms=stage),
        plgpu.SMEM((tile.stages, tile.cols, tile.depth), w.dtype, transforms=stage),
        plgpu.SMEM(
            (tile.warpgroups, tile.out_slots, ROWS, tile.store),
            out_dtype,
            transforms=tiled(tile.store, out_dtype),
        ),
        full,
        empty,
    ]
    if scales:
        scratch.append(plgpu.SMEM((tile.stages, height), jnp.float32))
        scratch.append(plgpu.SMEM((tile.stages, LINE), jnp.float32))
    return plgpu.kernel(
        functools.partial(
            _body,
            tile=tile,
            steps=k // tile.depth,
            grid=(-(-rows // height), -(-n // tile.cols)),
            groups=groups,
            scaled=bool(scales),
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((rows, n), out_dtype),
        scratch_types=scratch,
        grid=(num_sms // tile.cluster,),
        grid_names=("sm",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, w, *scales)


def matmul_bf16(
    x: jax.Array,
    w: jax.Array,
    tile: Tile,
    out_dtype: Any = jnp.bfloat16,
    groups: int = 1,
    interpret: bool = False,
    num_sms: int = H200_SMS,
    name: str = "matmul_bf16_sm90",
) -> jax.Array:
    """Returns x[m, g*k] @ w[g*n, k]^T group by group as ``out_dtype`` [m, g*n].

    Args:
        x: bfloat16 [m, groups * k].
        w: bfloat16 [groups * n, k]; k a multiple of tile.depth, n of tile.cols if groups > 1.
        tile: the configuration.
        out_dtype: bfloat16 or float32.
        groups: independent products side by side.
        interpret: run by the CPU interpreter.
        num_sms: blocks to launch.
        name: what the kernel is called in a program's text.
    """
    return _kernel(x, w, (), tile, out_dtype, groups, interpret, num_sms, name)


def matmul_fp8(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile: Tile,
    interpret: bool = False,
    num_sms: int = H200_SMS,
) -> jax.Array:
    """Returns the product of FP8 codes with 1x128 by 128x128 scales as bfloat16 [m, n].

    Args:
        x: float8_e4m3fn [m, k], k a multiple of 128.
        x_scale: float32 [k / 128, m], the K axis first, m a multiple of 4.
        w: float8_e4m3fn [n, k].
        w_scale: float32 [k / 128, ceil(n / 128)], padded to a multiple of 4 columns.
        tile: the configuration, depth 128.
        interpret: run by the CPU interpreter.
        num_sms: blocks to launch.
    """
    if tile.depth != BLOCK:
        raise KernelError(f"an FP8 tile has the depth of a scale, {BLOCK}, not {tile}")
    scales = (x_scale, w_scale)
    name = "block_scaled_matmul_sm90_fp8"
    return _kernel(x, w, scales, tile, jnp.bfloat16, 1, interpret, num_sms, name)
