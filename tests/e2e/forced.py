"""Drafts by hand: the true continuation, wrong ids, or a mixture, in the place of an engine's own.

They are written on the device before every step, so they are right at any depth: the place in the
output is the one the device has come to, which the host does not know yet.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import SlotState
from deepinfer_jax.loading import Model
from tests.e2e.lab import small_cache

DRAFTS = 5
#: From a sequence to the drafts of its output, by place; ids beyond the end are not looked at.
Guess = Callable[[Sequence], Items[int]]

#: One program for nano, and one for nano without drafts.
NANO = di.RuntimeConfig(
    block_tokens=32,
    max_len=256,
    max_seqs=4,
    max_tokens_per_step=64,
    drafting=True,
    draft_policy="fixed",
    draft_length=DRAFTS,
    check=True,
)


@cache
def nano() -> Model:
    """Returns the embedded model, loaded once."""
    return di.load("nano")


def drafting(numerics: str = "float32", **changes) -> di.RuntimeConfig:
    """Returns the small cache with drafts of 5 tokens, all verified; changes: of other fields."""
    known = {"drafting": True, "draft_policy": "fixed", "draft_length": DRAFTS}
    return replace(small_cache(numerics), **{**known, **changes})


@jax.jit
def _write(slots: SlotState, table: jax.Array, confidence: jax.Array) -> SlotState:
    place = slots.produced[:, None] + jnp.arange(slots.drafting.token.shape[1])
    token = jnp.take_along_axis(table, jnp.minimum(place, table.shape[1] - 1), axis=1)
    sure = jnp.full_like(slots.drafting.confidence, confidence)
    return replace(slots, drafting=replace(slots.drafting, token=token, confidence=sure))


def force_drafts(engine: Engine, guess: Guess, confidence: float = 1.0) -> None:
    """Replaces the drafts of all rounds to come; `confidence` is that of each of them.

    Grammars, which must know the drafts that a step verifies, are told them as well.
    """
    device, constraints = engine._device, engine._constraints
    dispatch, width = device.dispatch, 1 << engine.max_len.bit_length()
    known: dict[Sequence, Items[int]] = {}

    def write() -> None:
        table = np.zeros((engine.runtime.max_seqs + 1, width), np.int32)
        for sequence in engine.scheduler.active:
            if sequence not in known:
                known[sequence] = guess(sequence)[:width]
            table[sequence.slot, : len(known[sequence])] = known[sequence]
        state = device._state
        slots = _write(state.slots, jnp.asarray(table), jnp.float32(confidence))
        device._state = replace(state, slots=slots)

    def forced(plan, *now, **options):
        with jax.transfer_guard("allow"):
            write()
        return dispatch(plan, *now, **options)

    def told(plan):
        for sequence in plan.emits[: len(plan.spans)]:
            if sequence.matcher is not None:
                drafts, first = known[sequence], sequence.produced
                after = [*drafts[first : first + DRAFTS], *[0] * DRAFTS]
                sequence.matcher.drafts = tuple(after[:DRAFTS])
        return masks(plan)

    masks = constraints.masks
    device.dispatch, constraints.masks = forced, told


def mostly_right(truth: Items[int], vocabulary: int, seed: int, right: float = 0.8) -> list[int]:
    """Returns the drafts of an output of which so many are right."""
    rng = random.Random(seed)
    return [t if rng.random() < right else (t + 1) % vocabulary for t in truth]


def accepted_per_round(engine: Engine) -> float:
    """Returns the mean number of drafts accepted in a round so far."""
    stats = engine.stats()
    return sum(stats.accepted) / stats.rounds
