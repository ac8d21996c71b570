"""Log-probabilities that are reported: the chosen token, its rank and alternatives (engine.md 5.6).

"raw" is the log softmax of the untouched head output, "processed" the distribution after all edits.
The order behind ranks and alternatives is that of the logits (raw) or of log p (processed), ties to
the lower id.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.sampling.edits import canonical_zeros
from deepinfer_jax.sampling.rows import Leaf
from pallas_kernels import core

FLOOR = np.float32(-9999)  # reported instead of -inf (and of NaN), never used in arithmetic


@struct.dataclass
class TokenLogprobs:
    """What is reported about one chosen token per row; k is the number of alternatives.

    `rank` counts from 1 (the most probable token). A row without a token has `rank` 0 and FLOOR.
    """

    logprob: Leaf  # float32 [b]
    rank: Leaf  # int32 [b]
    top_ids: Leaf  # int32 [b, k]
    top_logprobs: Leaf  # float32 [b, k]


def raw_logprobs(
    logits: Float[Array, "b v"], token: Int[Array, " b"], top: int = 0
) -> TokenLogprobs:
    """Returns raw log-probabilities of `token` and of the `top` best ids.

    Args:
        logits: head output over the real ids only.
        token: chosen ids, or the next prompt ids; negative is no token.
        top: number of alternatives; more than v gives v.
    """

    def body(logits: Array, token: Array) -> TokenLogprobs:
        return pick_tile(logits, core.log_softmax(logits), token, top)

    return core.map_row_tiles(body, logits, token)


def processed_token_logprobs(
    log_p: Float[Array, "b v"], token: Int[Array, " b"], top: int = 0
) -> TokenLogprobs:
    """Returns the same from `truncate.processed_logprobs`."""
    return core.map_row_tiles(
        lambda log_p, token: pick_tile(log_p, log_p, token, top), log_p, token
    )


def pick_tile(order: Array, log_p: Array, token: Array, top: int) -> TokenLogprobs:
    """Returns the record of a tile: ranks by `order`, values from `log_p`."""
    order = canonical_zeros(order)
    is_token = (token >= 0) & (token < order.shape[-1])
    place = jnp.where(is_token, token, 0)[:, None]
    score = jnp.take_along_axis(order, place, axis=-1)
    is_before = (order > score) | ((order == score) & (jnp.arange(order.shape[-1]) < place))
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32) + 1
    _, ids = core.top_k(order, min(top, order.shape[-1]))
    chosen = jnp.take_along_axis(log_p, place, axis=-1)[:, 0]
    return TokenLogprobs(
        logprob=_floored(jnp.where(is_token, chosen, -jnp.inf)),
        rank=jnp.where(is_token, rank, 0),
        top_ids=ids,
        top_logprobs=_floored(jnp.take_along_axis(log_p, ids, axis=-1)),
    )


def _floored(values: Array) -> Array:
    return jnp.where(values > FLOOR, values, FLOOR)
