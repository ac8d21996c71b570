"""Grouped MXFP4 products on sm_90: weights are the wgmma M operand, decoded in registers.

One persistent kernel serves gate+up and down, decode and prefill (kernels.md 4.6). Work items are
(tile of tokens, row tile of weights). A producer warpgroup streams weight units and token tiles by
TMA through a ring of stages that runs on across items; every consumer warpgroup owns one 128-row
unit of the row tile. The K loop is the same for every tile of tokens: bits of an output do not
depend on the number of tokens a tile holds, on the other rows, or on the configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._mosaic import load, pl, plgpu, tiled
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul.configs import GroupedConfig
from pallas_kernels.grouped_matmul.decode_sm90 import decode_registers
from pallas_kernels.grouped_matmul.layout import (
    BLOCK_ROWS,
    HALF_CHANNELS,
    UNIT_CHANNELS,
    UNIT_WORDS,
    decode_block,
)
from pallas_kernels.rms_norm_quant.q8 import q8_codes, q8_scale


class _Refs(NamedTuple):
    """What the body gets: seven inputs, the output, then scratch."""

    x: Any
    words: Any
    weight: Any
    expert: Any
    first: Any
    valid: Any
    count: Any
    out: Any
    x_smem: Any
    w_smem: Any
    out_smem: Any
    full: Any
    empty: Any
    decoded: Any = None  # the interpreter's operand, which cannot be in registers there


@dataclass(frozen=True)
class _Launch:
    """Static facts of a launch."""

    config: GroupedConfig
    gate_up: bool
    limit: float
    interpret: bool
    num_sms: int
    units: int
    steps: int

    @property
    def row_tiles(self) -> int:
        """Row tiles of an expert."""
        return self.units // self.config.consumers

    @property
    def out_blocks(self) -> int:
        """64-column blocks of output that a unit makes."""
        return 1 if self.gate_up else 2

    @property
    def rows_a_store(self) -> int:
        """Rows that one TMA store writes: those behind the valid ones are skipped."""
        return 8 if self.config.tile_n <= 32 else 16

    def slot(self, step: Any) -> Any:
        """Returns the stage of the ring that a step uses."""
        return lax.rem(step, np.int32(self.config.stages))

    def mine(self, refs: _Refs) -> jax.Array:
        """Returns how many items this block works on."""
        total = refs.count[0] * self.row_tiles
        return lax.div(total - lax.axis_index("sm") + (self.num_sms - 1), np.int32(self.num_sms))

    def item(self, i: Any) -> tuple[Any, Any]:
        """Returns (tile of tokens, row tile) of this block's item i: row tiles vary fastest."""
        linear = lax.axis_index("sm") + i * self.num_sms
        return lax.div(linear, np.int32(self.row_tiles)), lax.rem(linear, np.int32(self.row_tiles))


def _produce(launch: _Launch, refs: _Refs) -> None:
    """Streams the stages of all items of this block."""
    config = launch.config

    def load_item(i: jax.Array, step: jax.Array) -> jax.Array:
        tile, row_tile = launch.item(i)
        expert, first = refs.expert[tile], pl.multiple_of(refs.first[tile], 8)
        units = pl.ds(row_tile * config.consumers, config.consumers)

        def load_step(k: jax.Array, step: jax.Array) -> jax.Array:
            slot = launch.slot(step)

            @pl.when(step >= config.stages)
            def _() -> None:
                plgpu.barrier_wait(refs.empty.at[slot])

            plgpu.copy_gmem_to_smem(
                refs.words.at[expert, units, k], refs.w_smem.at[slot], refs.full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                refs.x.at[pl.ds(first, config.tile_n), pl.ds(k * UNIT_CHANNELS, UNIT_CHANNELS)],
                refs.x_smem.at[slot],
                refs.full.at[slot],
            )
            return step + 1

        return lax.fori_loop(0, launch.steps, load_step, step)

    done = lax.fori_loop(0, launch.mine(refs), load_item, np.int32(0))

    # every stage that was filled is waited for once more, so that no barrier is left armed
    def drain(step: jax.Array, _: None) -> None:
        plgpu.barrier_wait(refs.empty.at[launch.slot(step)])

    lax.fori_loop(jnp.maximum(done - config.stages, 0), done, drain, None)


def _multiply(
    launch: _Launch, refs: _Refs, i: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the float32 products [64, width] of both blocks of this warpgroup's unit."""
    wg = lax.axis_index("wg")

    def scoped(*accs: Any) -> tuple[jax.Array, jax.Array]:
        def multiply_step(k: jax.Array, _: None) -> None:
            step = i * launch.steps + k
            slot = launch.slot(step)
            plgpu.barrier_wait(refs.full.at[slot])
            unit = refs.w_smem.at[slot, wg]
            for half in range(2):
                columns = pl.ds(half * HALF_CHANNELS, HALF_CHANNELS)
                x = refs.x_smem.at[slot].at[pl.ds(0, width), columns]
                for block in range(2):
                    if launch.interpret:
                        operand = refs.decoded.at[wg]
                        operand[...] = decode_block(unit[...], block, half)
                        plgpu.commit_smem()
                    else:
                        operand = decode_registers(unit, block, half)
                    plgpu.wgmma(accs[block], operand, x.T)
                    plgpu.wgmma_wait(0 if launch.interpret else launch.config.in_flight)

            # the previous step's products are complete: its stage may be refilled
            @pl.when(k > 0)
            def _() -> None:
                plgpu.barrier_arrive(refs.empty.at[launch.slot(step + launch.config.stages - 1)])

        lax.fori_loop(0, launch.steps, multiply_step, None)
        return accs[0][...], accs[1][...]

    acc = plgpu.ACC((BLOCK_ROWS, width), jnp.float32)
    values = pl.run_scoped(scoped, acc, acc)
    plgpu.barrier_arrive(refs.empty.at[launch.slot((i + 1) * launch.steps - 1)])
    return values


def _swiglu(gate: jax.Array, up: jax.Array, weight: jax.Array, limit: float) -> jax.Array:
    """Returns bf16(silu(min(g, limit)) * clip(u) * weight) of float32 sums [64, n]."""
    gate, up = (value.astype(jnp.bfloat16).astype(jnp.float32) for value in (gate, up))
    gate = jnp.minimum(gate, limit)
    up = jnp.maximum(jnp.minimum(up, limit), -limit)
    active = gate * lax.logistic(gate) * up
    return (active * lax.broadcast_in_dim(weight, active.shape, (1,))).astype(jnp.bfloat16)


def _fake_q8(ref: Any) -> None:
    """Replaces bfloat16 rows [n, 32] in SMEM, one Q8 group each, by their Q8 round trip."""
    from jax.experimental.mosaic.gpu.fragmented_array import Tiling

    # a warp holds four rows, eight lanes of four channels each: a group's maximum stays inside it
    layout = plgpu.Layout.TILED(
        Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )
    x = load(ref, layout=layout, optimized=False).astype(jnp.float32)
    power, inverse = q8_scale(jnp.max(jnp.abs(x), axis=1))

    def spread(value: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, x.shape, (0,)), layout)

    rounded = q8_codes(x, spread(inverse)).astype(jnp.float32) * spread(power)
    ref[...] = rounded.astype(jnp.bfloat16)


def _finish(launch: _Launch, refs: _Refs, i: jax.Array, valid: jax.Array, width: int) -> None:
    """Multiplies one item and stores its rows, ``width`` of which may be valid."""
    wg = lax.axis_index("wg")
    values = _multiply(launch, refs, i, width)
    tile, row_tile = launch.item(i)
    unit = row_tile * launch.config.consumers + wg
    stage = refs.out_smem.at[wg, pl.ds(0, width)]
    rows = launch.rows_a_store

    def send(block: int) -> None:
        plgpu.commit_smem()
        columns = pl.ds((unit * launch.out_blocks + block) * BLOCK_ROWS, BLOCK_ROWS)
        for row in range(0, width, rows):

            @pl.when(valid > row)
            def _(row: int = row) -> None:
                target = refs.out.at[pl.ds(tile * launch.config.tile_n + row, rows), columns]
                plgpu.copy_smem_to_gmem(stage.at[pl.ds(row, rows)], target)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if launch.gate_up:
        first = refs.first[tile]  # a multiple of eight: weights are loaded as aligned pairs
        # a few tokens at a time: the registers are full of accumulators
        for start in range(0, width, rows):
            weight = load(
                refs.weight,
                pl.ds(first + start, rows),
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            gate, up = (value[:, start : start + rows] for value in values)
            stage.at[pl.ds(start, rows)].T[...] = _swiglu(gate, up, weight, launch.limit)
        for group in range(2):
            _fake_q8(stage.at[:, pl.ds(32 * group, 32)])
        send(0)
        return
    for block in range(2):
        stage.T[...] = values[block].astype(jnp.bfloat16)
        send(block)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _consume(launch: _Launch, refs: _Refs) -> None:
    """Works through the items of this block; all warpgroups take the same width of each."""
    mine = launch.mine(refs)
    widths = (*launch.config.narrow, launch.config.tile_n)

    def valid_of(i: Any) -> jax.Array:
        tile, _ = launch.item(jnp.minimum(i, mine - 1))
        return refs.valid[jnp.clip(tile, 0, refs.valid.shape[0] - 1)]

    def work(i: jax.Array, valid: jax.Array) -> jax.Array:
        following = valid_of(i + 1)  # read an item ahead: the branch below would wait for it
        lower = 0
        for width in widths:

            @pl.when((valid > lower) & (valid <= width))
            def _(width: int = width) -> None:
                _finish(launch, refs, i, valid, width)

            lower = width
        return following

    lax.fori_loop(0, mine, work, valid_of(np.int32(0)))
    plgpu.wait_smem_to_gmem(0)


def build(
    config: GroupedConfig,
    *,
    gate_up: bool,
    limit: float = 10.0,
    interpret: bool = False,
    num_sms: int = 132,
) -> Callable[..., jax.Array]:
    """Returns the kernel as a function of arrays.

    The function takes
        x: bfloat16 [rows, k]: gathered token rows (TilePlan.source), at least ``config.tile_n``
            behind the first row of the last tile. What a tile reads beyond its valid rows is
            ignored and may be NaN.
        words: int32 [experts, units, k / 128, 17, 128] of layout.py.
        weight: float32 [rows], routing weights beside x (unused by the down projection).
        expert, first, valid: int32 [tiles], the expert, first row and rows of each tile; first
            rows are multiples of eight.
        count: int32 [1], the number of tiles in use.
    and returns bfloat16 [tiles * tile_n, width]: tile t's rows start at ``t * tile_n``; rows that
    hold no token are undefined. With ``gate_up`` the width is 64 a unit and the values are
    Q8(bf16(silu(min(g, limit)) * clip(u) * weight)), decoded; otherwise 128 a unit.

    Args:
        config: tile sizes; does not change bits.
        gate_up: which of the two products.
        limit: SwiGLU clamp.
        interpret: build the form that the CPU interpreter can run.
        num_sms: size of the persistent grid.
    """
    consumers, stages, tile_n = config.consumers, config.stages, config.tile_n
    name = f"grouped_matmul_{'gate_up' if gate_up else 'down'}_sm90"

    def call(
        x: jax.Array,
        words: jax.Array,
        weight: jax.Array,
        expert: jax.Array,
        first: jax.Array,
        valid: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        _, units, steps, *_ = words.shape
        if units % consumers:
            raise KernelError(
                f"{name}: {units} weight units do not divide into row tiles of {consumers}: "
                f"choose consumers that divide them"
            )
        launch = _Launch(config, gate_up, limit, interpret, num_sms, units, steps)

        def body(*refs: Any) -> None:
            wg = lax.axis_index("wg")

            @pl.when(wg == consumers)
            def _() -> None:
                plgpu.set_max_registers(config.producer_registers, action="decrease")
                _produce(launch, _Refs(*refs))

            @pl.when(wg < consumers)
            def _() -> None:
                plgpu.set_max_registers(config.registers, action="increase")
                _consume(launch, _Refs(*refs))

        def tiles(shape: tuple[int, ...], minor: int, swizzle: int) -> Any:
            transforms = tiled(minor, jnp.bfloat16, swizzle)
            return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

        scratch = [
            tiles((stages, tile_n, UNIT_CHANNELS), UNIT_CHANNELS, 128),
            plgpu.SMEM((stages, consumers, *UNIT_WORDS), jnp.int32),
            tiles((consumers, tile_n, BLOCK_ROWS), 32, 64),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        ]
        if interpret:
            scratch.append(tiles((consumers, BLOCK_ROWS, HALF_CHANNELS), HALF_CHANNELS, 128))
        width = units * BLOCK_ROWS * launch.out_blocks
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((expert.shape[0] * tile_n, width), jnp.bfloat16),
            scratch_types=scratch,
            grid=(num_sms,),
            grid_names=("sm",),
            num_threads=consumers + 1,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=False
            ),
            kernel_name=name,
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(x, words, weight, expert, first, valid, count)

    return call
