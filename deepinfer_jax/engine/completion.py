"""Builds one completion from its tokens: text, stop strings, log-probabilities, how it ended."""

from dataclasses import dataclass, field

import numpy as np

from deepinfer_jax.engine.detokenize import Detokenizer
from deepinfer_jax.engine.output import Completion, FinishReason, StreamDelta, TopLogprobs
from deepinfer_jax.sampling.params import SamplingParams


@dataclass(slots=True, eq=False)
class CompletionBuilder:
    """Takes committed tokens one by one.

    index: which of n. detokenizer: None without a tokenizer, or if no text is wanted.
    needs_prompt_scores: whether prompt rows have still to be scored. cache_reason: why no prefix
    was reused. logit_hashes: None unless they are recorded. sent_ids, sent_text: what earlier
    deltas have shown.
    """

    index: int
    params: SamplingParams
    detokenizer: Detokenizer | None
    needs_prompt_scores: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    logit_hashes: list[str] | None = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cache_reason: str | None = None
    sent_ids: int = 0
    sent_text: int = 0

    def push(
        self,
        token: int,
        logprob: float | None = None,
        top: TopLogprobs = (),
        logit_hash: str | None = None,
    ) -> None:
        """Adds a token; `finish_reason` is "stop" afterwards if it completed a stop string."""
        self.tokens.append(token)
        if self.logit_hashes is not None:
            assert logit_hash is not None, "all tokens of a recorded completion have a hash"
            self.logit_hashes.append(logit_hash)
        if logprob is not None:
            self.logprobs.append(logprob)
            self.top_logprobs.append(top)
        if self.detokenizer is None:
            return
        self.text += self.detokenizer.push(token)
        if self.detokenizer.matched is not None:
            kept = self.detokenizer.kept_tokens()
            del self.tokens[kept:], self.logprobs[kept:], self.top_logprobs[kept:]
            del (self.logit_hashes or [])[kept:]
            self.end("stop", self.detokenizer.matched)

    def extend(self, tokens: list[int]) -> int:
        """Adds tokens of which nothing else is told, until a stop string is complete.

        Returns how many.
        """
        if self.detokenizer is None:
            self.tokens += tokens
            return len(tokens)
        for count, token in enumerate(tokens, start=1):
            self.push(token)
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the completion; text that was held back is shown unless a stop string cut it."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.detokenizer is not None and self.detokenizer.matched is None:
            self.text += self.detokenizer.finish()

    def delta(self) -> StreamDelta:
        """Returns what is new since the last call; ids wait for their text."""
        ready = len(self.tokens) if self.finish_reason or not self.detokenizer else None
        if ready is None and self.detokenizer is not None:
            ready = self.detokenizer.shown_tokens()
        ids = tuple(self.tokens[self.sent_ids : ready])
        text = self.text[self.sent_text :]
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = tuple(self.logprobs[self.sent_ids : ready])
        self.sent_ids += len(ids)
        self.sent_text = len(self.text)
        return StreamDelta(
            index=self.index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def completion(self) -> Completion:
        """Returns the finished completion."""
        assert self.finish_reason is not None
        wanted = self.params.logprobs is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.tokens),
            logprobs=np.asarray(self.logprobs, np.float32) if wanted else None,
            top_logprobs=tuple(self.top_logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logit_hashes=None if self.logit_hashes is None else tuple(self.logit_hashes),
        )
