"""Tells requests and grammars of the tokens that a step gave them."""

from collections.abc import Sequence as Items

from deepinfer_jax.engine.book import RequestBook
from deepinfer_jax.engine.constraints import Constraints
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.results import RoundResults
from deepinfer_jax.engine.sequence import Phase


def tell(
    book: RequestBook,
    constraints: Constraints,
    plan: StepPlan,
    places: Items[int],
    found: RoundResults,
    result: StepResult,
    now: float,
) -> int:
    """Tells the emitters at `places`; returns how many output tokens they got.

    Args:
        book: of the requests.
        constraints: their grammars.
        plan: of the step.
        places: of `plan.emits`; those that have ended since are not told.
        found: what the step gave.
        result: the same with log-probabilities, hashes and drafts.
        now: seconds of the engine's clock.
    """
    tokens = 0
    for place in places:
        sequence, generation = plan.emits[place], plan.generations[place]
        if sequence.generation != generation:
            continue  # ended by what another one's sink did
        one = found.one(place)
        tokens += book.take(sequence, one, result, now)
        if sequence.matcher is not None and sequence.phase is not Phase.DONE:
            drafts = result.drafts[place].tolist() if plan.makes_drafts else ()
            constraints.follow(sequence, one.kept, drafts)
    return tokens
