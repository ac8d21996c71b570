"""Dense products of quantised and BF16 weights by named implementation (kernels.md 4.5).

Every function runs the implementation that was named or raises; none substitutes another. Bits of
a row do not depend on the number of rows or on the other rows.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels import core
from pallas_kernels.block_scaled_matmul import reference
from pallas_kernels.core.quant import Q8_GROUP
from pallas_kernels.errors import KernelError, KernelUnsupported

OP = "block_scaled_matmul"
_SM90 = ("mosaic_sm90", "pallas_interpret")


def _refuse(implementation: str, rule: str, got: str, remedy: str) -> NoReturn:
    raise KernelUnsupported(OP, implementation, rule, got, remedy)


def _unknown(implementation: str, known: tuple[str, ...]) -> NoReturn:
    _refuse(
        implementation,
        f"this product has the implementations {', '.join(known)}",
        repr(implementation),
        "name one of them",
    )


def block_scaled_matmul(
    x_codes: jax.Array,
    x_scale: jax.Array | None,
    w: core.QuantArray,
    *,
    implementation: str,
) -> jax.Array:
    """Returns Q8 x @ w^T for an FP8 weight, accumulated in FP32 and rounded once.

    Args:
        x_codes: E4M3 codes [m, k], uint8 or float8_e4m3fn; or the Q8 values they stand for as
            bfloat16 [m, k], which is exact and saves a pass where the caller has them. m may be 0.
        x_scale: E8M0 bytes uint8 [m, k / 32]; None with bfloat16 values.
        w: "fp8_block32" [n, k] with 32x32 E8M0 scales. Kernels read E8M0 255 (NaN) as infinity.
        implementation: "xla", "mosaic_sm90", "mosaic_sm100" or "pallas_interpret".

    Returns:
        bfloat16 [m, n].

    Raises:
        KernelError: shapes or dtypes do not fit.
        KernelUnsupported: the implementation does not exist or does not take this weight.
    """
    if x_codes.ndim != 2 or w.ndim != 2 or x_codes.shape[1] != w.shape[1]:
        raise KernelError(f"{OP} needs [m k] and [n k], got {x_codes.shape} and {w.shape}")
    if implementation == "mosaic_sm90_fp8":
        _refuse(
            implementation,
            "the FP8 unit takes activations scaled per 128 and 128x128 weight blocks only",
            f"activations scaled per 32 and a {w.format} weight",
            "name mosaic_sm90 for 32-blocks, or call matmul_fp8 with 128-blocks",
        )
    if implementation not in ("xla", *_SM90, "mosaic_sm100"):
        _unknown(implementation, ("xla", *_SM90, "mosaic_sm100"))
    if implementation != "xla" and w.format != "fp8_block32":
        _refuse(
            implementation,
            "it takes fp8_block32 weights",
            w.format,
            'name "xla", or for 128-blocks call matmul_fp8',
        )
    x = _decoded(x_codes, x_scale)
    if implementation == "xla":
        return reference.block_scaled(x, w)
    if x.shape[0] == 0:
        return jnp.zeros((0, w.shape[0]), jnp.bfloat16)
    if implementation == "mosaic_sm100":
        from pallas_kernels.block_scaled_matmul import pallas_sm100

        return pallas_sm100.matmul(x, core.dequantize(w).astype(jnp.bfloat16), jnp.bfloat16)
    from pallas_kernels.block_scaled_matmul import launch_sm90

    return launch_sm90.block_scaled(x, w, implementation == "pallas_interpret")


def _decoded(x_codes: jax.Array, x_scale: jax.Array | None) -> jax.Array:
    """Returns the bfloat16 values of Q8 codes and scales; exact."""
    if x_codes.dtype == jnp.bfloat16 and x_scale is None:
        return x_codes
    expected = (x_codes.shape[0], -(-x_codes.shape[1] // Q8_GROUP))
    got = None if x_scale is None else (x_scale.dtype.name, x_scale.shape)
    if x_scale is None or got != ("uint8", expected):
        raise KernelError(
            f"{OP} needs uint8 scales [m, k / 32] = {expected} beside codes, or bfloat16 values "
            f"and no scales; got {x_codes.dtype} and {got}"
        )
    return core.dequantize_q8(x_codes, x_scale).astype(jnp.bfloat16)


def matmul_bf16(
    x: jax.Array, w: jax.Array, *, out_dtype: Any = jnp.float32, implementation: str
) -> jax.Array:
    """Returns x @ w^T for BF16 operands, accumulated in FP32 and rounded once to ``out_dtype``.

    Args:
        x: bfloat16 [m, k], or [m, g, k] for one product per group; m may be 0.
        w: bfloat16 [n, k], or [g, n, k].
        out_dtype: float32 or bfloat16.
        implementation: "xla", "mosaic_sm90", "mosaic_sm100" or "pallas_interpret".

    Returns:
        ``out_dtype`` [m, n] or [m, g, n].

    Raises:
        KernelError: shapes or dtypes do not fit.
        KernelUnsupported: the implementation does not exist.
    """
    agree = x.ndim == w.ndim and x.ndim in (2, 3) and x.shape[1:-1] == w.shape[:-2]
    if not agree or x.shape[-1] != w.shape[-1]:
        raise KernelError(
            f"matmul_bf16 needs [m k] and [n k], or [m g k] and [g n k], got {x.shape} and "
            f"{w.shape}"
        )
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise KernelError(f"matmul_bf16 needs bfloat16 operands, got {x.dtype} and {w.dtype}")
    if jnp.dtype(out_dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise KernelError(f"matmul_bf16 returns float32 or bfloat16, not {out_dtype}")
    if implementation == "xla":
        return reference.bf16(x, w, out_dtype)
    if x.shape[0] == 0:
        return jnp.zeros((0, *w.shape[:-1]), out_dtype)
    if implementation in _SM90:
        from pallas_kernels.block_scaled_matmul import launch_sm90

        return launch_sm90.bf16(x, w, out_dtype, implementation == "pallas_interpret")
    if implementation == "mosaic_sm100":
        from pallas_kernels.block_scaled_matmul import pallas_sm100

        if x.ndim == 2:
            return pallas_sm100.matmul(x, w, out_dtype)
        parts = [pallas_sm100.matmul(x[:, g], w[g], out_dtype) for g in range(w.shape[0])]
        return jnp.stack(parts, axis=1)
    _unknown(implementation, ("xla", *_SM90, "mosaic_sm100"))


def matmul_fp8(
    x_codes: jax.Array,
    x_scale: jax.Array,
    w_codes: jax.Array,
    w_scale: jax.Array,
    *,
    implementation: str,
) -> jax.Array:
    """Returns the product of E4M3 operands with 1x128 by 128x128 scales, rounded once.

    V4's format. The FP8 unit adds fewer than 24 bits inside one 128-deep step, so its values are
    another arithmetic than "xla": a named variant, never a default.

    Args:
        x_codes: E4M3 codes [m, k], uint8 or float8_e4m3fn; k a multiple of 128, m may be 0.
        x_scale: float32 [m, k / 128].
        w_codes: E4M3 codes [n, k].
        w_scale: float32 [ceil(n / 128), k / 128].
        implementation: "xla", "mosaic_sm90_fp8" or "pallas_interpret".

    Returns:
        bfloat16 [m, n].

    Raises:
        KernelError: shapes or dtypes do not fit.
        KernelUnsupported: the implementation does not exist or k is no multiple of 128.
    """
    (m, k), n = x_codes.shape, w_codes.shape[0]
    blocks = -(-k // 128)
    shapes = (w_codes.shape[1:], x_scale.shape, w_scale.shape)
    if shapes != ((k,), (m, blocks), (-(-n // 128), blocks)):
        raise KernelError(
            "matmul_fp8 needs [m k], [m, k / 128], [n k] and [n / 128, k / 128], got "
            f"{x_codes.shape}, {x_scale.shape}, {w_codes.shape} and {w_scale.shape}"
        )
    if x_scale.dtype != jnp.float32 or w_scale.dtype != jnp.float32:
        raise KernelError(
            f"matmul_fp8 needs float32 scales, got {x_scale.dtype} and {w_scale.dtype}"
        )
    if implementation == "xla":
        return reference.fp8_block128(x_codes, x_scale, w_codes, w_scale)
    if implementation not in ("mosaic_sm90_fp8", "pallas_interpret"):
        _unknown(implementation, ("xla", "mosaic_sm90_fp8", "pallas_interpret"))
    if k % 128:
        _refuse(implementation, "k must be a multiple of 128", str(k), 'name "xla"')
    if m == 0:
        return jnp.zeros((0, n), jnp.bfloat16)
    from pallas_kernels.block_scaled_matmul import launch_sm90

    interpret = implementation == "pallas_interpret"
    return launch_sm90.fp8_block128(x_codes, x_scale, w_codes, w_scale, interpret)
