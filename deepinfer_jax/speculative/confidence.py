"""Calibrated confidence of drafts and their survival (engine.md 3.3, 3.4)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from pallas_kernels import core

LOGIT_LIMIT = np.float32(60)  # keeps a confidence above 0, so that survivals stay ordered


def confidence_logit(
    hidden: Float[Array, "b d"], markov: Float[Array, "b r"], weight: Float[Array, "1 i"]
) -> Float[Array, " b"]:
    """Returns w . [hidden; markov] of every row; `hidden` is taken before the final norm."""
    joined = jnp.concatenate([hidden, markov], axis=-1)
    return core.contract(joined, weight)[:, 0]


def calibrated_confidence(
    logit: Float[Array, "b n"], temperature: Float[Array, " n"]
) -> Float[Array, "b n"]:
    """Returns sigmoid(logit / T), the quotient clamped to +-60. Row-tiled.

    Args:
        logit: of the draft positions 1..n.
        temperature: of each position, above 0.
    """

    def body(logit: Array) -> Array:
        return jax.nn.sigmoid(jnp.clip(logit / temperature, -LOGIT_LIMIT, LOGIT_LIMIT))

    return core.map_row_tiles(body, logit)


def survival(confidence: Float[Array, "b n"]) -> Float[Array, "b n"]:
    """Returns the running products c_1, c_1 c_2, ...; a NaN counts as 0."""
    total = jnp.where(jnp.isnan(confidence), np.float32(0), confidence)
    columns: list[Array] = []
    for column in range(total.shape[-1]):
        current = total[:, column]
        columns.append(columns[-1] * current if columns else current)
    return jnp.stack(columns, axis=-1) if columns else total
