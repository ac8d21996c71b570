"""Blackwell body of the BF16 product: one output tile a block, accumulated in tensor memory.

Compiled for sm_100a, never run there (status "compiled"). One warpgroup: warp 0 streams stages,
warp 1 issues the products, then all four warps store the tile. Same K order as on sm_90.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import pl, plgpu, tiled
from pallas_kernels.block_scaled_matmul.ring import Ring

ROWS = 128
COLS = 256
DEPTH = 64
STAGES = 4


def _body(
    x: Any,
    w: Any,
    out: Any,
    x_smem: Any,
    w_smem: Any,
    out_smem: Any,
    acc: Any,
    full: Any,
    empty: Any,
    done: Any,
    *,
    steps: int,
) -> None:
    rows = pl.ds(lax.axis_index("m") * ROWS, ROWS)
    cols = pl.ds(lax.axis_index("n") * COLS, COLS)
    ring = Ring(STAGES, full, empty)

    @plgpu.warp_map
    def _per_warp(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _copy() -> None:
            def one(k: jax.Array, slot: jax.Array) -> jax.Array:
                ring.acquire(slot, k)
                depth = pl.ds(k * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x.at[rows, depth], x_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(w.at[cols, depth], w_smem.at[slot], full.at[slot])
                return ring.after(slot)

            last = lax.fori_loop(jnp.int32(0), jnp.int32(steps), one, jnp.int32(0))
            ring.drain(last, jnp.int32(steps))

        @pl.when(warp == 1)
        def _multiply() -> None:
            def one(k: jax.Array, slot: jax.Array) -> jax.Array:
                ring.wait(slot)
                plgpu.tcgen05_mma(
                    acc, x_smem.at[slot], w_smem.at[slot].T, empty.at[slot], accumulate=k > 0
                )
                return ring.after(slot)

            lax.fori_loop(jnp.int32(0), jnp.int32(steps), one, jnp.int32(0))
            plgpu.tcgen05_commit_arrive(done)

    plgpu.barrier_wait(done)
    width = out_smem.shape[2]
    for i, start in enumerate(range(0, COLS, width)):
        columns = pl.ds(start, width)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out_smem[i % 2] = plgpu.async_load_tmem(acc.at[:, columns]).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[i % 2], out.at[rows, cols].at[:, columns])
    plgpu.wait_load_tmem()
    plgpu.wait_smem_to_gmem(0)


def matmul(x: jax.Array, w: jax.Array, out_dtype: Any, interpret: bool = False) -> jax.Array:
    """Returns bfloat16 x[m, k] @ w[n, k]^T as ``out_dtype`` [m, n]."""
    m, n = x.shape[0], w.shape[0]
    # TMA takes rows in eights; zeros add nothing, and only odd widths are copied
    high, wide, deep = -m % 8, -n % 8, -x.shape[1] % DEPTH
    if high or deep:
        x = jnp.pad(x, [(0, high), (0, deep)])
    if wide or deep:
        w = jnp.pad(w, [(0, wide), (0, deep)])
    operand = tiled(DEPTH, x.dtype)
    store = 128 // jnp.dtype(out_dtype).itemsize  # one swizzled row
    ordered = {"num_arrivals": 1, "orders_tensor_core": True}
    out = plgpu.kernel(
        functools.partial(_body, steps=x.shape[1] // DEPTH),
        out_type=jax.ShapeDtypeStruct((m + high, n + wide), out_dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), x.dtype, transforms=operand),
            plgpu.SMEM((STAGES, COLS, DEPTH), w.dtype, transforms=operand),
            plgpu.SMEM((2, ROWS, store), out_dtype, transforms=tiled(store, out_dtype)),
            plgpu.TMEM((ROWS, COLS), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, **ordered),
            plgpu.Barrier(**ordered),
        ],
        grid=(-(-m // ROWS), -(-n // COLS)),
        grid_names=("m", "n"),
        num_threads=1,
        thread_name="wg",
        kernel_name="matmul_bf16_sm100",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, w)
    return out[:m, :n]
