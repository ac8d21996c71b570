"""Token-wise rejection: acceptance probability, residual distribution, accepted prefix.

The pieces of `verify="rejection"` (engine.md 3.8 R) on target probabilities p and draft
probabilities q, both after masks, temperature and truncation. float32, sums in a fixed order.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import core
from pallas_kernels.core.pin import pin

SMALLEST = np.float32(1e-8)  # floor of a draft probability, and of a usable residual mass


def draft_probabilities(log_q: Float[Array, "t v"]) -> Float[Array, "t v"]:
    """Returns q of the rows of one tile; a row with a value that is not finite becomes NaN.

    So its draft is rejected and another token is drawn from p, which keeps the law of p.
    """
    q = jnp.exp(log_q)
    is_finite = jnp.all(jnp.isfinite(q), axis=-1, keepdims=True)
    return pin(jnp.where(is_finite, q, np.float32(np.nan)))


def probability_ratio(
    p_token: Float[Array, "*b"], q_token: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Returns p(x) / max(q(x), 1e-8) of the drafted token x; a non-finite q gives 0."""
    ratio = p_token / jnp.maximum(q_token, SMALLEST)
    return jnp.where(jnp.isfinite(q_token), ratio, np.float32(0))


def acceptance_probability(
    p_token: Float[Array, "*b"], q_token: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Returns min(1, p(x) / max(q(x), 1e-8)) of the drafted token x; a non-finite q gives 0."""
    return jnp.minimum(probability_ratio(p_token, q_token), np.float32(1))


def residual_mass(p: Float[Array, "*b v"], q: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Returns sum max(p - q, 0), the chance that a draft from q is rejected if p sums to 1."""
    return core.tree_sum(jnp.maximum(p - q, np.float32(0)))


def residual_probabilities(
    p: Float[Array, "*b v"], q: Float[Array, "*b v"]
) -> Float[Array, "*b v"]:
    """Returns max(p - q, 0) over its mass; p itself if the mass is <= 1e-8 or q is not finite."""
    excess = jnp.maximum(p - q, np.float32(0))
    is_usable = jnp.all(jnp.isfinite(q), axis=-1, keepdims=True)
    mass = core.tree_sum(jnp.where(is_usable, excess, np.float32(0)))[..., None]
    is_usable &= mass > SMALLEST
    return jnp.where(is_usable, excess / jnp.where(is_usable, mass, np.float32(1)), p)


def residual_logprobs(p: Float[Array, "b v"], q: Float[Array, "b v"]) -> Float[Array, "b v"]:
    """Returns log of the residual, for `choose_token` with the purpose `RESIDUAL`. Row-tiled."""
    return core.map_row_tiles(lambda p, q: pin(jnp.log(residual_probabilities(p, q))), p, q)


def expected_acceptance(p: Float[Array, "*b v"], q: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Returns 1 - sum max(p - q, 0), the chance that a draft from q is accepted."""
    return np.float32(1) - residual_mass(p, q)


def accepted_length(
    accept: Float[Array, "b n"], uniforms: Float[Array, "b n"], draft_len: Int[Array, " b"]
) -> Int[Array, " b"]:
    """Returns how many leading drafts are accepted: u_j < accept_j for all of them.

    Args:
        accept: acceptance probability of each draft.
        uniforms: the accept coins.
        draft_len: number of real drafts of each row.
    """
    is_draft = jnp.arange(accept.shape[-1]) < draft_len[:, None]
    is_accepted = ((uniforms < accept) & is_draft).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(is_accepted, axis=-1), axis=-1, dtype=jnp.int32)
