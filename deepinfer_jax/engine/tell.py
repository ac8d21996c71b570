"""Tells requests and grammars of the tokens that a step gave them."""

import numpy as np

from deepinfer_jax.engine.book import RequestBook
from deepinfer_jax.engine.commit import Taken
from deepinfer_jax.engine.constraints import Constraints
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.results import RoundResults
from deepinfer_jax.engine.sequence import Phase
from deepinfer_jax.engine.slots import RUNNING


def tell(
    book: RequestBook,
    constraints: Constraints,
    plan: StepPlan,
    taken: Taken,
    found: RoundResults,
    result: StepResult,
    now: float,
) -> int:
    """Tells all but the quiet ones that go on, which nobody looks at; returns all tokens' number.

    Args:
        book: of the requests.
        constraints: their grammars.
        plan: of the step.
        taken: emitters that have taken their tokens.
        found: what the step gave.
        result: the same with log-probabilities, hashes and drafts.
        now: seconds of the engine's clock.
    """
    places, is_untold = taken.places, taken.quiet & (found.code[taken.places] == RUNNING)
    generations = np.asarray(plan.generations)[places]
    assert (found.generation[places] == generations).all(), "results of other sequences"
    tokens = int(found.kept[places[is_untold]].sum())
    for place in places[~is_untold].tolist():
        sequence = plan.emits[place]
        if sequence.generation != plan.generations[place]:
            continue  # ended by what another one's sink did
        one = found.one(place)
        tokens += book.take(sequence, one, result, now)
        if sequence.matcher is not None and sequence.phase is not Phase.DONE:
            drafts = result.drafts[place].tolist() if plan.makes_drafts else ()
            constraints.follow(sequence, one.kept, drafts)
    return tokens
