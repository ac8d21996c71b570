"""What `LLM` returns (engine.md 1.3)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deepinfer_jax.record.run_record import RecordedOutput, RunRecord

FinishReason = Literal[
    "stop", "length", "abort", "capacity", "grammar", "numerical", "deadline", "error"
]
TopLogprobs = tuple[tuple[int, float], ...]  # (id, log-probability), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelta:
    """New text and ids of one completion; the last one carries the finish reason.

    logprobs: one float for every id, None unless asked for. `LLM.stream` yields these, and raises
    before the first.

    Examples:
        >>> short = di.SamplingParams(temperature=0, max_tokens=3)
        >>> parts = list(llm.stream("Mara lives in", short))
        >>> sum(len(part.token_ids) for part in parts), parts[-1].finish_reason
        (3, 'length')
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds from submission to admission, to the first token and to the end.

    preemptions: times its rows were given up and computed again. cache_reason: why no prefix was
    reused; None if one was.
    """

    first_token_s: float
    total_s: float
    queued_s: float = 0.0
    preemptions: int = 0
    cache_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion. EOS and stop ids are in `stop_reason`, not in `token_ids`.

    logprobs: float32 [len(token_ids)], log-probability of every token; None unless
    `SamplingParams.logprobs` is set. top_logprobs: the best ids at every token, empty tuples for
    `logprobs=0`. logit_hashes: of the raw logits that gave every token; None unless
    `RuntimeConfig.record` is "logits". `LLM.generate` makes it and says what it raises.

    Examples:
        >>> params = di.SamplingParams(temperature=0, max_tokens=3, logprobs=0)
        >>> one = llm.generate("Mara lives in", params)[0].outputs[0]
        >>> one.logprobs.shape, one.logprobs.dtype, one.finish_reason
        ((3,), dtype('float32'), 'length')
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: np.ndarray | None
    top_logprobs: tuple[TopLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    logit_hashes: tuple[str, ...] | None = None

    def recorded(self) -> RecordedOutput:
        """Returns what a run record holds of it."""
        return RecordedOutput(
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logit_hashes=self.logit_hashes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Result of one prompt. Fields of the first completion can be read on it directly.

    seed: the one in use, drawn or given: the same request with it gives the same tokens.
    cached_tokens: prompt tokens whose cache rows were reused. prompt_logprobs: float32
    [prompt - 1] of every prompt id after the first; None unless asked for, as are
    `prompt_top_logprobs`. make_record: see `record`. warnings: keywords of its schema that are not
    enforced, if the grammar is not strict.

    Raises:
        InputError: by `record`, after `replace_params`.

    Examples:
        >>> output = llm.generate("Mara lives in", di.SamplingParams(seed=1, max_tokens=3))[0]
        >>> output.seed, len(output.token_ids), output.record.request["params"]["seed"]
        (1, 3, 1)
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    seed: int
    metrics: RequestMetrics
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    warnings: tuple[str, ...] = ()
    make_record: Callable[[], RunRecord] | None = field(default=None, repr=False, compare=False)

    @property
    def record(self) -> RunRecord | None:
        """All that the completions depend on, and their ids; None with `RuntimeConfig.record`=None.

        Made when it is asked for. The first one of a model hashes its weights (about a second per
        GB); after `replace_params` that is too late, and raises InputError.
        """
        return None if self.make_record is None else self.make_record()

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> np.ndarray | None:
        """Log-probabilities of the first completion's tokens, float32 [len(token_ids)]."""
        return self.outputs[0].logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...] | None:
        """The best ids at every token of the first completion."""
        return self.outputs[0].top_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The id or string that stopped the first completion."""
        return self.outputs[0].stop_reason

    def score(self) -> "ScoreOutput":
        """Returns the prompt's log-probabilities, which were asked for."""
        assert self.prompt_logprobs is not None
        assert self.prompt_top_logprobs is not None
        return ScoreOutput(
            prompt_token_ids=self.prompt_token_ids,
            logprobs=self.prompt_logprobs,
            top_logprobs=self.prompt_top_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput:
    """Raw log-probabilities of a prompt's ids from the second on.

    logprobs: float32 [t - 1]. top_logprobs: the best ids at each of these places. `LLM.score` makes
    it and says what it raises.

    Examples:
        >>> scored = llm.score("Mara lives in Oakford.", top_logprobs=1)[0]
        >>> len(scored.prompt_token_ids), scored.logprobs.shape, len(scored.top_logprobs[0])
        (7, (6,), 1)
    """

    prompt_token_ids: tuple[int, ...]
    logprobs: np.ndarray
    top_logprobs: tuple[TopLogprobs, ...]
