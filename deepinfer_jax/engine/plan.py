"""Records of the scheduler: its limits, and what one planned step holds."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_jax.cache.hit import HitRule
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.sequence import Sequence


def _no_words() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What scheduling obeys.

    layouts: by rows, ascending. budget: rows of a step; decode rows come first, and a prompt
    advances by one row at least. row_step: rows are computed in multiples of it. depth: results
    outstanding. prefix_cache: whether blocks are shared. eos: ids that end a sequence.
    """

    layouts: tuple[PlanLayout, ...]
    budget: int
    row_step: int
    depth: int
    prefix_cache: bool
    eos: int
    rule: HitRule


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) of one sequence in a step; generation guards late results."""

    sequence: Sequence
    generation: int
    start: int
    stop: int
    row: int


@dataclass(slots=True)
class StepPlan:
    """One step: the packed vector, and what the host must do around and after it.

    layout, vector: of the largest plan and empty until it is packed. before: device actions ahead
    of the step, as (name, arguments). emits: all sequences that may emit tokens: rounds, then
    prompts that end; generations: theirs. slots: of rounds. spans: rows of each round at most.
    ends: rows that end a prompt. chunks: prompt rows. images: (first row, rows of encoded images)
    of prompt rows. checkpoints: chunks after which the window state is saved. rows: prompt_rows,
    and verify_rows of rounds at most. is_constrained: some that emits has a grammar.
    """

    layout: PlanLayout
    vector: np.ndarray = field(default_factory=_no_words)
    before: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    images: list[tuple[int, np.ndarray]] = field(default_factory=list)
    emits: list[Sequence] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=_no_words)
    generations: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    checkpoints: list[Chunk] = field(default_factory=list)
    prompt_rows: int = 0
    verify_rows: int = 0
    makes_drafts: bool = False
    wants_logprobs: bool = False
    scores_prompt: bool = False
    is_constrained: bool = False

    @property
    def rows(self) -> int:
        """Rows of the step at most."""
        return self.prompt_rows + self.verify_rows
