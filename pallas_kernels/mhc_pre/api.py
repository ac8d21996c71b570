"""Gates and mixing matrix of the residual streams, from the streams (model.md 3.3)."""

import jax
import jax.numpy as jnp

from pallas_kernels import core
from pallas_kernels.errors import KernelError, require_named
from pallas_kernels.mhc_pre import reference
from pallas_kernels.mhc_pre.configs import TABLE, config_for

OP = "mhc_pre"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "triton")


def mhc_pre(
    x: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    streams: int,
    iterations: int,
    eps: float,
    rms_eps: float,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (pre, post, matrix) of every row, float32.

    ``pre = sigmoid(a) + eps``, ``post = 2 sigmoid(b)`` and the matrix balanced by Sinkhorn steps,
    where a, b and the logits of the matrix are parts of ``x @ fn^T * rsqrt(mean(x^2) + rms_eps)``
    times their scale plus ``base``. A kernel's bits of a row depend on nothing but that row; "xla"
    is the plain formula and promises none.

    Args:
        x: [t, k], the n streams of a row one after the other: BF16 values, held as float32 or
            bfloat16.
        fn: float32 [n (n + 2), k].
        scale: float32 [3], of the three parts.
        base: float32 [n (n + 2)].
        streams: n.
        iterations: row and column steps, at least 1.
        eps: added to ``pre`` and to every sum of the balancing.
        rms_eps: added to the mean square.
        implementation: "xla", "pallas_interpret" or "triton".

    Returns:
        pre [t, n], post [t, n], matrix [t, n, n] with the old stream first.

    Raises:
        KernelError: shapes or the dtype of x do not fit.
        KernelUnsupported: no such implementation.
    """
    width = streams * (streams + 2)
    agree = x.ndim == 2 and x.shape[1] and fn.shape == (width, x.shape[1])
    if not agree or base.shape != (width,) or scale.shape != (3,):
        raise KernelError(
            f"{OP} with {streams} streams needs x [t, k], fn [{width}, k], scale [3] and "
            f"base [{width}], got {x.shape}, {fn.shape}, {scale.shape} and {base.shape}"
        )
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise KernelError(f"{OP} needs x in float32 or bfloat16, got {x.dtype}: cast it")
    require_named(OP, implementation, IMPLEMENTATIONS)
    if implementation == "xla" or not x.shape[0]:
        return reference.coefficients(
            reference.projected(x, fn, rms_eps),
            scale,
            base,
            streams,
            eps,
            lambda matrix: reference.sinkhorn(matrix, iterations, eps, core.fold_sum),
        )
    from pallas_kernels.mhc_pre import pallas_triton

    interpret = implementation == "pallas_interpret"
    run = pallas_triton.build(
        # a CPU adds up a product in an order that follows its shape: one tile for all rows there
        TABLE["rows"] if interpret else config_for(x.shape[0]),
        streams=streams,
        iterations=iterations,
        eps=eps,
        rms_eps=rms_eps,
        interpret=interpret,
    )
    return run(x, *(jnp.asarray(value, jnp.float32) for value in (fn, scale, base)))
