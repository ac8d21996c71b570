"""An FP8 product that starts at zero: four Hopper instructions, the first of which adds nothing.

Pallas starts an accumulator by writing zeros into its registers, which costs a K step of the
scaled product as much as its promotion does. Written with the raw Mosaic dialect; the interpreter
runs the plain form instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._mosaic import plgpu, tiled

ROWS = 64
DEPTH = 128


def issue(x: Any, w: Any) -> jax.Array:
    """Starts x @ w^T of e4m3 tiles [64, 128] and [n, 128] in shared memory.

    Returns the accumulator float32 [64, n]; it may be read only behind ``settle``.
    """
    from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    n = w.shape[0]
    operand = plgpu.RefType(tiled(DEPTH, jnp.float8_e4m3fn))
    result = plgpu.ShapeDtypeStruct((ROWS, n), jnp.float32, layout=plgpu.Layout.WGMMA)

    def as_array(values: list[Any]) -> Any:
        layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
        one = ir.VectorType.get((1,), ir.F32Type.get())
        registers = np.empty(layout.registers_shape((ROWS, n)), dtype=object)
        registers.flat[:] = [vector.broadcast(one, value) for value in values]
        array = fragmented_array.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=None
        )
        return array.to_layout(fragmented_array.WGMMA_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(operand, operand), return_type=result)
    def product(_: Any, a: Any, b: Any) -> Any:
        f32 = ir.F32Type.get()
        (a_base, a_stride), _, _ = mma_utils.create_descriptor(
            a, 128, group_size=(ROWS, DEPTH), logical_k_major=False, large_tile=(ROWS, DEPTH)
        )
        (b_base, b_stride), _, _ = mma_utils.create_descriptor(
            utils.memref_transpose(b, (1, 0, 3, 2)),
            128,
            group_size=(DEPTH, n),
            logical_k_major=True,
            large_tile=(DEPTH, DEPTH),
        )
        strides = [s[1][0] >> 4 for s in (a_stride, b_stride)]
        count = n // 2
        registers = ", ".join(f"${i}" for i in range(count))
        lines = ["{ .reg .pred p; .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
        for step in range(DEPTH // 32):
            lines += [
                f"setp.ne.b32 p, {min(step, 1)}, 0;",
                f"add.s64 a, ${count}, {strides[0] * step};",
                f"add.s64 b, ${count + 1}, {strides[1] * step};",
                f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
                f"{{{registers}}}, a, b, p, 1, 1;",
            ]
        lines += ["wgmma.commit_group.sync.aligned; }"]
        struct = llvm.inline_asm(
            ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
            [a_base, b_base],
            "\n".join(lines),
            ",".join(["=f"] * count + ["l", "l"]),
            has_side_effects=True,
        )
        return as_array([llvm.extractvalue(f32, struct, [i]) for i in range(count)])

    return product(x, w)


def settle(value: jax.Array, in_flight: int) -> jax.Array:
    """Returns an issued accumulator once at most ``in_flight`` younger products are running."""
    from jax.experimental.mosaic.gpu import fragmented_array
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def wait(_: Any, array: Any) -> Any:
        f32 = ir.F32Type.get()
        wide = array.registers
        scalars, sizes = [], []
        for register in wide.flat:
            size = ir.VectorType(register.type).shape[0]
            sizes.append(size)
            scalars += [vector.extract(register, [], [i]) for i in range(size)]
        count = len(scalars)
        struct = llvm.inline_asm(
            ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
            scalars,
            f"wgmma.wait_group.sync.aligned {in_flight};",
            ",".join(["=f"] * count + [str(i) for i in range(count)]),
            has_side_effects=True,
        )
        out = iter([llvm.extractvalue(f32, struct, [i]) for i in range(count)])
        registers = np.empty(wide.shape, dtype=object)
        packed = []
        for size in sizes:
            kind = ir.VectorType.get((size,), f32)
            packed.append(vector.from_elements(kind, [next(out) for _ in range(size)]))
        registers.flat[:] = packed
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=array.layout, _is_signed=None
        )

    return wait(value)
