"""FP8 weights of 32x32 blocks from a stage in shared memory to a bfloat16 wgmma operand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._mosaic import plgpu, tiled
from pallas_kernels._registers import Q8, Word, decode_pair, i32, power_factor, thread_parts

ROWS = 64  # weight rows of one operand
WORD = 128  # K of one scale word, and of one line of a row in a stage
HALF = 64  # K of one operand
GROUP = 32  # rows and channels of one scale
_TILE = 8 * WORD  # bytes of eight rows


def decode_plain(codes: jax.Array, words: jax.Array, half: int) -> jax.Array:
    """Returns what ``decode_operand`` does, in plain jnp, for the interpreter.

    Args:
        codes: e4m3 [64, 128], the operand's line.
        words: int32 [2], four scale bytes of each 32 rows.
        half: which half of the line.
    """
    part = codes[:, half * HALF : (half + 1) * HALF].astype(jnp.float32)
    exponents = words[:, None] >> (8 * (2 * half + jnp.arange(2, dtype=jnp.int32))) & 0xFF
    bits = jnp.maximum(exponents << 23, 0x00400000)  # byte 0 means the subnormal 2^-127
    scale = lax.bitcast_convert_type(bits, jnp.float32).repeat(GROUP, 0).repeat(GROUP, 1)
    return (part * scale).astype(jnp.bfloat16)


def code_place(
    warp: Any, lane: Any, lower: int, line: int, half: int, eight: int, depth: int
) -> Any:
    """Returns where the two codes of one register of the operand begin in a stage, in bytes.

    Args:
        warp: 0 to 3, numbers or ``Word``.
        lane: 0 to 31.
        lower: 0 for the first row of the thread, 1 for the one eight rows below.
        line: which 128 channels of the stage.
        half: which half of them.
        eight: which 8 channels of the half.
        depth: channels of a stage.
    """
    row, lines = lane // 4, depth // WORD
    piece = row ^ (4 * half + eight // 2)
    tile = warp * (2 * lines * _TILE) + row * WORD + piece * 16
    return tile + lane % 4 * 2 + ((lower * lines + line) * _TILE + eight % 2 * 8)


def decode_operand(codes: Any, words: Any, line: int, half: int) -> jax.Array:
    """Returns codes times their scales as the A operand of a wgmma, bfloat16 [64, 64]; exact.

    A thread reads the two codes of a register at once. NaN codes read as 480, E8M0 255 as infinity.

    Args:
        codes: e4m3 [64, depth] in shared memory, tiled and swizzled by 128 bytes.
        words: int32 [2] in shared memory, four scale bytes of each 32 rows of the line.
        line: which 128 channels of the stage.
        half: which half of them.
    """
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    shape, depth = (ROWS, HALF), codes.shape[-1]
    transforms = tiled(depth, codes.dtype, 128)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def decode(_: Any, codes: Any, words: Any) -> Any:
        i8, i16 = (ir.IntegerType.get_signless(bits) for bits in (8, 16))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        single = ir.VectorType.get((1,), i32())
        warp, lane = (Word(value) for value in thread_parts())
        base = utils.memref_ptr(codes)
        scales = utils.getelementptr(utils.memref_ptr(words), [(warp // 2).value], i32())
        scale = Word(llvm.load(i32(), scales, alignment=4))
        factors = [
            power_factor((scale // (1 << (8 * group)) & 0xFF).value)
            for group in (2 * half, 2 * half + 1)
        ]
        registers = np.empty(WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1)  # 8-channel group major, then the two rows
        for eight in range(HALF // 8):
            for lower in range(2):
                offset = code_place(warp, lane, lower, line, half, eight, depth)
                place = utils.getelementptr(base, [offset.value], i8)
                two = llvm.load(i16, place, alignment=2)
                value = decode_pair(arith.extui(i32(), two), factors[eight // 4], Q8)
                flat[2 * eight + lower] = vector.bitcast(pair, vector.broadcast(single, value))
        return FragmentedArray(_registers=registers, _layout=WGMMA_LAYOUT, _is_signed=None)

    return decode(codes, words)
