"""Single CANN operators on host arrays: staged in, run, staged out (stage 1 of ascend.md 2).

For tests, comparisons and first contact with a device. A model goes through `step.py`, which leaves
weights and caches on the device. Arrays are in CANN's layouts: E4M3 and E8M0 as JAX has them, E2M1
as uint8 with two codes a byte, the even one low, scales in pairs `[.., ceil(k / 64), 2]`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from native_ascend.errors import AscendUnsupported
from native_ascend.ffi import staged
from native_ascend.plan import NZ, PlanBuilder, Tensor, acl_type

GROUP = 32
#: `groupSize` of quantised products with one scale for 1 x 1 x 32 elements: K | N << 16 | M << 32.
MX_GROUPS = 32 | 1 << 16 | 1 << 32


def mx_scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of an array whose last axis is grouped by 32."""
    return (*shape[:-1], -(-shape[-1] // 64), 2)


def nz_storage(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns how E2M1 [g, n, k] lies in FRACTAL_NZ: tiles of 16 rows and 32 bytes."""
    groups, rows, columns = shape
    return (groups, columns // 64, rows // 16, 16, 64)


def _operand(builder: PlanBuilder, array: Any) -> Tensor:
    return builder.operand(tuple(array.shape), str(array.dtype))


def _require(good: bool, rule: str, received: object) -> None:
    if not good:
        raise AscendUnsupported(f"{rule}, received {received}", status="INVALID_ARGUMENT")


def matmul(x: Any, w: Any) -> Any:
    """Returns x [m, k] @ w [k, n] in their data type, float32 or bfloat16."""
    _require(x.ndim == w.ndim == 2 and x.shape[1] == w.shape[0], "[m, k] and [k, n]", x.shape)
    _require(x.dtype == w.dtype, "one data type", (x.dtype, w.dtype))
    b = PlanBuilder()
    left, right = _operand(b, x), _operand(b, w)
    out = b.result((x.shape[0], w.shape[1]), str(x.dtype))
    b.call("aclnnMatmul", self=left, mat2=right, out=out, cubeMathType=0)
    return staged(b, x, w)[0]


def batch_matmul(x: Any, w: Any) -> Any:
    """Returns x [g, m, k] @ w [g, k, n] in their data type."""
    agree = x.ndim == w.ndim == 3 and x.shape[::2] == w.shape[:2]
    _require(agree, "[g, m, k] and [g, k, n]", (x.shape, w.shape))
    b = PlanBuilder()
    left, right = _operand(b, x), _operand(b, w)
    out = b.result((*x.shape[:2], w.shape[2]), str(x.dtype))
    b.call("aclnnBatchMatMul", self=left, mat2=right, out=out, cubeMathType=0)
    return staged(b, x, w)[0]


def mx_quant(x: Any, dtype: str = "float8_e4m3fn") -> tuple[Any, Any]:
    """Returns (codes, scales) of bfloat16 x [.., k] in groups of 32.

    dtype: "float8_e4m3fn", or "float4_e2m1fn" for codes uint8 [.., k / 2].
    """
    _require(x.shape[-1] % GROUP == 0, "a last axis of whole groups of 32", x.shape)
    b = PlanBuilder()
    source = _operand(b, x)
    shape = tuple(x.shape)
    if dtype == "float4_e2m1fn":
        codes = b.result((*shape[:-1], shape[-1] // 2), "uint8").as_fp4()
    else:
        codes = b.result(shape, dtype)
    scales = b.result(mx_scale_shape(x.shape), "float8_e8m0fnu")
    call_mx_quant(b, source, codes, scales)
    out = staged(b, x)
    return out[0], out[1]


def call_mx_quant(builder: PlanBuilder, x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Adds the quantiser of Q8 (codes E4M3) or Q4m (codes E2M1): rows 4 and 5 of the table."""
    is_fp8 = codes.dtype == "float8_e4m3fn"
    builder.call(
        "aclnnDynamicMxQuantV2",
        x=x,
        axis=-1,
        roundMode="rint",
        dstType=acl_type(codes.dtype),
        blocksize=GROUP,
        scaleAlg=1 if is_fp8 else 2,
        dstTypeMax=0.0 if is_fp8 else 6.0,
        yOut=codes,
        mxscaleOut=scales,
    )


def call_quant_matmul(
    builder: PlanBuilder, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor
) -> None:
    """Adds x [m, k] @ w [n, k]^T with MX scales."""
    builder.call(
        "aclnnQuantMatmulV5",
        x1=x,
        x2=w,
        x1Scale=x_scale,
        x2Scale=w_scale,
        transposeX1=False,
        transposeX2=True,
        groupSize=MX_GROUPS,
        out=out,
    )


def quant_matmul(x: Any, x_scale: Any, w: Any, w_scale: Any) -> Any:
    """Returns x [m, k] @ w [n, k]^T as bfloat16; E4M3 codes, scales as `mx_scale_shape`."""
    agree = x.ndim == w.ndim == 2 and x.shape[1] == w.shape[1]
    _require(agree, "[m, k] and [n, k]", (x.shape, w.shape))
    for codes, scale in ((x, x_scale), (w, w_scale)):
        _require(scale.shape == mx_scale_shape(codes.shape), "scales in pairs", scale.shape)
    b = PlanBuilder()
    left, left_scale, right, right_scale = (_operand(b, a) for a in (x, x_scale, w, w_scale))
    out = b.result((x.shape[0], w.shape[0]), "bfloat16")
    call_quant_matmul(b, left, left_scale, right, right_scale, out)
    return staged(b, x, x_scale, w, w_scale)[0]


def rms_norm(x: Any, gamma: Any, eps: float) -> tuple[Any, Any]:
    """Returns (RMSNorm of x [.., d] in its data type, float32 reciprocal RMS [.., 1])."""
    b = PlanBuilder()
    source, weight = _operand(b, x), _operand(b, gamma)
    out = b.result(tuple(x.shape), str(x.dtype))
    rstd = b.result((*x.shape[:-1], 1), "float32")
    b.call("aclnnRmsNorm", x=source, gamma=weight, epsilon=eps, yOut=out, rstdOut=rstd)
    found = staged(b, x, gamma)
    return found[0], found[1]


def call_swiglu_quant(
    builder: PlanBuilder,
    x: Tensor,
    weight: Tensor | None,
    limit: float,
    codes: Tensor,
    scales: Tensor,
) -> None:
    """Adds clamp, SwiGLU, routing weight and Q8 of x = [gate | up]."""
    builder.call(
        "aclnnSwigluGroupQuant",
        x=x,
        weight=weight,
        dstType=acl_type("float8_e4m3fn"),
        quantMode=1,
        blockSize=GROUP,
        roundScale=True,
        clampLimit=limit,
        dstTypeMax=0.0,
        outputOrigin=False,
        yOut=codes,
        yScaleOut=scales,
    )


def swiglu_quant(x: Any, weight: Any | None, limit: float) -> tuple[Any, Any]:
    """Returns (E4M3 codes [t, i], scales) of silu(gate) * up * weight for bfloat16 x [t, 2 i]."""
    rows, width = x.shape[0], x.shape[1] // 2
    b = PlanBuilder()
    source = _operand(b, x)
    gain = None if weight is None else _operand(b, weight)
    codes = b.result((rows, width), "float8_e4m3fn")
    scales = b.result(mx_scale_shape((rows, width)), "float8_e8m0fnu")
    call_swiglu_quant(b, source, gain, limit, codes, scales)
    found = staged(b, *([x] if weight is None else [x, weight]))
    return found[0], found[1]


def as_nz(tensor: Tensor) -> Tensor:
    """Returns E2M1 [g, n, k] as one that lies in FRACTAL_NZ."""
    return replace(tensor, format=NZ, storage=nz_storage(tensor.shape))


def call_format_cast(builder: PlanBuilder, source: Tensor, target: Tensor) -> Tensor:
    """Adds the conversion of E2M1 [g, n, k] to FRACTAL_NZ in `target`; returns it as NZ."""
    _require(source.shape[1] % 16 == 0 and source.shape[2] % 64 == 0, "whole tiles", source.shape)
    tiled = as_nz(target)
    builder.call("aclnnNpuFormatCast", src=source, dst=tiled)
    return tiled


def call_grouped_matmul(
    builder: PlanBuilder,
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    counts: Tensor,
    out: Tensor,
) -> None:
    """Adds rows of x by w of their group; w E2M1 in FRACTAL_NZ, counts int64 [g]."""
    builder.call(
        "aclnnGroupedMatmulWeightNz",
        x=[x],
        weight=[w],
        antiquantScale=[w_scale],
        perTokenScale=[x_scale],
        groupList=counts,
        splitItem=3,
        groupType=0,
        groupListType=1,
        actType=0,
        quantGroupSize=GROUP,
        out=[out],
    )


def grouped_matmul(x: Any, x_scale: Any, w: Any, w_scale: Any, counts: Any) -> Any:
    """Returns bfloat16 [m, n]: rows of x [m, k] by w [g, n, k]^T of their group.

    w: E2M1, uint8 [g, n, k / 2]; converted to FRACTAL_NZ in the same call. counts: int64 [g], rows
    of each group in order.
    """
    b = PlanBuilder()
    codes, scale = _operand(b, x), _operand(b, x_scale)
    weight, w_scales, group = _operand(b, w).as_fp4(), _operand(b, w_scale), _operand(b, counts)
    tiled = call_format_cast(b, weight, b.scratch(weight.shape, weight.dtype))
    out = b.result((x.shape[0], w.shape[1]), "bfloat16")
    call_grouped_matmul(b, codes, scale, tiled, w_scales, group, out)
    return staged(b, x, x_scale, w, w_scale, counts)[0]


def gating_topk(logits: Any, bias: Any, k: int, factor: float) -> tuple[Any, Any]:
    """Returns (weights float32 [t, k], expert ids int32 [t, k]) of sqrt(softplus) scores."""
    rows = logits.shape[0]
    b = PlanBuilder()
    x, shift = _operand(b, logits), _operand(b, bias)
    weights, ids = b.result((rows, k), "float32"), b.result((rows, k), "int32")
    call_gating(b, x, shift, k, factor, weights, ids)
    found = staged(b, logits, bias)
    return found[0], found[1]


def call_gating(
    builder: PlanBuilder,
    logits: Tensor,
    bias: Tensor,
    k: int,
    factor: float,
    weights: Tensor,
    ids: Tensor,
) -> None:
    """Adds the choice of experts of text rows (row 21)."""
    builder.call(
        "aclnnMoeGatingTopKV2",
        x=logits,
        bias=bias,
        k=k,
        kGroup=1,
        groupCount=1,
        groupSelectMode=0,
        renorm=0,
        normType=2,
        outFlag=False,
        routedScalingFactor=factor,
        eps=1e-20,
        yOut=weights,
        expertIdxOut=ids,
    )
