"""From logits to one token per row: a function of (seed, index, logits, parameters) only.

The whole row runs in one tile body: edits, temperature, truncation, noise, choice. The number of
rows, their order and the other rows never change a row's bits (determinism.md 4.1).
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from deepinfer_jax.sampling import logprobs as reported
from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.edits import OK, Edits, edit_tile, tile_rows
from deepinfer_jax.sampling.rows import Leaf, RowParams
from deepinfer_jax.sampling.truncate import NARROW, is_greedy, logprobs_tile
from pallas_kernels import core

NO_TOKEN = -1
LogprobsMode = Literal["raw", "processed"]


@struct.dataclass
class Sampled:
    """One token per row; NO_TOKEN where the status (`edits.OK`, ...) is not OK."""

    token: Leaf  # int32 [b]
    status: Leaf  # int32 [b]
    logprobs: reported.TokenLogprobs | None


def choose_token(
    log_p: Float[Array, "b v"],
    key: UInt32[Array, "b 2"],
    index: Int[Array, " b"],
    purpose: int = random.TARGET,
) -> Int[Array, " b"]:
    """Returns argmax(log p - log E) of each row, the lowest id among equals. Row-tiled.

    Args:
        log_p: -inf where a token may not be chosen; a row of -inf gives NO_TOKEN.
        key: of the request; its anchor key for `random.DRAFT`.
        index: position of the token that is chosen.
        purpose: `random.TARGET`, `RESIDUAL` or `DRAFT`.
    """
    return core.map_row_tiles(partial(choose_tile, purpose=purpose), log_p, key, index)


def choose_tile(log_p: Array, key: Array, index: Array, *, purpose: int) -> Array:
    """The body of `choose_token` for one tile of rows."""
    score = log_p - random.token_noise(key, index, log_p.shape[-1], purpose)
    is_any = jnp.any(log_p > -jnp.inf, axis=-1)
    return jnp.where(is_any, jnp.argmax(score, axis=-1), NO_TOKEN).astype(jnp.int32)


@partial(jax.jit, static_argnames=("purpose", "logprobs", "mode"))
def sample(
    logits: Float[Array, "b v"],
    rows: RowParams,
    index: Int[Array, " b"],
    edits: Edits | None = None,
    never_emit: Bool[Array, " v"] | None = None,
    *,
    purpose: int = random.TARGET,
    logprobs: int | None = None,
    mode: LogprobsMode = "raw",
) -> Sampled:
    """Returns one token of each row.

    Args:
        logits: float32 head output over the real ids.
        rows: parameters of each row.
        index: position of the token that is chosen (the first output token of a prompt of length
            L has L).
        edits: inputs of the logit edits.
        never_emit: ids that no request may emit.
        purpose: which stream of the generator is used.
        logprobs: None, 0 for the chosen token only, k for the k best ids as well.
        mode: which log-probabilities are reported.

    Returns:
        tokens, statuses and log-probabilities. A row that fails has NO_TOKEN; the other rows are
        not touched by it.
    """

    def body(logits: Array, rows: RowParams, index: Array, edits: Edits) -> Sampled:
        token, status, log_p = sample_tile(
            logits, rows, index, edits, never_emit=never_emit, purpose=purpose
        )
        if logprobs is None:
            return Sampled(token=token, status=status, logprobs=None)
        raw = mode == "raw"
        values = core.log_softmax(logits) if raw else log_p
        record = reported.pick_tile(logits if raw else log_p, values, token, logprobs)
        return Sampled(token=token, status=status, logprobs=record)

    return tile_rows(body, logits, rows, index, edits or Edits())


def sample_tile(
    logits: Array,
    rows: RowParams,
    index: Array,
    edits: Edits,
    *,
    never_emit: Array | None = None,
    purpose: int = random.TARGET,
    digit: int = NARROW,
) -> tuple[Array, Array, Array]:
    """The body of `sample` for one tile of rows: (token, status, processed log p [b, v])."""
    scores, status = edit_tile(logits, rows, edits, never_emit)
    log_p = logprobs_tile(scores, rows, digit)
    # log p of a greedy row is 0 at its token and -inf elsewhere, with or without noise
    token = lax.cond(
        jnp.all(is_greedy(rows.temperature)),
        lambda: jnp.argmax(log_p, axis=-1).astype(jnp.int32),
        lambda: choose_tile(log_p, rows.key, index, purpose=purpose),
    )
    return jnp.where(status == OK, token, NO_TOKEN), status, log_p
