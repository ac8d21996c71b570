"""What the device keeps of every running sequence beside its cache rows (engine.md 2.6)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Int

from deepinfer_jax.engine.layout import ADMIT_FLOATS, ADMIT_INTS
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.registry import AnyState
from deepinfer_jax.sampling.edits import Edits
from deepinfer_jax.sampling.rows import RowParams

#: Pairs of `SamplingParams.logit_bias` (io.md 3).
MAX_BIAS = 304
IN_PROMPT = 1 << 30
BANNED = 1 << 29
COUNT_MASK = BANNED - 1


@struct.dataclass
class DraftState:
    """Drafts of s slots, n each.

    token: after `SlotState.last`, while is_made. confidence: of each, given those before it.
    most: how many the request lets be verified. rule: `speculative.verify.RULES`. log_q: of the
    distributions they were drawn from, for rules that need them; None where only "exact" exists.
    """

    token: Leaf  # int32 [s, n]
    confidence: Leaf  # float32 [s, n]
    is_made: Leaf  # bool [s]
    most: Leaf  # int32 [s]
    rule: Leaf  # int32 [s]
    log_q: Leaf  # float32 [s, n, v]


@struct.dataclass
class SlotState:
    """Scheduler state of s = max_seqs + 1 slots; slot 0 is padding.

    last: newest token, whose row is in no cache yet. alive: false once stopped on the device.
    generation: of the sequence in the slot. produced, most, least: output tokens so far, their
    bound, and how many are due before a stop id counts. edited: the sequence has penalties, biases
    or a token set, in `marks` (output count, IN_PROMPT, BANNED) and in the bias pairs. processed:
    its reported log-probabilities are those after the edits. drafting: None if it is off.
    """

    last: Leaf  # int32 [s]
    alive: Leaf  # bool [s]
    generation: Leaf  # int32 [s]
    produced: Leaf  # int32 [s]
    most: Leaf  # int32 [s]
    least: Leaf  # int32 [s]
    stop_ids: Leaf  # int32 [s, k], -1 unused
    edited: Leaf  # bool [s]
    processed: Leaf  # bool [s]
    rules: RowParams
    marks: Leaf  # int32 [s, v]
    bias_ids: Leaf  # int32 [s, MAX_BIAS], -1 unused
    bias_values: Leaf  # float32 [s, MAX_BIAS]
    drafting: DraftState | None


@struct.dataclass
class EngineState:
    """Everything that stays on the device between steps.

    images: rows of encoded images, by place in `images.ImagePool`; None for a model without them.
    """

    cache: AnyState
    slots: SlotState
    images: Leaf = None  # [image_rows, d]


def init_slots(
    slots: int, vocab_size: int, stop_ids: int, *, drafts: int = 0, keeps_q: bool = False
) -> SlotState:
    """Returns the state of `slots` empty slots, the null slot included.

    drafts: of one round, 0 without drafting. keeps_q: for rules beside "exact".
    """

    def zeros(*shape: int, dtype: str = "int32") -> Array:
        return jnp.zeros((slots, *shape), dtype)

    rules = {name: zeros(dtype="float32") for name in ADMIT_FLOATS}
    drafting = DraftState(
        token=zeros(drafts),
        confidence=zeros(drafts, dtype="float32"),
        is_made=zeros(dtype="bool"),
        most=zeros(),
        rule=zeros(),
        log_q=zeros(drafts, vocab_size, dtype="float32") if keeps_q else None,
    )
    return SlotState(
        last=zeros(),
        alive=zeros(dtype="bool"),
        generation=zeros(),
        produced=zeros(),
        most=zeros(),
        least=zeros(),
        stop_ids=zeros(stop_ids) - 1,
        edited=zeros(dtype="bool"),
        processed=zeros(dtype="bool"),
        rules=RowParams(**rules, top_k=zeros() - 1, key=zeros(2, dtype="uint32")),
        marks=zeros(vocab_size),
        bias_ids=zeros(MAX_BIAS) - 1,
        bias_values=zeros(MAX_BIAS, dtype="float32"),
        drafting=drafting if drafts else None,
    )


def admit(slots: SlotState, admits: Int[Array, "a w"]) -> tuple[SlotState, dict[str, Array]]:
    """Returns the slots with newly admitted sequences, and the integer fields of the admissions.

    Entries with slot 0 are unused.
    """
    count = slots.last.shape[0]
    ints = {name: admits[:, place] for place, name in enumerate(ADMIT_INTS)}
    first = len(ADMIT_INTS)
    floats = {
        name: lax.bitcast_convert_type(admits[:, first + place], jnp.float32)
        for place, name in enumerate(ADMIT_FLOATS)
    }
    where = jnp.where(ints["slot"] > 0, ints["slot"], count)

    def put(leaf: Array, value: Array) -> Array:
        return leaf.at[where].set(value.astype(leaf.dtype), mode="drop")

    words = jnp.stack([ints["key_high"], ints["key_low"]], axis=1)
    rules = {name: put(getattr(slots.rules, name), value) for name, value in floats.items()}
    key = put(slots.rules.key, lax.bitcast_convert_type(words, jnp.uint32))
    slots = replace(
        slots,
        alive=put(slots.alive, jnp.ones_like(where)),
        edited=put(slots.edited, ints["edited"]),
        processed=put(slots.processed, ints["processed"]),
        stop_ids=put(slots.stop_ids, admits[:, first + len(ADMIT_FLOATS) :]),
        rules=RowParams(**rules, top_k=put(slots.rules.top_k, ints["top_k"]), key=key),
        **{
            name: put(getattr(slots, name), ints[name])
            for name in ("generation", "produced", "most", "least")
        },
    )
    if (drafting := slots.drafting) is not None:
        drafting = replace(
            drafting,
            is_made=put(drafting.is_made, jnp.zeros_like(where)),
            most=put(drafting.most, ints["most_drafts"]),
            rule=put(drafting.rule, ints["rule"]),
        )
        slots = replace(slots, drafting=drafting)
    return slots, {**ints, "slot": where}


def ids_before(ints: dict[str, Array], count: int) -> Int[Array, "a n"]:
    """Returns the `count` token ids before each admitted sequence's first row.

    Raises:
        ConfigError: an Engram that looks further back than the plan has room for.
    """
    if count > 3:
        raise ConfigError(
            f"engram_max_ngram_size must be at most 4 for the engine, this model looks {count} "
            "tokens back"
        )
    names = [f"before_{place}" for place in range(3 - count, 3)]
    columns = [ints[name] for name in names]
    return jnp.stack(columns, axis=1) if columns else jnp.zeros((ints["slot"].shape[0], 0), int)


def row_edits(
    slots: SlotState, slot: Int[Array, " b"], before: Int[Array, "b n"], *, full: bool
) -> Edits:
    """Returns the logit edits of rows of the given slots.

    before: drafts of the round up to each row, which count as output; -1 beyond. full: with
    penalties, biases and token sets; otherwise stop ids below `min_tokens` only.
    """
    early = slots.produced[slot] + (before >= 0).sum(axis=1) < slots.least[slot]
    banned = jnp.where(early[:, None], slots.stop_ids[slot], -1)
    if not full:
        return Edits(banned_ids=banned)
    row = jnp.arange(slot.shape[0])[:, None]
    marks = slots.marks[slot]
    marks = marks.at[row, jnp.where(before >= 0, before, marks.shape[1])].add(1, mode="drop")
    # Marks of a slot without edits are whatever an earlier sequence left.
    marks = jnp.where(slots.edited[slot][:, None], marks, 0)
    ids = jnp.where(slots.edited[slot][:, None], slots.bias_ids[slot], -1)
    return Edits(
        bias_ids=ids,
        bias_values=slots.bias_values[slot],
        output_counts=marks & COUNT_MASK,
        in_prompt=(marks & IN_PROMPT) > 0,
        allowed=(marks & BANNED) == 0,
        banned_ids=banned,
    )


def set_marks(
    slots: SlotState,
    slot: Int[Array, ""],
    marks: Int[Array, " v"],
    bias_ids: Int[Array, " m"],
    bias_values: Array,
) -> SlotState:
    """Returns the slots with the edit rows of one sequence; see `SlotState.marks`."""
    return replace(
        slots,
        marks=slots.marks.at[slot].set(marks),
        bias_ids=slots.bias_ids.at[slot].set(bias_ids),
        bias_values=slots.bias_values.at[slot].set(bias_values),
    )


def advance(
    slots: SlotState, slot: Int[Array, " b"], token: Int[Array, " b"], is_real: Array
) -> tuple[SlotState, Array]:
    """Returns (slots after these tokens, stop code of each row: see `RUNNING` and the next).

    token: negative where the sampler failed. is_real: rows that chose a token for a live sequence.
    """
    known = slots.stop_ids[slot]
    is_stop = ((known == token[:, None]) & (token[:, None] >= 0)).any(axis=1)
    produced = slots.produced[slot] + ~is_stop
    code = jnp.where(produced >= slots.most[slot], AT_LENGTH, RUNNING)
    code = jnp.where(is_stop, AT_STOP, code)
    code = jnp.where(token < 0, FAILED, code).astype(jnp.int32)
    where = jnp.where(is_real, slot, slots.last.shape[0])
    kept = jnp.where((token >= 0) & ~is_stop, where, slots.last.shape[0])
    vocabulary = jnp.maximum(token, 0)
    slots = replace(
        slots,
        last=slots.last.at[where].set(token, mode="drop"),
        alive=slots.alive.at[where].set(code == RUNNING, mode="drop"),
        produced=slots.produced.at[where].set(produced, mode="drop"),
        marks=slots.marks.at[kept, vocabulary].add(1, mode="drop"),
    )
    return slots, code


#: Stop codes of a result row. ENDED: its sequence had ended before the step.
RUNNING, AT_STOP, AT_LENGTH, FAILED = range(4)
ENDED = -1


def null_marks(vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns blank (marks, bias ids, bias values) of one sequence, to fill on the host."""
    ids = np.full(MAX_BIAS, -1, np.int32)
    return np.zeros(vocab_size, np.int32), ids, np.zeros(MAX_BIAS, np.float32)


set_marks_program = jax.jit(set_marks, donate_argnums=0)
