"""How many rows each request verifies, given the total (engine.md 3.6, asynchronous form)."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.speculative.confidence import survival


def gather_confidence(
    confidence: Float[Array, "s n"], row: Int[Array, " r"]
) -> Float[Array, "r n"]:
    """Returns the confidences of the previous round by request; row -1 (fresh) gives zeros."""
    known = confidence[jnp.maximum(row, 0)]
    return jnp.where((row >= 0)[:, None], known, np.float32(0))


def verify_lengths(confidence: Float[Array, "r n"], total: Int[Array, ""]) -> Int[Array, " r"]:
    """Returns the rows q_i of each request, 1 <= q_i <= 1 + n, with sum `total`.

    Every request has one row; the others go to the drafts with the highest survival. Equal
    survivals: lower request first, then lower draft, so a draft is never preferred to one before
    it, and the rank of draft k depends on tokens before it only.

    Args:
        confidence: of the drafts to verify, from the previous round.
        total: rows of the step, from r to r * (1 + n).
    """
    requests, drafts = confidence.shape
    key = survival(confidence).reshape(-1)
    flat = jnp.arange(key.shape[0])
    is_before = (key[None, :] > key[:, None]) | (
        (key[None, :] == key[:, None]) & (flat[None, :] < flat[:, None])
    )
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    is_verified = (rank < total - requests).reshape(requests, drafts)
    return 1 + jnp.sum(is_verified, axis=-1, dtype=jnp.int32)
