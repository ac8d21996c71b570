"""What a step's results change in its sequences. Kept lean: it runs once a token."""

from typing import NamedTuple

from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.results import RoundResults
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import RUNNING


class Taken(NamedTuple):
    """What taking a step's results leaves to do.

    told: places in `StepPlan.emits` of those whose tokens somebody looks at now. full: sequences
    that have filled a block. tokens: output tokens of those that nobody looks at yet.
    """

    told: list[int]
    full: list[Sequence]
    tokens: int


def take_results(plan: StepPlan, results: RoundResults, block_tokens: int) -> Taken:
    """Gives sequences their tokens, and counts the rows that their rounds have written.

    Sequences that have ended or been preempted since the step was planned get nothing.

    Args:
        plan: of the step.
        results: of `plan.emits`, in order.
        block_tokens: of a block.
    """
    told, full, tokens = [], [], 0
    spans, survivals, rounds = plan.spans, results.survivals, len(plan.spans)
    assert results.generation == plan.generations, "these are not the results of this plan"
    columns = (plan.emits, plan.generations, results.code, results.count, results.tokens)
    for place, (sequence, generation, code, emitted, ids) in enumerate(zip(*columns, strict=True)):
        if sequence.generation != generation:
            continue
        if emitted == 1 and code == RUNNING:  # for one a slice costs more
            sequence.ids[sequence.count] = ids[0]
            sequence.count += 1
        else:
            kept = results.kept(place)
            sequence.append(kept)
            sequence.planned += len(kept) - 1
        if sequence.is_quiet and code == RUNNING:
            tokens += emitted
        else:
            told.append(place)
        if survivals is not None:
            new = (survivals[place], *sequence.survivals[:1])
            sequence.survivals = new if plan.makes_drafts else ()
        if place < rounds:
            if emitted < spans[place]:
                sequence.computed -= spans[place] - emitted
            sequence.written += emitted
            if sequence.written >= (sequence.published + 1) * block_tokens:
                full.append(sequence)
    return Taken(told, full, tokens)
