"""The grammar of one completion while it grows (io.md 2.6).

llguidance is never fed the end token: what it makes of it cannot be taken back. It never sees a
token it might refuse either, which would break it for good: committed tokens were sampled under
its own masks, and drafts are only looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_jax.errors import GrammarError
from deepinfer_jax.grammar.gate import Gate, GateState

if TYPE_CHECKING:
    import llguidance

    from deepinfer_jax.grammar.template import Template
    from deepinfer_jax.grammar.vocabulary import Vocabulary

#: A word that allows everything.
ALL = -1


@dataclass(frozen=True, slots=True)
class BoundRows:
    """Mask rows of one completion that its grammar fills.

    matcher: of llguidance, at the token before row `first`. drafts: those behind it; each gives one
    row more as long as they are legal.
    """

    matcher: "llguidance.LLMatcher"
    first: int
    drafts: tuple[int, ...]


class Matcher:
    """Follows one completion.

    drafts: what the next round may verify after the newest token. error: of llguidance, if its
    limits leave no mask.
    """

    def __init__(self, template: "Template", gate: Gate) -> None:
        """Starts before the first output token."""
        self._template, self._gate = template, gate
        self._state = GateState()
        self._inner = template.fork()
        self._bound: list[int] = []  # tokens that the inner one has taken
        self.drafts: tuple[int, ...] = ()
        self.error = ""

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes committed tokens, without an end token.

        Raises:
            GrammarError: one is not in the grammar, or the grammar has become too costly.
        """
        for place, token in enumerate(tokens):
            if self._gate.is_open(self._state):
                self._take(list(tokens[place:]))
                return
            self._state = self._gate.step(self._state, token)

    def _take(self, tokens: list[int]) -> None:
        if not self._inner.consume_tokens(tokens):
            raise GrammarError(f"the grammar cannot take {tokens}: {self._inner.get_error()}")
        self._bound += tokens

    @property
    def vocabulary(self) -> "Vocabulary":
        """The ids that its grammar knows."""
        return self._template.vocabulary

    @property
    def can_end(self) -> bool:
        """Whether the text so far is complete."""
        if self._gate.is_open(self._state):
            return self._inner.is_accepting()
        return self._gate.may_end and not self._state.is_forced

    def fill_free(self, words: np.ndarray) -> BoundRows | None:
        """Fills the rows where the grammar does not bind yet; returns the rest, if there is one.

        words: int32 [1 + drafts, w], of ones.
        """
        state, end = self._state, self._template.vocabulary.end
        for place in range(len(words)):
            if self._gate.is_open(state):
                drafts = self.drafts[place:]
                drafts = drafts[: drafts.index(end)] if end in drafts else drafts
                return BoundRows(self._inner, place, drafts)
            if state.is_forced:
                words[place] = 0
                _set_bit(words[place], self._gate.trigger[state.matched], True)
            elif not self._gate.may_end:
                _set_bit(words[place], end, False)
            if place == len(self.drafts) or self.drafts[place] == end:
                return None
            state = self._gate.step(state, self.drafts[place])
        return None

    def forced_after(self, rows: BoundRows, place: int) -> list[int]:
        """Returns the tokens that follow the one of bound row `place`, where only one is allowed.

        They are those of the usual spelling, so others may be allowed too, but are unlikely.
        """
        probe = rows.matcher.deep_copy()
        if place and not probe.consume_tokens(list(rows.drafts[:place])):
            return []
        return probe.compute_ff_tokens()[1:]

    def refill(self, rows: BoundRows, words: np.ndarray) -> None:
        """Fills bound rows, `words`, one by one, after llguidance has failed on them as a whole.

        A draft must not decide whether a completion lives, so the broken matcher is replaced. A row
        that fails again, and those behind it, stay empty: sampling it ends the completion.
        """
        self._inner, probe = self._template.fork(), self._template.fork()
        words[:] = 0
        if not self._inner.consume_tokens(self._bound) or not probe.consume_tokens(self._bound):
            return
        for place, row in enumerate(words):
            mask = np.frombuffer(probe.compute_bitmask(), np.int32)
            if probe.is_error():
                self.error = probe.get_error().split("\n")[0]
                return
            row[:] = mask[: len(row)]  # llguidance may give a word too many
            is_last = place == len(rows.drafts)
            if is_last or not probe.try_consume_tokens([rows.drafts[place]]):
                words[place + 1 :] = ALL
                return


def _set_bit(words: np.ndarray, token: int, value: bool) -> None:
    """Allows or forbids a token in one row."""
    bit, row = np.uint32(1 << (token % 32)), words.view(np.uint32)
    row[token // 32] = row[token // 32] | bit if value else row[token // 32] & ~bit
