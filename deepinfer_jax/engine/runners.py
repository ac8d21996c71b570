"""The sequences that decode, and what does not change while the same ones do."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import compress

import numpy as np

from deepinfer_jax.engine.draft_policy import DraftPolicy
from deepinfer_jax.engine.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Runners:
    """Running sequences by rank, with columns [n].

    slots, room: theirs. start: tokens of the prompt. limits: drafts of a round at most.
    wants_logprobs, has_grammar: whether.
    """

    sequences: list[Sequence]
    slots: np.ndarray
    start: np.ndarray
    room: np.ndarray
    limits: np.ndarray
    wants_logprobs: np.ndarray
    has_grammar: np.ndarray

    def some(self, chosen: np.ndarray) -> "Runners":
        """Returns those that are True in chosen [n]."""
        return Runners(
            sequences=list(compress(self.sequences, chosen.tolist())),
            slots=self.slots[chosen],
            start=self.start[chosen],
            room=self.room[chosen],
            limits=self.limits[chosen],
            wants_logprobs=self.wants_logprobs[chosen],
            has_grammar=self.has_grammar[chosen],
        )

    def drafts(self, counts: np.ndarray) -> np.ndarray:
        """Returns how many drafts of each the next round may verify, at counts [n] tokens."""
        return np.clip(self.start + self.room - counts - 1, 0, self.limits)


def runners_of(active: Items[Sequence], policy: DraftPolicy) -> Runners:
    """Returns those of the active sequences, by rank, that decode."""
    found = [one for one in active if one.phase is Phase.RUNNING]
    params = [one.params for one in found]
    return Runners(
        sequences=found,
        slots=np.asarray([one.slot for one in found], np.int64),
        start=np.asarray([one.prompt_len for one in found], np.int64),
        room=np.asarray([one.room for one in found], np.int64),
        limits=np.asarray([policy.limit(one) for one in params], np.int64),
        wants_logprobs=np.asarray([one.logprobs is not None for one in params], bool),
        has_grammar=np.asarray([one.matcher is not None for one in found], bool),
    )
