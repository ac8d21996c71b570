"""How many rows each request verifies, given the total (engine.md 3.6, asynchronous form)."""

from collections.abc import Callable

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

    Every request has one row; the others go to the drafts with the highest survival, as in
    `fill_by_rank`.

    Args:
        confidence: of the drafts to verify, from the previous round.
        total: rows of the step, from r to r * (1 + n).
    """
    return 1 + fill_by_rank(survival(confidence), total - confidence.shape[0])


def fill_by_rank(key: Float[Array, "r n"], spare: Int[Array, ""]) -> Int[Array, " r"]:
    """Returns how many leading drafts of each request are among the `spare` highest keys.

    Equal keys: lower request first, then lower draft, so a draft is never preferred to one before
    it, and the rank of draft k depends on tokens before it only.

    Args:
        key: not increasing along a row; below 0 where a draft may not be verified.
        spare: rows beside the anchors.
    """
    flat = key.reshape(-1)
    place = jnp.arange(flat.shape[0])
    is_before = (flat[None, :] > flat[:, None]) | (
        (flat[None, :] == flat[:, None]) & (place[None, :] < place[:, None])
    )
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    is_verified = (rank < spare) & (flat >= 0)
    return jnp.sum(is_verified.reshape(key.shape), axis=-1, dtype=jnp.int32)


def synchronous_lengths(
    survival: Float[np.ndarray, "r n"],
    throughput: Callable[[int], float] | Float[np.ndarray, " b"],
) -> Int[np.ndarray, " r"]:
    """Returns the rows 1 + l of each request, as Algorithm 1 of the DSpark paper. Host NumPy.

    Drafts are admitted in the order of `fill_by_rank` while expected tokens per second rise, and
    the first that does not raise them is the end. Without this stop, whether a draft is verified
    would depend on the confidence after it, hence on its token (engine.md 3.5).

    Args:
        survival: of the drafts, not increasing along a row; a NaN counts 0.
        throughput: steps per second of a step of b rows, as a function or at place b of an array.
    """
    speed = throughput if callable(throughput) else throughput.__getitem__
    requests, drafts = survival.shape
    length = np.zeros(requests, np.int32)
    if not requests:
        return length
    rates = np.where(np.isnan(survival), 0, survival).reshape(-1)
    rows, tokens = requests, float(requests)
    best = tokens * speed(rows)
    for place in np.argsort(-rates, kind="stable"):
        rows, tokens = rows + 1, tokens + float(rates[place])
        rate = tokens * speed(rows)
        if rate <= best:
            break
        best = rate
        length[place // drafts] += 1
    return 1 + length
