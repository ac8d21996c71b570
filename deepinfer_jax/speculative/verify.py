"""Which drafts of a round are accepted, and what is emitted after them (engine.md 3.8).

A round is the anchor and its drafts x_1..x_l. Its row j predicts the token after x_j (row 0: after
the anchor), so "the draft of row j" is x_{j+1}; row l has none. Rows are judged in tiles that may
hold several requests and rules; no row's bits depend on the others. Three steps:

1. `row_verdicts` of every row; `accept.accepted_rows` finds the accepted prefix.
2. Only for the rule "block": `block.block_mass`, `block_rows` of every row, `block_length`.
3. The rows up to the first that is not accepted emit: their drafts, the last one its correction.

At temperature 0 all rules emit the highest logit, whatever their coins are.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from deepinfer_jax.errors import InputError
from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.edits import tile_rows
from deepinfer_jax.sampling.rows import Leaf
from deepinfer_jax.sampling.sample import NO_TOKEN, choose_tile
from deepinfer_jax.speculative.accept import accepted_rows, emitted_tokens
from deepinfer_jax.speculative.block import block_length, block_mass, block_rows
from deepinfer_jax.speculative.rejection import (
    acceptance_probability,
    draft_probabilities,
    probability_ratio,
    residual_logprobs,
)
from pallas_kernels.core.pin import pin

EXACT, REJECTION, BLOCK = range(3)
RULES = ("exact", "rejection", "block")  # by number; `SamplingParams.verify`


@struct.dataclass
class RowVerdicts:
    """Per row, without regard to the other rows of its round.

    accept: its draft is accepted; false without one, and under "block", which judges whole rounds.
    correction: what it emits if it ends its round. Under "block" only for rows without a draft.
    ratio: p(x) / q(x) of its draft; 0 under "exact", and where p or q is unusable.
    """

    accept: Leaf  # bool [t]
    correction: Leaf  # int32 [t]
    ratio: Leaf  # float32 [t]


@struct.dataclass
class Verified:
    """What s rounds emit.

    accepted [s]: drafts. token [s, n + 1]: those and one more, then -1. The last one is -1 too if
    its row allows no token.
    """

    accepted: Leaf  # int32 [s]
    token: Leaf  # int32 [s, n + 1]


def draft_tokens(
    log_q: Float[Array, "t v"],
    rule: Int[Array, " t"],
    key: UInt32[Array, "t 2"],
    anchor: Int[Array, " t"],
    index: Int[Array, " t"],
) -> Int[Array, " t"]:
    """Returns the drafts of the rows of one tile.

    Rows of "exact" use the target's own noise, so that draft and target agree as often as they can.
    The other rules must never draw the same noise in two rounds: a budget taken from an earlier
    round would know the token (engine.md 3.5). Their noise depends on the anchor as well.

    Args:
        log_q: processed draft log-probabilities; -inf where a token may not be chosen.
        rule: EXACT, REJECTION or BLOCK.
        key: of each row's request.
        anchor: position of the round's anchor.
        index: position of the token that is drafted.
    """
    is_shared = rule == EXACT

    def draw(key: Array, purpose: int) -> Array:
        return choose_tile(log_q, key, index, purpose=purpose)

    def none() -> Array:
        return jnp.full(index.shape, NO_TOKEN, jnp.int32)

    shared = lax.cond(jnp.any(is_shared), lambda: draw(key, random.TARGET), none)
    own = lax.cond(
        jnp.all(is_shared), none, lambda: draw(random.anchor_key(key, anchor), random.DRAFT)
    )
    return jnp.where(is_shared, shared, own)


def row_verdicts(
    log_p: Float[Array, "t v"],
    log_q: Float[Array, "t v"] | None,
    draft: Int[Array, " t"],
    rule: Int[Array, " t"],
    key: UInt32[Array, "t 2"],
    index: Int[Array, " t"],
    number: Int[Array, " t"],
    token: Int[Array, " t"],
) -> RowVerdicts:
    """Returns the verdicts of the rows of one tile; noise that no row needs is not drawn.

    Args:
        log_p: processed target log-probabilities; -inf where a token may not be chosen.
        log_q: those that the rows' drafts were drawn from. None: all rows are of the rule "exact".
        draft: of each row, -1 for none.
        rule: EXACT, REJECTION or BLOCK.
        key: of each row's request.
        index: position of the token that each row chooses.
        number: of each row's draft in its round, from 1.
        token: the target's choice (`sample_tile`), -1 where the row allows none.
    """
    has_draft = draft >= 0
    agrees = has_draft & (draft == token)
    if log_q is None:
        return RowVerdicts(
            accept=agrees, correction=token, ratio=jnp.zeros(draft.shape, jnp.float32)
        )
    needs_q = has_draft & (rule != EXACT)

    def judge() -> RowVerdicts:
        p, q = pin(jnp.exp(log_p)), draft_probabilities(log_q)
        place = jnp.maximum(draft, 0)[:, None]
        p_token, q_token = (jnp.take_along_axis(x, place, axis=1)[:, 0] for x in (p, q))
        coin = random.coins(key, index[:, None], number[:, None])[:, 0]
        is_accepted = coin < acceptance_probability(p_token, q_token)
        is_rejected = needs_q & (rule == REJECTION) & ~is_accepted
        correction = lax.cond(
            jnp.any(is_rejected),
            lambda: choose_tile(residual_logprobs(p, q), key, index, purpose=random.RESIDUAL),
            lambda: token,
        )
        return RowVerdicts(
            accept=jnp.where(needs_q, (rule == REJECTION) & is_accepted, agrees),
            correction=jnp.where(is_rejected, correction, token),
            ratio=jnp.where(needs_q, probability_ratio(p_token, q_token), np.float32(0)),
        )

    def compare() -> RowVerdicts:
        none = jnp.zeros(draft.shape, jnp.float32)
        return RowVerdicts(accept=agrees, correction=token, ratio=none)

    return lax.cond(jnp.any(needs_q), judge, compare)


def verify(
    rule: str,
    log_p: Float[Array, "s m v"],
    log_q: Float[Array, "s n v"] | None,
    draft: Int[Array, "s n"],
    draft_len: Int[Array, " s"],
    key: UInt32[Array, "s 2"],
    anchor: Int[Array, " s"],
) -> Verified:
    """Returns what s rounds of one rule emit. Row-tiled: the bits of a round do not depend on s.

    Under `jit`, `rule` is static.

    Args:
        rule: "exact", "rejection" or "block".
        log_p: processed target log-probabilities of rows 0..n; -inf where a token may not be
            chosen.
        log_q: those that drafts 1..n were drawn from by `draft_tokens`; not read by "exact".
        draft: ids of drafts 1..n.
        draft_len: how many of them are real.
        key: of each round's request.
        anchor: position of the anchor; row j chooses the token at anchor + 1 + j.

    Raises:
        InputError: the rule is unknown, log_q is missing, or log_p has another number of rows.
    """
    sequences, rows, _ = log_p.shape
    if rule not in RULES:
        raise InputError(f"rule must be one of {RULES}, got {rule!r}")
    if rows != draft.shape[1] + 1:
        raise InputError(f"n drafts need n + 1 rows of log_p, got {draft.shape[1]} and {rows}")
    if rule == "exact":
        log_q = None
    elif log_q is None:
        raise InputError(f"{rule!r} needs log_q, which the drafts were drawn from; got None")
    number = jnp.arange(1, rows + 1, dtype=jnp.int32)
    own = jnp.pad(draft, ((0, 0), (0, 1)))
    own = jnp.where(number <= draft_len[:, None], own, NO_TOKEN).astype(jnp.int32)
    index = (anchor[:, None] + number).astype(jnp.int32)
    flat = partial(_flat, sequences * rows)
    log_p, own, index = flat(log_p), flat(own), flat(index)
    log_q = None if log_q is None else flat(jnp.pad(log_q, ((0, 0), (0, 1), (0, 0))))
    row_key = jnp.repeat(key, rows, axis=0)
    first = jnp.arange(sequences, dtype=jnp.int32) * rows

    def judge(log_p: Array, log_q: Array | None, draft: Array, *where: Array) -> RowVerdicts:
        row_key, index, number = where
        token = choose_tile(log_p, row_key, index, purpose=random.TARGET)
        rules = jnp.full(draft.shape, RULES.index(rule), jnp.int32)
        return row_verdicts(log_p, log_q, draft, rules, row_key, index, number, token)

    found = tile_rows(judge, log_p, log_q, own, row_key, index, jnp.tile(number, sequences))
    accept, correction = found.accept, found.correction
    if log_q is not None and rule == "block":
        prefix = block_mass(found.ratio.reshape(sequences, rows)[:, :-1], draft_len)
        body = tile_rows(
            block_rows, log_p, log_q, flat(prefix), own >= 0, row_key, index, correction
        )
        coins = random.coins(
            key, index.reshape(sequences, rows)[:, :-1], jnp.broadcast_to(number[:-1], draft.shape)
        )
        length = block_length(prefix, body.mass.reshape(prefix.shape), coins, draft_len)
        accept, correction = flat(number <= length[:, None]), body.correction
    request = jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), rows)
    ends = accepted_rows(accept, own >= 0, request, first)
    token = emitted_tokens(ends, jnp.where(ends.is_accepted, own, correction))
    accepted = ends.is_accepted.reshape(sequences, rows).sum(axis=1, dtype=jnp.int32)
    return Verified(accepted=accepted, token=token.reshape(sequences, rows))


def _flat(rows: int, x: Array) -> Array:
    return x.reshape(rows, *x.shape[2:])
