"""One running request: takes tokens, decides when it ends, keeps what it has produced."""

import time
from dataclasses import dataclass, field

import numpy as np

from deepinfer_jax.engine.batch import Emitted
from deepinfer_jax.engine.detokenize import Detokenizer
from deepinfer_jax.engine.output import (
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    StreamDelta,
    TopLogprobs,
)
from deepinfer_jax.sampling.edits import OK
from deepinfer_jax.sampling.params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters and, as it runs, its tokens and text.

    room: most tokens it may produce. detokenizer: None without a tokenizer. seed: the one in use.
    """

    number: int
    ids: list[int]
    params: SamplingParams
    detokenizer: Detokenizer | None
    room: int
    eos: int
    seed: int
    started: float = 0.0
    first_token: float | None = None
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def push(self, emitted: Emitted) -> StreamDelta:
        """Takes the next token; returns what can be shown of it."""
        self.first_token = self.first_token or time.perf_counter()
        token = emitted.token
        if emitted.status != OK:
            return self.delta(self._rest(), (), "numerical")
        if token in self.params.stop_token_ids or (
            token == self.eos and not self.params.ignore_eos
        ):
            self.stop_reason = token
            return self.delta(self._rest(), (), "stop")
        self._keep(emitted)
        new = "" if self.detokenizer is None else self.detokenizer.push(token)
        if self.detokenizer is not None and self.detokenizer.matched is not None:
            self.stop_reason = self.detokenizer.matched
            kept = self.detokenizer.kept_tokens()
            shown = (token,) if kept == len(self.tokens) else ()
            del self.tokens[kept:], self.logprobs[kept:], self.top_logprobs[kept:]
            return self.delta(new, shown, "stop")
        if len(self.tokens) == self.room:
            reason = "length" if self.room == self.params.max_tokens else "capacity"
            return self.delta(new + self._rest(), (token,), reason)
        return self.delta(new, (token,), None)

    def delta(
        self, text: str, token_ids: tuple[int, ...], reason: FinishReason | None
    ) -> StreamDelta:
        """Records and returns new text and ids; a reason ends the request."""
        self.text += text
        self.finish_reason = reason
        self.ended = time.perf_counter()
        wanted = self.params.logprobs is not None
        return StreamDelta(
            index=0,
            text=text,
            token_ids=token_ids,
            logprobs=tuple(self.logprobs[-1:] if token_ids else ()) if wanted else None,
            finish_reason=reason,
            stop_reason=self.stop_reason,
        )

    def output(self) -> RequestOutput:
        """Returns the finished result."""
        if self.finish_reason is None:
            raise AssertionError(f"request {self.number} was read before it finished")
        wanted = self.params.logprobs is not None
        completion = Completion(
            text=self.text,
            token_ids=tuple(self.tokens),
            logprobs=np.asarray(self.logprobs, np.float32) if wanted else None,
            top_logprobs=tuple(self.top_logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=str(self.number),
            prompt_token_ids=tuple(self.ids),
            outputs=(completion,),
            seed=self.seed,
            metrics=RequestMetrics(
                first_token_s=(self.first_token or self.ended) - self.started,
                total_s=self.ended - self.started,
            ),
        )

    def _keep(self, emitted: Emitted) -> None:
        self.tokens.append(emitted.token)
        count = self.params.logprobs
        if count is not None and emitted.logprob is not None:
            self.logprobs.append(emitted.logprob)
            pairs = zip(emitted.top_ids, emitted.top_logprobs, strict=True)
            self.top_logprobs.append(tuple(pairs)[:count])

    def _rest(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.finish()
