"""Tokens of the rows that choose one, and how many of each round are emitted (engine.md 3.8, 5).

Rows are taken in tiles of fixed height, so a row's bits depend neither on their number nor on the
other rows. With verify="exact" the token of a row is a function of (seed, index, logits) alone: a
draft can only say in advance what it will be.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.layout import PlanParts, header_word
from deepinfer_jax.engine.rows import SMALL_TABLE, TILE, Emitters, by_tiles
from deepinfer_jax.engine.slots import ENDED, RUNNING, DraftState, SlotState, advance, row_edits
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.step import Plan
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.record.logit_hash import logit_hash_tile
from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.edits import unpack_bitmask
from deepinfer_jax.sampling.logprobs import TokenLogprobs, pick_tile
from deepinfer_jax.sampling.rows import RowParams
from deepinfer_jax.sampling.sample import NO_TOKEN, sample_tile
from deepinfer_jax.sampling.truncate import NARROW, WIDE
from deepinfer_jax.speculative.block import block_length, block_mass, block_rows
from deepinfer_jax.speculative.verify import BLOCK, row_verdicts
from pallas_kernels import core


@struct.dataclass
class Emitted:
    """What the s emitters of a step emit.

    count: tokens, a stop id included; 0 unless live. tokens [s, n + 1], -1 beyond. code: of the
    last one (`slots.RUNNING`, ...), -1 unless live. status: of the sampler, of the last one.
    accepted: drafts, before any stop.
    """

    count: Leaf  # int32 [s]
    tokens: Leaf  # int32 [s, n + 1]
    code: Leaf  # int32 [s]
    status: Leaf  # int32 [s]
    accepted: Leaf  # int32 [s]


@struct.dataclass
class Reported:
    """What is told of the tokens of e emitting rows, beside the tokens.

    logprobs: zeros unless the plan wants them. hashes: of the raw logits; None unless recorded.
    """

    logprobs: TokenLogprobs
    hashes: Leaf  # uint32 [e, 2]


@struct.dataclass
class _Chosen:
    """By emitting row: its token, and whether the round goes on after it.

    ratio: p / q of its draft. Under the rule "block" the token is the draft, if there is one.
    """

    token: Leaf  # int32 [e]
    goes_on: Leaf  # bool [e]
    status: Leaf  # int32 [e]
    ratio: Leaf  # float32 [e]


@struct.dataclass
class _Rows:
    """One tile of emitting rows."""

    hidden: Leaf  # float32 [t, d]
    slot: Leaf  # int32 [t]
    index: Leaf  # int32 [t]: position of the token that is chosen
    draft: Leaf  # int32 [t]: the draft of that position, -1 if none is verified
    before: Leaf  # int32 [t, n]: drafts of the round up to the row, -1 beyond
    number: Leaf  # int32 [t]: of the draft in its round, from 1
    mask: Leaf  # int32 [t, w]: bits of the ids that its grammar allows; None in most programs


def choose(
    params: AnyParams,
    config: ModelConfig,
    slots: SlotState,
    parts: PlanParts,
    plan: Plan,
    emitters: Emitters,
    hidden: Float[Array, "t d"],
    alternatives: int,
    hashes: bool,
    masks: Int[Array, "m w"] | None = None,
) -> tuple[SlotState, Emitted, Reported]:
    """Returns (slots after the tokens, what is emitted, what is told of it by emitting row).

    Emitting rows are numbered as `Emitters.first` says. hashes: of the logits, or nothing of them
    is in the program. masks: of grammars, (drafts + 1) rows for each emitter.
    """
    width = 1 if slots.drafting is None else slots.drafting.token.shape[1] + 1
    most = emitters.slot.shape[0] * width
    size = -(-most // TILE) * TILE
    stop = emitters.first + emitters.rows
    wants = header_word(parts, "wants_logprobs") > 0
    image = config.image_token_id  # stands for pixels: no text has it
    never = None if image is None else jnp.arange(config.vocab_size) == image
    ops = ops_for(config.execution)
    always_told = ops.static and size * config.vocab_size <= SMALL_TABLE

    def emitting(number: Int[Array, " t"]) -> tuple[Array, _Rows, Array]:
        """Returns (numbers, the rows of these numbers, their logits)."""
        rows = _tile_rows(slots, plan, emitters, stop, number, hidden, masks)
        return number, rows, ops.head(rows.hidden, params.head)

    def sampled(number: Array, rows: _Rows, logits: Array) -> tuple:
        """Returns the arguments of `judged` of one tile."""
        rules = slots.rules.take(rows.slot)
        digit = WIDE if ops.static else NARROW
        return rules, rows, number, *_sample(slots, rules, rows, logits, never, digit), logits

    def judged(
        judge: Callable[..., _Chosen],
        rules: RowParams,
        rows: _Rows,
        number: Array,
        token: Array,
        status: Array,
        log_p: Array,
        logits: Array,
    ) -> tuple[_Chosen, Reported]:
        chosen = judge(rules, rows, number, token, status, log_p)
        processed = slots.processed[rows.slot]

        def record() -> TokenLogprobs:
            return token_record(logits, log_p, processed, chosen.token, alternatives)

        nothing = partial(no_record, TILE, alternatives)
        logprobs = record() if always_told else lax.cond(wants, record, nothing)
        return chosen, Reported(
            logprobs=logprobs, hashes=logit_hash_tile(logits) if hashes else None
        )

    everything = None
    if ops.static:
        everything = by_tiles(sampled, *emitting(jnp.arange(size, dtype=jnp.int32)))

    def each_tile(judge: Callable[..., _Chosen], tiles: Array) -> tuple[_Chosen, Reported]:
        """Returns what `judge` finds for all emitting rows, and what is told of its tokens."""
        if everything is not None:
            return by_tiles(partial(judged, judge), *everything)

        def tile(index: Int[Array, ""] | int, found: tuple) -> tuple:
            start = index * TILE
            rows = emitting(start + jnp.arange(TILE, dtype=jnp.int32))
            return jax.tree.map(
                lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0),
                found,
                judged(judge, *sampled(*rows)),
            )

        no_hashes = jnp.zeros((size, 2), jnp.uint32) if hashes else None
        nothing = Reported(logprobs=no_record(size, alternatives), hashes=no_hashes)
        begin = (_nothing(size), nothing)
        return lax.fori_loop(0, tiles, tile, begin)

    tiles = -(-stop[-1] // TILE)
    chosen, told = each_tile(partial(_verdict, slots), tiles)
    if slots.drafting is not None and slots.drafting.log_q is not None:
        chosen, told = _block_rounds(slots, emitters, chosen, told, each_tile, tiles)
    slots, emitted = _emit(slots, emitters, chosen, width)
    return slots, emitted, jax.tree.map(lambda leaf: leaf[:most], told)


def _tile_rows(
    slots: SlotState,
    plan: Plan,
    emitters: Emitters,
    stop: Int[Array, " s"],
    number: Int[Array, " t"],
    hidden: Float[Array, "n d"],
    masks: Int[Array, "m w"] | None,
) -> _Rows:
    """Returns the emitting rows of these numbers; those beyond the last repeat some row."""
    owner = jnp.searchsorted(stop, number, side="right", method="compare_all")
    owner = jnp.minimum(owner, stop.shape[0] - 1).astype(jnp.int32)
    offset = jnp.clip(number - emitters.first[owner], 0, jnp.maximum(emitters.rows[owner] - 1, 0))
    row, slot = emitters.row[owner] + offset, emitters.slot[owner]
    row, slot, offset = lax.optimization_barrier((row, slot, offset))
    draft = jnp.full_like(row, NO_TOKEN)
    before = jnp.zeros((number.shape[0], 0), jnp.int32)
    if slots.drafting is not None:
        drafts = slots.drafting.token[slot]
        place = jnp.arange(drafts.shape[1], dtype=jnp.int32)
        before = jnp.where(place < offset[:, None], drafts, -1)
        own = jnp.take_along_axis(drafts, jnp.minimum(offset, place[-1])[:, None], axis=1)[:, 0]
        draft = jnp.where(offset + 1 < emitters.rows[owner], own, NO_TOKEN)
    return _Rows(
        hidden=hidden[row],
        slot=slot,
        index=plan.position[row] + 1,
        draft=draft,
        before=before,
        number=offset + 1,
        mask=None if masks is None else masks[owner * (before.shape[1] + 1) + offset],
    )


def _sample(
    slots: SlotState,
    rules: RowParams,
    rows: _Rows,
    logits: Array,
    never: Array | None,
    digit: int,
) -> tuple[Array, Array, Array]:
    """Returns `sample_tile` of the rows, without the costly edits if no row has any."""

    def pick(full: bool) -> tuple[Array, Array, Array]:
        edits = row_edits(slots, rows.slot, rows.before, full=full)
        if rows.mask is not None:
            edits = replace(edits, grammar=unpack_bitmask(rows.mask, logits.shape[1]))
        return sample_tile(logits, rules, rows.index, edits, never_emit=never, digit=digit)

    return lax.cond(slots.edited[rows.slot].any(), lambda: pick(True), lambda: pick(False))


def _verdict(
    slots: SlotState,
    rules: RowParams,
    rows: _Rows,
    number: Array,
    token: Array,
    status: Array,
    log_p: Array,
) -> _Chosen:
    """Returns what each row emits, and whether its round goes on, without the other rows."""
    if slots.drafting is None:
        return replace(_nothing(token.shape[0]), token=token, status=status)
    rule = slots.drafting.rule[rows.slot]
    found = row_verdicts(
        log_p,
        _draft_log_q(slots.drafting, rows),
        rows.draft,
        rule,
        rules.key,
        rows.index,
        rows.number,
        token,
    )
    is_kept = found.accept | ((rule == BLOCK) & (rows.draft >= 0))
    return _Chosen(
        token=jnp.where(is_kept, rows.draft, found.correction),
        goes_on=found.accept,
        status=status,
        ratio=found.ratio,
    )


def _draft_log_q(drafting: DraftState, rows: _Rows) -> Float[Array, "t v"] | None:
    if drafting.log_q is None:
        return None
    return drafting.log_q[rows.slot, jnp.minimum(rows.number, drafting.token.shape[1]) - 1]


def _block_rounds(
    slots: SlotState,
    emitters: Emitters,
    chosen: _Chosen,
    told: Reported,
    each_tile: Callable[..., tuple[_Chosen, Reported]],
    tiles: Array,
) -> tuple[_Chosen, Reported]:
    """Judges the rounds of the rule "block" (engine.md 3.8 B), which no row can judge alone.

    A second pass over the rows, if there is such a round: what the row emits if it ends the round.
    """
    drafting = slots.drafting
    assert drafting is not None
    size, width = chosen.token.shape[0], drafting.token.shape[1] + 1
    place, row, is_row = _round_rows(emitters, width, size)
    is_block = drafting.rule[emitters.slot] == BLOCK
    count = jnp.where(is_block, jnp.maximum(emitters.rows - 1, 0), 0)
    where = jnp.where(is_row, row, size)

    def by_row(grid: Array, filler: Any) -> Array:
        return jnp.full((size,), filler, grid.dtype).at[where].set(grid, mode="drop")

    prefix = block_mass(chosen.ratio[row][:, :-1], count)
    prefix_row = by_row(prefix, 0)

    def end(
        rules: RowParams, rows: _Rows, number: Array, token: Array, status: Array, log_p: Array
    ) -> _Chosen:
        log_q = _draft_log_q(drafting, rows)
        assert log_q is not None
        is_active = (drafting.rule[rows.slot] == BLOCK) & (rows.draft >= 0)
        found = block_rows(
            log_p, log_q, prefix_row[number], is_active, rules.key, rows.index, token
        )
        return _Chosen(token=found.correction, goes_on=is_active, status=status, ratio=found.mass)

    last, last_told = each_tile(end, jnp.where(count.sum() > 0, tiles, 0))
    mass = last.ratio[row]
    index = emitters.base[:, None] + 1 + place[:-1]
    numbers = jnp.broadcast_to(place[1:], index.shape)
    coins = random.coins(slots.rules.key[emitters.slot], index, numbers)
    length = block_length(prefix, mass, coins, count)
    is_judged = (count > 0)[:, None]
    ends = by_row(is_judged & (place >= length[:, None]), False)
    goes_on = by_row(is_judged & (place < length[:, None]), False) | chosen.goes_on
    chosen = replace(chosen, token=jnp.where(ends, last.token, chosen.token), goes_on=goes_on)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(ends.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return chosen, jax.tree.map(pick, last_told, told)


def _round_rows(emitters: Emitters, width: int, size: int) -> tuple[Array, Array, Array]:
    """Returns (places [w], emitting row of each emitter's places [s, w], whether it has them)."""
    place = jnp.arange(width, dtype=jnp.int32)
    row = jnp.minimum(emitters.first[:, None] + place, size - 1)
    return place, row, place < emitters.rows[:, None]


def _nothing(rows: int) -> _Chosen:
    return _Chosen(
        token=jnp.full((rows,), NO_TOKEN, jnp.int32),
        goes_on=jnp.zeros((rows,), bool),
        status=jnp.zeros((rows,), jnp.int32),
        ratio=jnp.zeros((rows,), jnp.float32),
    )


def _emit(
    slots: SlotState, emitters: Emitters, chosen: _Chosen, width: int
) -> tuple[SlotState, Emitted]:
    """Returns the slots after the accepted tokens and one more of every live emitter."""
    place, row, is_row = _round_rows(emitters, width, chosen.token.shape[0])
    goes_on = jnp.cumprod(jnp.where(is_row, chosen.goes_on[row], False), axis=1, dtype=jnp.int32)
    accepted = goes_on.sum(axis=1, dtype=jnp.int32)
    tokens, status = chosen.token[row], chosen.status[row]
    count = jnp.zeros_like(accepted)
    last_code = jnp.where(emitters.is_live, RUNNING, ENDED)
    last_status = jnp.zeros_like(accepted)
    for step in range(width):
        is_real = emitters.is_live & (step <= accepted) & (last_code == RUNNING)
        slots, code = advance(slots, emitters.slot, tokens[:, step], is_real)
        last_code = jnp.where(is_real, code, last_code)
        last_status = jnp.where(is_real, status[:, step], last_status)
        count += is_real
    emitted = Emitted(
        count=count,
        tokens=jnp.where(place < count[:, None], tokens, NO_TOKEN),
        code=last_code,
        status=last_status,
        accepted=accepted,
    )
    return slots, emitted


def token_record(
    logits: Array, log_p: Array, processed: Array, token: Array, alternatives: int
) -> TokenLogprobs:
    """Returns the record of a tile, of the raw logits or of log p as each row wants."""
    chosen = processed[:, None]
    order = jnp.where(chosen, log_p, logits)
    return pick_tile(order, jnp.where(chosen, log_p, core.log_softmax(logits)), token, alternatives)


def no_record(rows: int, alternatives: int) -> TokenLogprobs:
    """Returns a record of zeros."""
    return TokenLogprobs(
        logprob=jnp.zeros((rows,), jnp.float32),
        rank=jnp.zeros((rows,), jnp.int32),
        top_ids=jnp.zeros((rows, alternatives), jnp.int32),
        top_logprobs=jnp.zeros((rows, alternatives), jnp.float32),
    )
