"""Requests with a grammar: how they wait until it is compiled, and the masks of their steps."""

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepinfer_jax.engine.book import RequestBook
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sequence import Phase, Sequence
from deepinfer_jax.errors import GrammarError
from deepinfer_jax.grammar.compiler import Compilation, GrammarCompiler, run_beside
from deepinfer_jax.grammar.masks import MaskRows, fill_masks
from deepinfer_jax.grammar.matcher import Matcher
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.grammar.template import Template, grammar_gate

#: Threads that fill masks (io.md 2.7).
_MASK_THREADS = 8
#: How long an engine with nothing else to do waits for a grammar before it looks around again.
_WAIT_S = 0.01
#: `stop_reason` of a completion that can neither go on nor end under its grammar.
NO_TOKEN_LEFT = "the grammar allows no token here"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStats:
    """waiting: requests whose grammar is being compiled. compiled, failed: grammars so far. stuck:
    compilations that run longer than they may. compile_seconds: of the workers. mask_seconds: that
    the loop has spent on masks, for mask_rows rows.
    """

    waiting: int
    compiled: int
    failed: int
    stuck: int
    compile_seconds: float
    mask_seconds: float
    mask_rows: int


class Constraints:
    """What an engine knows of grammars.

    book: its requests. compiler: of its tokenizer. prepare: returns what compiles the engine's
    programs for grammars; the first request with one calls it, and waits for it. drafts: of a
    round. vocab_size: ids of the model.
    """

    def __init__(
        self,
        book: RequestBook,
        compiler: GrammarCompiler,
        prepare: Callable[[], Callable[[], None]],
        drafts: int,
        vocab_size: int,
    ) -> None:
        """Starts nothing."""
        self._book, self._compiler = book, compiler
        self._prepare, self._drafts, self._width = prepare, drafts, -(-vocab_size // 32)
        self._waiting: list[tuple[Request, Compilation]] = []
        self._programs: Future[Any] | None = None
        self._mask_seconds, self._mask_rows = 0.0, 0

    @cached_property
    def _executor(self) -> Any:
        import llguidance

        return llguidance.LLExecutor(min(_MASK_THREADS, os.cpu_count() or 1))

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def begin(self) -> "Future[Any]":
        """Returns the future of the engine's programs for grammars, begun at the first call."""
        if self._programs is None:
            self._programs = run_beside(self._prepare())
        return self._programs

    def add(self, request: Request) -> None:
        """Begins to compile the grammar of a request; `admit` gives it back.

        Raises:
            TokenizerError: there is no tokenizer.
        """
        grammar = request.params.grammar
        assert grammar is not None
        compilation = self._compiler.start(grammar)
        self.begin()
        for sequence in request.sequences:
            sequence.phase = Phase.COMPILING
        self._waiting.append((request, compilation))

    def admit(self, *, is_idle: bool) -> list[Request]:
        """Returns requests whose grammar is ready; ends those whose grammar cannot be used.

        is_idle: the engine has nothing else to do, and may wait a little.

        Raises:
            Exception: the engine's own programs do not compile.
        """
        assert self._programs is not None
        if is_idle:
            compilation = self._waiting[0][1]
            wait((self._programs if compilation.is_over else compilation.future,), _WAIT_S)
        found, waiting = [], []
        for request, compilation in self._waiting:
            if all(one.phase is not Phase.COMPILING for one in request.sequences):
                continue  # aborted, or past its deadline
            if not compilation.is_over:
                waiting.append((request, compilation))
                continue
            try:
                template = compilation.result()
                if self._programs.done():
                    self._programs.result()
                    self._attach(request, template)
                    found.append(request)
                else:
                    waiting.append((request, compilation))
            except GrammarError as error:
                self._book.refuse(request, error)
        self._waiting = waiting
        return found

    def _attach(self, request: Request, template: Template) -> None:
        grammar = request.params.grammar
        assert grammar is not None
        gate = grammar_gate(grammar, template.vocabulary)
        request.warnings = template.warnings
        for sequence in request.sequences:
            sequence.matcher = template.matcher(gate)
            sequence.matcher.accept(sequence.output_ids)

    def follow(self, sequence: Sequence, tokens: Items[int], drafts: Items[int]) -> None:
        """Takes a completion's new tokens, and the drafts made after them, to its grammar."""
        assert sequence.matcher is not None
        try:
            sequence.matcher.accept(tokens)
            sequence.matcher.drafts = tuple(drafts)
        except GrammarError as error:
            self._book.end(sequence, "grammar", str(error))

    def masks(self, plan: StepPlan) -> MaskRows:
        """Returns the masks of a step; all steps before it were read.

        Sequences that have ended since it was planned have none; their tokens are not read. Those
        that can go on with no token, nor end, are ended here.
        """
        began, wanted = time.perf_counter(), []
        owner: dict[Matcher, Sequence] = {}
        for place, sequence in enumerate(plan.emits):
            generation = plan.generations[place]
            matcher = sequence.matcher
            if matcher is None or sequence.generation != generation:
                continue
            span = plan.spans[place] if place < len(plan.spans) else 1
            matcher.drafts = matcher.drafts[: span - 1]
            wanted.append((place * (self._drafts + 1), matcher))
            owner[matcher] = sequence
        found = fill_masks(self._executor, self._width, wanted, self._drafts)
        self._mask_seconds += time.perf_counter() - began
        self._mask_rows += len(found.words)
        for matcher in found.dead:
            self._book.end(owner[matcher], "grammar", matcher.error or NO_TOKEN_LEFT)
        return found

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar and waits for it.

        Raises:
            GrammarError: it cannot be used.
            TokenizerError: there is no tokenizer.
        """
        grammar_gate(grammar, self._compiler.start(grammar).result().vocabulary)

    def stats(self) -> GrammarStats:
        """Returns counters as of now."""
        compiler = self._compiler
        return GrammarStats(
            waiting=len(self._waiting),
            compiled=compiler.compiled,
            failed=compiler.failed,
            stuck=compiler.stuck,
            compile_seconds=compiler.busy_seconds,
            mask_seconds=self._mask_seconds,
            mask_rows=self._mask_rows,
        )
