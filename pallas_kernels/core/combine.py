"""The sum of a token's expert outputs (model.md 3.11)."""

import jax
import jax.numpy as jnp

from pallas_kernels.core.reduce import fold_sum
from pallas_kernels.errors import KernelError


def combine(expert_out: jax.Array, shared: jax.Array | None) -> jax.Array:
    """Returns the unweighted sum over expert slots in slot order, the shared expert last.

    The routing weight is already inside the expert outputs. Additions only, in a fixed order, so
    the bits do not depend on placement, tiles or mesh. No final rounding (the caller rounds).

    Args:
        expert_out: [m, x, d] of any float dtype, slots ordered by (s + bias descending, id).
        shared: [m, d], or None.

    Returns:
        float32 [m, d].

    Raises:
        KernelError: shapes do not fit.
    """
    if expert_out.ndim != 3 or (shared is not None and shared.shape != expert_out.shape[::2]):
        raise KernelError(
            f"combine needs [m x d] and [m d] or None, got {expert_out.shape} and "
            f"{None if shared is None else shared.shape}"
        )
    total = fold_sum(expert_out, axis=1)
    return total if shared is None else total + shared.astype(jnp.float32)
