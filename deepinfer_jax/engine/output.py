"""What `LLM` returns (engine.md 1.3)."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "capacity", "numerical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelta:
    """New text and ids of one completion; the last one carries the finish reason."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds from the call to the first token and to the end; compilation included."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion. EOS and stop ids are in `stop_reason`, not in `token_ids`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Result of one prompt. Fields of the first completion can be read on it directly."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    metrics: RequestMetrics
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The id or string that stopped the first completion."""
        return self.outputs[0].stop_reason
