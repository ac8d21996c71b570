"""One completion on its way through the engine: tokens, cache blocks, place in the queue."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from deepinfer_jax.cache.keys import ImageSpan
from deepinfer_jax.engine.completion import CompletionBuilder
from deepinfer_jax.engine.prompt import PromptImage
from deepinfer_jax.grammar.matcher import Matcher
from deepinfer_jax.sampling.params import SamplingParams


class Phase(StrEnum):
    """Where a sequence is: its grammar is not ready, queued, prompt computed, decoding, ended."""

    COMPILING = "compiling"
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion. Lengths count tokens; "planned" ones include steps in flight.

    number, child: order of arrival. ids: prompt and committed output in one buffer, `count` of them
    valid, the prompt at first. room: most output tokens. seed: of this child. root: of the prefix
    tree. banned: ids of `bad_words`. parent: another child of the same prompt, whose cache rows can
    be copied. images: of the prompt, in order.

    slot, generation: 0 while it has no slot. blocks: its cache blocks in order, for `capacity`
    tokens. reused: tokens whose rows it found in the cache. first: first row it runs. computed:
    rows planned so far, drafts taken as accepted. written: rows whose step was read. published:
    blocks in the prefix tree. planned: output tokens that planned steps give at least. is_quiet:
    nobody looks at its tokens before it ends. cuts: positions at which a checkpoint is taken.
    cached: tokens reused at its first admission. survivals: of the drafts of its last rounds that
    the host has read, newest first. matcher: of its grammar, at `count` tokens.
    """

    number: int
    child: int
    params: SamplingParams
    prompt_len: int
    ids: np.ndarray
    count: int = field(init=False)
    room: int
    seed: int
    root: bytes
    output: CompletionBuilder
    submitted: float
    banned: tuple[int, ...] = ()
    parent: "Sequence | None" = None
    images: tuple[PromptImage, ...] = ()
    phase: Phase = Phase.WAITING
    slot: int = 0
    generation: int = 0
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    reused: int = 0
    first: int = 0
    computed: int = 0
    written: int = 0
    published: int = 0
    planned: int = 0
    cuts: tuple[int, ...] = ()
    cached: int | None = None
    preemptions: int = 0
    survivals: tuple[np.ndarray, ...] = ()
    matcher: Matcher | None = None
    is_quiet: bool = False

    def __post_init__(self) -> None:
        """Holds its prompt."""
        self.count = self.prompt_len

    @property
    def produced(self) -> int:
        """Committed output tokens."""
        return self.count - self.prompt_len

    @property
    def longest(self) -> int:
        """Tokens at most, prompt included."""
        return self.prompt_len + self.room

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of admission; the last one is preempted first (engine.md 6.3)."""
        return (-self.params.priority, self.number, self.child)

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """Where its images are, for the keys of its blocks."""
        return tuple(one.span for one in self.images)

    @property
    def copies_soon(self) -> bool:
        """Whether a plan to come can copy the prompt's rows from its sibling."""
        parent = self.parent
        if parent is None or self.produced:
            return False
        is_ready = parent.phase is Phase.RUNNING and parent.computed == self.prompt_len
        return is_ready or parent.phase in (Phase.WAITING, Phase.PREFILL)

    @property
    def scores_prompt(self) -> bool:
        """Whether it is the child whose prompt rows are scored, if the request wants scores."""
        return self.params.prompt_logprobs is not None and self.child == 0

    @property
    def has_edits(self) -> bool:
        """Whether the sampler needs the sequence's token counts, biases or token set."""
        params = self.params
        return bool(
            params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1
            or params.logit_bias
            or params.allowed_token_ids is not None
            or self.banned
        )

    def append(self, tokens: Items[int]) -> None:
        """Adds committed tokens."""
        self.ids[self.count : self.count + len(tokens)] = tokens
        self.count += len(tokens)

    @property
    def output_ids(self) -> list[int]:
        """The committed output tokens."""
        return self.ids[self.prompt_len : self.count].tolist()
