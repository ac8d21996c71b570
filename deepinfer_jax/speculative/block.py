"""Block verification: a round's drafts judged together (engine.md 3.8 B, arXiv 2403.10444).

Row j of a round predicts the token after draft j; row 0 is the anchor's. With p_j and q_j of row j
and x the draft after it, the prefix masses are P_0 = 1, P_{j+1} = min(P_j p_j(x) / q_j(x), 1), and
the residual masses s_j = sum over v of max(P_j p_j(v) - q_j(v), 0). Draft j is kept if its coin is
below s_j / (s_j + 1 - P_j); the last draft that is kept ends the round. A row without a usable q
counts as q = 0, so s_j = P_j: that is the rule of the last row, and a draft there is never kept.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.rows import Leaf
from deepinfer_jax.sampling.sample import choose_tile
from deepinfer_jax.speculative.rejection import (
    draft_probabilities,
    residual_logprobs,
    residual_mass,
)
from pallas_kernels.core.pin import pin


@struct.dataclass
class BlockRows:
    """Per row: the residual mass s_j, and the token that it emits if it ends its round."""

    mass: Leaf  # float32 [t]
    correction: Leaf  # int32 [t]


def block_mass(ratio: Float[Array, "s n"], draft_len: Int[Array, " s"]) -> Float[Array, "s n+1"]:
    """Returns the prefix masses P_0..P_n of every round, 0 beyond its drafts.

    Args:
        ratio: p(x) / q(x) of drafts 1..n, from `row_verdicts`.
        draft_len: drafts of each round.
    """
    columns = [jnp.ones(draft_len.shape, jnp.float32)]
    for column in range(ratio.shape[1]):
        kept = jnp.minimum(columns[-1] * ratio[:, column], np.float32(1))
        columns.append(jnp.where(column < draft_len, kept, np.float32(0)))
    return jnp.stack(columns, axis=1)


def block_rows(
    log_p: Float[Array, "t v"],
    log_q: Float[Array, "t v"],
    prefix: Float[Array, " t"],
    is_active: Bool[Array, " t"],
    key: UInt32[Array, "t 2"],
    index: Int[Array, " t"],
    correction: Int[Array, " t"],
) -> BlockRows:
    """Returns the residual mass and the correction of the rows of one tile.

    Args:
        log_p: processed target log-probabilities; -inf where a token may not be chosen.
        log_q: those of the draft after each row.
        prefix: P_j of each row, from `block_mass`.
        is_active: rows of the block rule that have a draft. The others keep `correction`, and have
            the mass of a last row.
        key: of each row's request.
        index: position of the token that each row chooses.
        correction: from `row_verdicts`.
    """
    is_active &= prefix > 0  # no other row can end a round

    def draw() -> tuple[Array, Array]:
        kept, q = pin(prefix[:, None] * pin(jnp.exp(log_p))), draft_probabilities(log_q)
        is_usable = jnp.isfinite(q[:, 0]) & jnp.any(log_p > -jnp.inf, axis=-1)
        mass = jnp.where(is_active & is_usable, residual_mass(kept, q), prefix)
        token = choose_tile(residual_logprobs(kept, q), key, index, purpose=random.RESIDUAL)
        return mass, jnp.where(is_active, token, correction)

    mass, token = lax.cond(jnp.any(is_active), draw, lambda: (prefix, correction))
    return BlockRows(mass=mass, correction=token)


def block_length(
    prefix: Float[Array, "s m"],
    mass: Float[Array, "s m"],
    coins: Float[Array, "s n"],
    draft_len: Int[Array, " s"],
) -> Int[Array, " s"]:
    """Returns how many drafts of every round are kept: the last whose coin is below its chance.

    Args:
        prefix: P_0..P_n, from `block_mass`.
        mass: s_0..s_n, from `block_rows`.
        coins: of drafts 1..n.
        draft_len: drafts of each round.
    """
    whole = mass + (np.float32(1) - prefix)
    # 0 if P_j = 1 and p_j = q_j: the draft is surely kept
    chance = jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1), np.float32(1))[:, 1:]
    number = jnp.arange(1, coins.shape[1] + 1, dtype=jnp.int32)
    is_kept = (coins < chance) & (number <= draft_len[:, None])
    return jnp.max(jnp.where(is_kept, number, 0), axis=1, initial=0)
