"""Records of the scheduler: its limits, and what one planned step holds."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_jax.cache.hit import HitRule
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What scheduling obeys.

    layouts: by rows, ascending. budget: rows of a step; decode rows come first, and a prompt
    advances by one row at least. depth: results outstanding.
    prefix_cache: whether blocks are shared. eos: ids that end a sequence.
    """

    layouts: tuple[PlanLayout, ...]
    budget: int
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

    before: device actions ahead of the step, as (name, arguments). emits: (sequence, generation) of
    every token row, the first `decodes` of which are decode rows. chunks: prompt rows. checkpoints:
    chunks after which the window state is saved.
    """

    layout: PlanLayout
    vector: np.ndarray
    before: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    emits: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    decodes: int = 0
    checkpoints: list[Chunk] = field(default_factory=list)
    rows: int = 0
    wants_logprobs: bool = False
    scores_prompt: bool = False
