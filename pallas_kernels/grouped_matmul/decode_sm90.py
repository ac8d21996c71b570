"""From a unit of MXFP4 weights in SMEM to a bfloat16 wgmma operand in registers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._mosaic import plgpu
from pallas_kernels.grouped_matmul.layout import (
    BLOCK_ROWS,
    HALF_CHANNELS,
    REGISTER_STEPS,
    SCALE_ROW,
    UNIT_WORDS,
)


def decode_registers(unit_ref: Any, block: int, half: int) -> jax.Array:
    """Returns the weights [64, 64] of one block and half as the A operand of a wgmma.

    Every thread reads four words of codes (16 bytes) and two of scales, and runs 2.4 operations an
    element; the products with the scales are exact (kernels.md 1.4).

    Args:
        unit_ref: int32 [17, 128] in SMEM, without transforms.
        block: 64-row block of the unit, 0 or 1.
        half: 64-channel half of the unit, 0 or 1.
    """
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, llvm, vector

    shape = (BLOCK_ROWS, HALF_CHANNELS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def decode(_: Any, ref: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        single = ir.VectorType.get((1,), i32)

        def const(value: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, np.uint32(value).astype(np.int32)))

        def asm(text: str, constraints: str, *args: Any) -> Any:
            return llvm.inline_asm(i32, list(args), text, constraints, has_side_effects=False)

        base = utils.memref_ptr(ref)

        def at(offset: Any, extra: int) -> Any:
            return utils.getelementptr(base, [arith.addi(offset, const(extra))], i32)

        thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), const(128))
        first = (2 * block + half) * 4 * UNIT_WORDS[1]
        four = ir.VectorType.get((4,), i32)
        words = llvm.load(four, at(arith.muli(thread, const(4)), first), alignment=16)
        # the thread's rows are 16 warp + lane / 4, and eight more
        lane_row = arith.divui(arith.remui(thread, const(32)), const(4))
        row = arith.addi(arith.muli(arith.divui(thread, const(32)), const(16)), lane_row)
        start = SCALE_ROW * UNIT_WORDS[1] + block * BLOCK_ROWS
        scale_words = [llvm.load(i32, at(row, start + 8 * r8)) for r8 in range(2)]

        def factor(word: Any, byte: int) -> Any:
            """Returns 2^(S - 1) of one byte as both bfloat16 of a register."""
            twice = asm("prmt.b32 $0, $1, 0, $2;", "=r,r,n", word, const(0x4040 + 0x101 * byte))
            return arith.shli(twice, const(7))

        factors = [[factor(word, 2 * half + group) for word in scale_words] for group in range(2)]

        def codes(word: Any, steps: tuple[tuple[int, int], ...]) -> Any:
            terms = []
            for shift, mask in steps:
                move = arith.shli if shift > 0 else arith.shrui
                moved = move(word, const(abs(shift))) if shift else word
                terms.append(arith.andi(moved, const(mask * 0x10001)))
            return functools.reduce(arith.ori, terms)

        registers = np.empty(WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1)  # 8-channel group major, then the two rows
        for j in range(4):
            word = llvm.extractelement(words, const(j))
            for i, steps in enumerate(REGISTER_STEPS):
                k8, r8 = divmod(i, 2)
                scaled = asm(
                    "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", codes(word, steps), factors[j // 2][r8]
                )
                flat[(2 * j + k8) * 2 + r8] = vector.bitcast(pair, vector.broadcast(single, scaled))
        return FragmentedArray(_registers=registers, _layout=WGMMA_LAYOUT, _is_signed=None)

    return decode(unit_ref)
