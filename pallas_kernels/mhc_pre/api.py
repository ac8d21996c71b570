"""Gates and mixing matrix of the residual streams from their projection (model.md 3.3)."""

import jax
import jax.numpy as jnp

from pallas_kernels import core
from pallas_kernels.errors import KernelError, require_named
from pallas_kernels.mhc_pre import reference
from pallas_kernels.mhc_pre.configs import TABLE

OP = "mhc_pre"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "triton")


def mhc_pre(
    mixed: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    streams: int,
    iterations: int,
    eps: float,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (pre, post, matrix) of every row, float32; a row's bits depend on nothing else.

    ``pre = sigmoid(a) + eps``, ``post = 2 sigmoid(b)`` and the matrix balanced by Sinkhorn steps,
    where a, b and the logits of the matrix are parts of ``mixed`` times their scale plus ``base``.

    Args:
        mixed: float32 [t, n (n + 2)], the projection of the streams over their RMS.
        scale: float32 [3], of the three parts.
        base: float32 [n (n + 2)].
        streams: n.
        iterations: row and column steps, at least 1.
        eps: added to ``pre`` and to every sum of the balancing.
        implementation: "xla", "pallas_interpret" or "triton".

    Returns:
        pre [t, n], post [t, n], matrix [t, n, n] with the old stream first.

    Raises:
        KernelError: shapes do not fit.
        KernelUnsupported: no such implementation.
    """
    width = streams * (streams + 2)
    if mixed.ndim != 2 or mixed.shape[1] != width or base.shape != (width,) or scale.shape != (3,):
        raise KernelError(
            f"{OP} with {streams} streams needs mixed [t, {width}], scale [3] and base [{width}], "
            f"got {mixed.shape}, {scale.shape} and {base.shape}"
        )
    require_named(OP, implementation, IMPLEMENTATIONS)
    if implementation == "xla" or not mixed.shape[0]:
        return reference.mhc_pre(
            mixed,
            scale,
            base,
            streams,
            eps,
            lambda matrix: reference.sinkhorn(matrix, iterations, eps, core.fold_sum),
        )
    from pallas_kernels.mhc_pre import pallas_triton

    run = pallas_triton.build(
        TABLE["rows"],
        streams=streams,
        iterations=iterations,
        eps=eps,
        interpret=implementation == "pallas_interpret",
    )
    args = (jnp.asarray(value, jnp.float32) for value in (mixed, scale, base))
    return run(*args)
