"""Token ids to text as they arrive, with stop strings that may span tokens."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream


@dataclass(slots=True)
class Detokenizer:
    """Text of one completion.

    `push` returns the text that can be shown: bytes of an unfinished character and the beginning of
    a possible stop string are held back.
    """

    tokenizer: "Tokenizer"
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    keeps_stop: bool = False  # include_stop_str_in_output
    text: str = ""
    shown: int = 0
    matched: str | None = None
    starts: list[int] = field(default_factory=list)  # where each token's text begins
    stream: "DecodeStream | None" = None

    def push(self, token: int) -> str:
        """Adds a token; returns new text. A stop string that is now complete is cut off."""
        if self.stream is None:
            from tokenizers.decoders import DecodeStream

            self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)
        self.starts.append(len(self.text))
        self.text += self.stream.step(self.tokenizer, token) or ""
        found = [(self.text.find(s), s) for s in self.stop if s in self.text]
        if found:
            cut, self.matched = min(found)
            cut += len(self.matched) if self.keeps_stop else 0
            self.text = self.text[:cut]
            return self._show(cut)
        return self._show(len(self.text) - self._held_back())

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._show(len(self.text))

    def kept_tokens(self) -> int:
        """Number of tokens whose text begins before the end of the text."""
        if self.matched is None:
            return len(self.starts)
        return sum(start < len(self.text) for start in self.starts)

    def shown_tokens(self) -> int:
        """Number of tokens that can be shown: all, or those whose text has begun to be shown.

        A token without text yet may hold the first bytes of a stop string.
        """
        if not self.stop:
            return len(self.starts)
        return sum(start < self.shown for start in self.starts)

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(self.text)), 0, -1)
                if any(s.startswith(self.text[-n:]) for s in self.stop)
            ),
            0,
        )

    def _show(self, end: int) -> str:
        new = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return new
