"""The sequences that decode, and what does not change while the same ones do."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.engine.draft_policy import DraftPolicy
from deepinfer_jax.engine.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Runners:
    """Running sequences by rank, with columns [n].

    slots (int32, as plans take them), generations: theirs. limits: drafts of a round at most,
    whatever room is left. wants_logprobs, has_grammar: whether.
    """

    sequences: list[Sequence]
    slots: np.ndarray
    generations: list[int]
    limits: list[int]
    wants_logprobs: list[bool]
    has_grammar: list[bool]

    def without(self, places: set[int]) -> "Runners":
        """Returns the others than those at `places`."""
        left = [place for place in range(len(self.sequences)) if place not in places]
        return Runners(
            sequences=[self.sequences[place] for place in left],
            slots=self.slots[left],
            generations=[self.generations[place] for place in left],
            limits=[self.limits[place] for place in left],
            wants_logprobs=[self.wants_logprobs[place] for place in left],
            has_grammar=[self.has_grammar[place] for place in left],
        )

    def spans(self) -> list[int]:
        """Returns the rows that the next round of each may have."""
        if not any(self.limits):
            return [1] * len(self.limits)
        return [
            1 + max(0, min(limit, one.longest - one.count - 1))
            for one, limit in zip(self.sequences, self.limits, strict=True)
        ]


def runners_of(active: Items[Sequence], policy: DraftPolicy) -> Runners:
    """Returns those of the active sequences, by rank, that decode."""
    found = [one for one in active if one.phase is Phase.RUNNING]
    return Runners(
        sequences=found,
        slots=np.asarray([one.slot for one in found], np.int32),
        generations=[one.generation for one in found],
        limits=[policy.limit(one.params) for one in found],
        wants_logprobs=[one.params.logprobs is not None for one in found],
        has_grammar=[one.matcher is not None for one in found],
    )
