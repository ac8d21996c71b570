"""What a step's results change in its sequences, all of them at once."""

from typing import NamedTuple

import numpy as np

from deepinfer_jax.engine.numbers import COMPUTED, COUNT, PLANNED, PUBLISHED, WRITTEN
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.results import RoundResults


class Taken(NamedTuple):
    """Emitters that took their results.

    places [n]: in `StepPlan.emits`. quiet [n]: whether nobody looks at its tokens before it ends.
    """

    places: np.ndarray
    quiet: np.ndarray


def append_tokens(
    table: np.ndarray, plan: StepPlan, results: RoundResults, places: np.ndarray
) -> None:
    """Gives the emitters at `places` their tokens.

    table: `numbers.SlotNumbers.table`.
    """
    at = np.asarray(plan.slots, np.int64)[places]
    starts, kept, tokens = table[at, COUNT], results.kept[places], results.tokens[places]
    found = zip(places.tolist(), starts.tolist(), kept.tolist(), tokens.tolist(), strict=True)
    for place, start, count, ids in found:
        if count == 1:  # for one a slice costs more
            plan.emits[place].ids[start] = ids[0]
        else:
            plan.emits[place].ids[start : start + count] = ids[:count]
    table[at, COUNT] += kept
    table[at, PLANNED] += kept - 1
    if results.survivals is not None:
        for place in places.tolist():
            one = plan.emits[place]
            new = (results.survivals[place], *one.survivals[:1])
            one.survivals = new if plan.makes_drafts else ()


def advance_rounds(
    table: np.ndarray,
    plan: StepPlan,
    results: RoundResults,
    places: np.ndarray,
    block_tokens: int,
) -> np.ndarray:
    """Counts the rows that the rounds at `places` have written.

    table: `numbers.SlotNumbers.table`. Returns the places of those that filled a block.
    """
    at, emitted = np.asarray(plan.slots, np.int64)[places], results.count[places]
    table[at, COMPUTED] -= np.asarray(plan.spans, np.int64)[places] - emitted
    table[at, WRITTEN] += emitted
    return places[table[at, WRITTEN] // block_tokens > table[at, PUBLISHED]]
