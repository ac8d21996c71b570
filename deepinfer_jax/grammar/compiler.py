"""Compiles grammars beside the engine's loop, within limits, each of them once (io.md 2.4).

A compilation that takes too long ends the requests that wait for it, and no other. Its thread
cannot be stopped, so there are few of them, and the same grammar is never tried on a second one.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from deepinfer_jax.errors import DeepInferError, GrammarError, TokenizerError
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.grammar.template import Template, compile_grammar
from deepinfer_jax.grammar.vocabulary import Vocabulary, grammar_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer_jax.config.model import ModelConfig

WORKERS = 2
#: Compiled grammars that are kept, the latest used: how many, and bytes of their texts.
_KEPT, _KEPT_BYTES = 256, 16 * 2**20


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar on its way. began: `time.monotonic` of its start; None while it waits."""

    grammar: Grammar
    seconds: float
    asked: float
    future: "Future[Template]" = field(default_factory=Future)
    began: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether it has taken longer than it may."""
        return not self.future.done() and time.monotonic() - self.asked > self.seconds

    @property
    def is_over(self) -> bool:
        """Whether `result` would not wait."""
        return self.future.done() or self.is_late

    def result(self) -> Template:
        """Returns the template, once it is there or late.

        Raises:
            GrammarError: it has failed, or it takes too long.
        """
        left = max(0.0, self.asked + self.seconds - time.monotonic())
        try:
            return self.future.result(timeout=left)
        except TimeoutError:
            what = "compiling the grammar takes" if self.began else "waiting to compile takes"
            raise GrammarError(
                f"{what} longer than {self.seconds:g} s (RuntimeConfig.grammar_seconds): make the "
                "grammar simpler, or try again"
            ) from None


class GrammarCompiler:
    """Owns the worker threads and the compiled grammars of one tokenizer.

    seconds: what one compilation may take, its wait included. Counters since the start: compiled,
    failed, and busy_seconds of the workers.
    """

    def __init__(
        self, tokenizer: "Tokenizer | None", config: "ModelConfig", *, seconds: float
    ) -> None:
        """Starts nothing: the first grammar does."""
        self._tokenizer, self._config, self._seconds = tokenizer, config, seconds
        self._lock = threading.Lock()  # callers and workers share what follows
        self._kept: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._queue: SimpleQueue[Compilation] = SimpleQueue()
        self._workers = 0
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self.compiled = self.failed = 0
        self.busy_seconds = 0.0

    def start(self, grammar: Grammar) -> Compilation:
        """Returns the compilation of a grammar, which is begun unless it is known.

        Raises:
            TokenizerError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise TokenizerError("a grammar needs tokenizer.json, and this model has none")
        # Where a grammar begins to bind is not compiled; that it begins late is (line ends).
        key = replace(grammar, trigger=(), bound_token=None)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and not (found.is_late and found.began is None):
                self._kept.move_to_end(key)
                return found
            found = Compilation(grammar, self._seconds, time.monotonic())
            self._kept[key] = found
            self._forget()
            if self._workers < WORKERS:
                self._workers += 1
                run_beside(self._work)
            self._queue.put(found)
        return found

    def _known(self) -> Vocabulary:
        """Returns the tokenizer as grammars see it, made at first use."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                assert self._tokenizer is not None
                self._vocabulary = grammar_vocabulary(self._tokenizer, self._config)
            return self._vocabulary

    @property
    def stuck(self) -> int:
        """Compilations that run longer than they may."""
        with self._lock:
            return sum(one.is_late and one.began is not None for one in self._kept.values())

    def _forget(self) -> None:
        """Drops the grammars that were not used for longest; those at work stay."""
        size = sum(len(one.text) for one in self._kept)
        for key, one in list(self._kept.items()):
            if len(self._kept) <= _KEPT and size <= _KEPT_BYTES:
                return
            if one.future.done():
                size -= len(key.text)
                del self._kept[key]

    def _work(self) -> None:
        while True:
            one = self._queue.get()
            if one.is_late:
                continue  # nobody waits for it any more
            one.began = began = time.monotonic()
            try:
                one.future.set_result(compile_grammar(one.grammar, self._known()))
                self.compiled += 1
            except DeepInferError as error:
                self.failed += 1
                one.future.set_exception(error)
            except Exception as error:  # llguidance's own; it ends this grammar alone
                self.failed += 1
                one.future.set_exception(GrammarError(f"llguidance failed with {error!r}"))
            self.busy_seconds += time.monotonic() - began


def run_beside(work: Callable[[], Any]) -> "Future[Any]":
    """Returns the future of what a thread of its own does; it does not keep the program alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="grammar", daemon=True).start()
    return future
