"""The gathering warpgroups' work in registers: ids, cache rows, and their place in shared memory.

A key block has 64 rows. Two warpgroups gather: with one, decoding took twice as long as all the
rest. Warp w of their eight handles rows 8 w to 8 w + 7, one row at a time, so that a warp reads a
row as one run of bytes. Nothing is staged: rows go from global memory to
registers, where they wait until the block's slot is free. Rows of id -1 are not read, and are
stored as zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._mosaic import plgpu, tiled
from pallas_kernels._registers import Word, asm, const, decode_lane, i32, thread_parts

BLOCK = 64
DIM = 512
#: A block in shared memory is two halves of 256 channels.
HALF = 256
#: Warpgroups that gather, behind those that multiply, and rows of a block for each of their warps.
FIRST_GATHERER, GATHERERS = 2, 2
WARP_ROWS = 8
LANE_CHANNELS = 16
#: Bytes of a row -> registers of codes that a lane holds; a register for the scale comes on top.
CODE_WORDS = {528: 4, 288: 2}
_THREADS = 128
_FULL_WARP = "0xffffffff"
_MINUS_INFINITY = 0xFF800000


def _registers(count: int) -> Any:
    """Returns the layout of ``count`` registers a thread, an int32 array [count, 128]."""
    return plgpu.Layout.WG_STRIDED((count, _THREADS), vec_size=1)


def _struct(count: int) -> Any:
    return plgpu.ShapeDtypeStruct((count, _THREADS), jnp.int32, layout=_registers(count))


def _pack(values: list[Any]) -> Any:
    """Returns i32 values, one set a thread, as an array."""
    from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    single = ir.VectorType.get((1,), i32())
    registers = np.empty((len(values),), dtype=object)
    registers[:] = [vector.broadcast(single, value) for value in values]
    return FragmentedArray(
        _registers=registers, _layout=_registers(len(values)).to_mgpu(), _is_signed=True
    )


def _unpack(array: Any) -> list[Any]:
    from jaxlib.mlir.dialects import vector

    return [vector.extract(register, [], [0]) for register in array.registers.flat]


def _at(base: Any, offset: Any) -> Any:
    """Returns the address ``offset`` bytes behind ``base``."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))


def opaque_zero() -> jax.Array:
    """Returns 0 as an int32 scalar that the compiler cannot move out of a loop.

    An operand of a product that is addressed with it keeps its 32 descriptors from being computed
    before the loop and held in 64 registers throughout.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray

    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(return_type=scalar)
    def zero(_: Any) -> Any:
        value = asm("mov.b32 $0, $1;", "=r,n", const(0), effects=True)
        return FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def used_blocks(ids: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (bit b set where block b has an id, how many are set) of one token, int32 scalars.

    Args:
        ids: int32 [n] in global memory, n a multiple of 64 and at most 2048.
    """
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    blocks = ids.shape[0] // BLOCK
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(scalar, scalar))
    def scan(_: Any, ref: Any) -> Any:
        base = utils.memref_ptr(ref)
        _, lane = thread_parts()
        two = ir.VectorType.get((2,), i32())
        largest = []
        for b in range(blocks):
            offset = arith.addi(arith.muli(lane, const(8)), const(4 * BLOCK * b))
            pair = llvm.load(two, _at(base, offset), alignment=8)
            parts = [llvm.extractelement(pair, const(i)) for i in range(2)]
            largest.append(arith.maxsi(*parts))
        bits = const(0)
        for b, value in enumerate(largest):
            text = (
                "{ .reg .pred p, q; setp.ge.s32 p, $1, 0; "
                f"vote.sync.any.pred q, p, {_FULL_WARP}; selp.b32 $0, $2, 0, q; }}"
            )
            bits = arith.ori(bits, asm(text, "=r,r,n", value, const(1 << b), effects=True))
        count = asm("popc.b32 $0, $1;", "=r,r", bits)
        return tuple(FragmentedArray.splat(v, (), is_signed=True) for v in (bits, count))

    return scan(ids)


def gather_parts() -> tuple[Any, Any]:
    """Returns (warp of all that gather, lane) of the running thread, which is one of theirs."""
    from jaxlib.mlir.dialects import arith, gpu

    thread = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
    mine = arith.subi(thread, const(128 * FIRST_GATHERER))
    return arith.divui(mine, const(32)), arith.remui(thread, const(32))


def _own_row() -> Any:
    """Returns the row of a block whose id a lane holds."""
    from jaxlib.mlir.dialects import arith

    warp, lane = gather_parts()
    return arith.addi(arith.muli(warp, const(WARP_ROWS)), arith.remui(lane, const(WARP_ROWS)))


def load_ids(ids: Any) -> jax.Array:
    """Returns the ids of a warp's 8 rows, one a lane, repeated over the lanes.

    Args:
        ids: int32 [64], a block of one token's ids in global memory.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_struct(1))
    def read(_: Any, ref: Any) -> Any:
        row = _own_row()
        place = _at(utils.memref_ptr(ref), arith.muli(row, const(4)))
        return _pack([llvm.load(i32(), place, alignment=4)])

    return read(ids)


def load_rows(cache: Any, ids: jax.Array) -> jax.Array:
    """Returns the registers of a block's rows, eight of every warp.

    Args:
        cache: uint8 [rows, 528 or 288] in global memory.
        ids: what ``load_ids`` returned.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    row_bytes = cache.shape[1]
    words = CODE_WORDS[row_bytes]
    scale_shift = 1 if words == 4 else 0  # two lanes share an exponent

    # without a valid id the loads are skipped: zero codes with a zero scale. Ordinary loads with
    # effects: others are moved in front of the fence that they are put behind
    outputs = ", ".join(f"${i}" for i in range(words))
    text = "{ .reg .pred p; " + f"setp.ge.s32 p, ${words + 1}, 0; "
    text += "".join(f"mov.b32 ${i}, 0; " for i in range(words + 1))
    text += f"@p ld.global.v{words}.b32 {{{outputs}}}, [${words + 2}]; "
    text += f"@p ld.global.u8 ${words}, [${words + 3}]; }}"
    constraints = ",".join(["=&r"] * (words + 1) + ["r", "l", "l"])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _registers(1)), return_type=_struct(WARP_ROWS * (words + 1))
    )
    def read(_: Any, ref: Any, ids: Any) -> Any:
        base = utils.memref_ptr(ref)
        i64 = ir.IntegerType.get_signless(64)
        _, lane = thread_parts()
        [own] = _unpack(ids)
        codes = arith.extui(i64, arith.muli(lane, const(4 * words)))
        scale = arith.addi(arith.shrui(lane, const(scale_shift)), const(4 * words * 32))
        scale = arith.extui(i64, scale)
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * (words + 1))})>")
        stride = arith.constant(i64, ir.IntegerAttr.get(i64, row_bytes))
        values = []
        for row in range(WARP_ROWS):
            shuffle = f"shfl.sync.idx.b32 $0, $1, $2, 31, {_FULL_WARP};"
            which = asm(shuffle, "=r,r,n", own, const(row), effects=True)
            start = arith.muli(arith.extsi(i64, which), stride)
            addresses = [
                llvm.ptrtoint(i64, _at(base, arith.addi(start, part))) for part in (codes, scale)
            ]
            loaded = llvm.inline_asm(
                struct, [which, *addresses], text, constraints, has_side_effects=True
            )
            values += [llvm.extractvalue(i32(), loaded, [i]) for i in range(words + 1)]
        return _pack(values)

    return read(cache, ids)


def lane_place(warp: Any, lane: Any, row: int) -> tuple[Any, Any]:
    """Returns where a lane writes in a block, in bytes, and 1 if its second half goes there.

    A lane has 16 channels of one row: two neighbouring pieces of 16 bytes. The other one goes to
    the place with bit 4 flipped. Of two neighbouring tiles one is written in the other order, so
    that eight lanes reach all banks.

    Args:
        warp: 0 to 7, numbers or ``Word``.
        lane: 0 to 31.
        row: row of the warp, 0 to 7.
    """
    column = lane // 4  # of tiles: 8 rows x 64 channels, 1 KiB, four side by side in a half
    odd = column & 1
    piece = (lane % 4 * 2 + odd) ^ row
    half, within = column // 4 * (BLOCK * HALF * 2), column % 4 * 1024
    tile = half + within + warp * (WARP_ROWS * HALF * 2)
    return tile + row * 128 + piece * 16, odd


def store_rows(rows: jax.Array, slot: Any) -> None:
    """Decodes what ``load_rows`` returned and writes it to its rows of a block.

    Args:
        rows: the registers.
        slot: bfloat16 [2, 64, 256] in shared memory, tiled and swizzled by 128 bytes.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    count = rows.shape[0] // WARP_ROWS

    @plgpu.inline_mgpu(
        arg_types=(_registers(rows.shape[0]), plgpu.RefType(tiled(HALF, jnp.bfloat16, 128)))
    )
    def write(_: Any, registers: Any, ref: Any) -> Any:
        base = utils.memref_ptr(ref)
        warp, lane = gather_parts()
        four = ir.VectorType.get((4,), i32())
        values = _unpack(registers)
        odd = lane_place(Word(warp), Word(lane), 0)[1].value
        swapped = arith.cmpi(arith.CmpIPredicate.ne, odd, const(0))
        for i in range(WARP_ROWS):
            *words, byte = values[i * count : (i + 1) * count]
            half = len(words) // 2
            halves = [words[:half], words[half:]]
            ordered = [
                arith.select(swapped, other, own)
                for one, two in (halves, halves[::-1])
                for own, other in zip(one, two, strict=True)
            ]
            pairs = decode_lane(ordered, byte)
            place = lane_place(Word(warp), Word(lane), i)[0].value
            for part, address in enumerate((place, arith.xori(place, const(16)))):
                vector4 = llvm.mlir_undef(four)
                for j, pair in enumerate(pairs[4 * part : 4 * part + 4]):
                    vector4 = llvm.insertelement(vector4, pair, const(j))
                llvm.store(vector4, _at(base, address), alignment=16)
        return None

    write(rows, slot)


def store_mask(ids: jax.Array, mask: Any) -> None:
    """Writes what is added to the scores of a block's ranks: 0, or minus infinity for id -1.

    Args:
        ids: what ``load_ids`` returned.
        mask: float32 [64] in shared memory.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, llvm

    @plgpu.inline_mgpu(arg_types=(_registers(1), plgpu.RefType()))
    def write(_: Any, ids: Any, ref: Any) -> Any:
        row = _own_row()
        missing = arith.cmpi(arith.CmpIPredicate.slt, _unpack(ids)[0], const(0))
        value = arith.select(missing, const(_MINUS_INFINITY), const(0))
        llvm.store(value, _at(utils.memref_ptr(ref), arith.muli(row, const(4))), alignment=4)
        return None

    write(ids, mask)
