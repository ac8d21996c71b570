"""Index keys from the cache bytes to a wgmma operand, and sums over heads, in registers.

A thread of the operand's layout owns one quarter of a row. It reads 16 bytes of the key, which are
one group of 32 channels, and the group's one scale. Which K column a channel becomes is free: the
queries are put into the same order once (`key_order`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray, Tiling

from pallas_kernels import core
from pallas_kernels._mosaic import plgpu

KEYS = 64  # keys of one operand
CHANNELS = 128
_BYTES, _GROUPS = CHANNELS // 2, CHANNELS // 32
_LANES = {"warp_dims": (-7,), "lane_dims": (-3, -2), "vector_dim": -1}

#: uint8 [64, 64]: lane 4 l + q holds bytes 16 q .. 16 q + 15 of rows l and l + 8 of its warp's 16.
CODES = plgpu.Layout.TILED(Tiling(((KEYS, _BYTES), (16, _BYTES), (8, _BYTES), (16,))), **_LANES)
#: uint8 [64, 4]: the scales of those groups.
SCALES = plgpu.Layout.TILED(Tiling(((KEYS, _GROUPS), (16, _GROUPS), (8, _GROUPS), (1,))), **_LANES)
#: [128]: one key a thread, of two operands: lane 4 l + 2 b + r holds 64 b + 16 warp + 8 r + l.
PER_KEY = plgpu.Layout.TILED(
    Tiling(((2 * KEYS,), (KEYS,), (16,), (8,), (1,))),
    warp_dims=(-4,),
    lane_dims=(-2, -5, -3),
    vector_dim=-1,
)


def key_order(x: jax.Array) -> jax.Array:
    """Returns x [..., 128] with channels in the order of the K columns of ``decode_keys``.

    Channel 32 q + 8 w + 4 e + i becomes column 32 w + 8 i + 2 q + e.
    """
    axes = x.reshape(*x.shape[:-1], 4, 4, 2, 4)
    lead = tuple(range(x.ndim - 1))
    order = (*lead, *(x.ndim - 1 + axis for axis in (1, 3, 0, 2)))
    return axes.transpose(order).reshape(x.shape)


def decode_keys_plain(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns what ``decode_keys`` does, in plain jnp, for the interpreter."""
    return key_order(core.dequantize_q4m(codes, scale)).astype(jnp.bfloat16)


def _constant(value: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, int(np.uint32(value).astype(np.int32))))


def _factor(scale: Any) -> Any:
    """Returns 2^(S - 127) of a vector<1xi8> as both bfloat16 of a register; exact, 255 is NaN."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    i32 = ir.IntegerType.get_signless(32)
    byte = arith.extui(i32, _element(vector, scale, 0))

    def is_(value: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, byte, _constant(value))

    bits = arith.shli(byte, _constant(7))
    bits = arith.select(is_(0), _constant(0x0040), bits)
    bits = arith.select(is_(255), _constant(0x7FC0), bits)
    return arith.muli(bits, _constant(0x00010001))


def _element(vector: Any, value: Any, index: int) -> Any:
    return vector.extract(value, dynamic_position=[], static_position=[index])


def decode_keys(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns keys as the A operand of a wgmma, bfloat16 [64, 128]; exact.

    Args:
        codes: uint8 [64, 64] in the layout CODES.
        scale: uint8 [64, 4] in the layout SCALES.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    shape = (KEYS, CHANNELS)

    @plgpu.inline_mgpu(
        arg_types=(CODES, SCALES),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def decode(_: Any, codes: Any, scale: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        words_type = ir.VectorType.get((4,), i32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        single = ir.VectorType.get((1,), i32)

        def product(a: Any, b: Any) -> Any:
            return llvm.inline_asm(
                i32, [a, b], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", has_side_effects=False
            )

        def moved(word: Any, left: int, mask: int) -> Any:
            """Returns a word shifted by ``left`` bits (right if negative), masked."""
            if left:
                shift = arith.shli if left > 0 else arith.shrui
                word = shift(word, _constant(abs(left)))
            return arith.andi(word, _constant(mask))

        registers = np.empty(WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1)  # 8-column group major, then the two rows
        for row, (code, byte) in enumerate(
            zip(codes.registers.flat, scale.registers.flat, strict=True)
        ):
            words, factor = vector.bitcast(words_type, code), _factor(byte)
            for group in range(16):
                word, i = _element(vector, words, group // 4), group % 4
                # nibbles i and i + 4: magnitudes to bits 6..8, signs to bit 15 of both halves;
                # read as bfloat16 that is the value times 2^-126
                bits = arith.ori(
                    moved(word, 6 - 4 * i, 0x01C001C0), moved(word, 12 - 4 * i, 0x80008000)
                )
                value = product(product(bits, _constant(0x7E807E80)), factor)
                flat[2 * group + row] = vector.bitcast(pair, vector.broadcast(single, value))
        return FragmentedArray(_registers=registers, _layout=WGMMA_LAYOUT, _is_signed=None)

    return decode(codes, scale)


def sum_heads_plain(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns what ``sum_heads`` does, in plain jnp, for the interpreter."""
    values = jnp.concatenate([low, high]).astype(jnp.float32)
    total = values[:, 0]
    for head in range(1, values.shape[1]):
        total = total + values[:, head]
    return total


def sum_heads(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the float32 sums over heads of 2 x 64 keys, heads added in ascending order.

    The four lanes that share four keys exchange their heads, so that each adds all heads of one.

    Args:
        low: bfloat16 [64, heads] in the layout WGMMA, the first 64 keys.
        high: the same for the other 64.

    Returns:
        float32 [128] in the layout PER_KEY.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, vector

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct((2 * KEYS,), jnp.float32, layout=PER_KEY),
    )
    def add(_: Any, low: Any, high: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        single = ir.VectorType.get((1,), i32)
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))

        def word(register: Any) -> Any:
            return _element(vector, vector.bitcast(single, register), 0)

        def exchange(first: Any, second: Any, distance: int) -> tuple[Any, Any]:
            """Returns (from the lane without the bit, from the lane with it) of one's own key.

            A lane without the bit keeps ``first`` and gives ``second``, one with it the reverse.
            """
            bit = arith.andi(thread, _constant(distance))
            has = arith.cmpi(arith.CmpIPredicate.ne, bit, _constant(0))
            kept, given = arith.select(has, second, first), arith.select(has, first, second)
            got = utils.shfl_bfly(given, distance)
            return arith.select(has, got, kept), arith.select(has, kept, got)

        def half(word: Any, second: bool) -> Any:
            bits = (
                arith.andi(word, _constant(0xFFFF0000))
                if second
                else arith.shli(word, _constant(16))
            )
            return arith.bitcast(f32, bits)

        keys = [*low.registers.reshape(-1, 2).T, *high.registers.reshape(-1, 2).T]
        total = None
        for words in zip(*keys, strict=True):  # heads 8 j .. 8 j + 7 of four keys
            a, b, c, d = (word(register) for register in words)
            lower, upper = zip(exchange(a, c, 2), exchange(b, d, 2), strict=True)
            for source in (*exchange(*lower, 1), *exchange(*upper, 1)):  # lanes 0, 1, 2, 3
                for second in (False, True):
                    value = half(source, second)
                    total = value if total is None else arith.addf(total, value)
        layout = PER_KEY.to_mgpu()
        registers = np.empty(layout.registers_shape((2 * KEYS,)), dtype=object)
        registers.reshape(-1)[0] = vector.broadcast(ir.VectorType.get((1,), f32), total)
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return add(low, high)
