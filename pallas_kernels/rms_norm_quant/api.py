"""RMSNorm fused with the Q8 quantiser (kernels.md 4.8, model.md 3.2 and 3.4)."""

import jax
import jax.numpy as jnp

from pallas_kernels.core.codes import as_bytes
from pallas_kernels.errors import KernelError, KernelUnsupported, require_named
from pallas_kernels.rms_norm_quant import reference
from pallas_kernels.rms_norm_quant.configs import TABLE

OP = "rms_norm_quant"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "triton")


def rms_norm_quant(
    x: jax.Array, weight: jax.Array, eps: float, *, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the BF16 norm of every row and its Q8.

    ``row = bf16(core.rms_norm(x, weight, eps))`` with the fixed tree of core; codes and scale are
    ``core.quantize_q8(row)``. Row-local: bits of a row depend on nothing else.

    Args:
        x: bfloat16 [m, d], d a multiple of 32; "xla" takes float32 too.
        weight: [d] of any float dtype.
        eps: added to the mean square.
        implementation: "xla", "pallas_interpret" or "triton".

    Returns:
        row bfloat16 [m, d], codes uint8 [m, d], E8M0 scale bytes uint8 [m, d / 32].

    Raises:
        KernelError: shapes do not fit.
        KernelUnsupported: no such implementation, or one that needs bfloat16 rows got others.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:] or x.shape[1] % 32:
        raise KernelError(
            f"{OP} needs x [m, d] and weight [d] with d a multiple of 32, got {x.shape} and "
            f"{weight.shape}"
        )
    require_named(OP, implementation, IMPLEMENTATIONS)
    if implementation == "xla":
        return reference.rms_norm_quant(x, weight, eps)
    if x.dtype != jnp.bfloat16:
        raise KernelUnsupported(
            OP,
            implementation,
            "rows are bfloat16, whose squares are exact in float32",
            str(x.dtype),
            "round and cast x to bfloat16, or use implementation='xla'",
        )
    from pallas_kernels.rms_norm_quant import pallas_triton

    run = pallas_triton.build(TABLE["row"], eps=eps, interpret=implementation == "pallas_interpret")
    row, codes, scale = run(x, weight)
    return row, as_bytes(codes), scale
