"""One completion of a conversation on its way into the chunks of a protocol (io.md 1.5)."""

from collections.abc import Sequence
from typing import Any

import orjson

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.tokenizer import import_recipe
from deepinfer_jax.engine.output import FinishReason, TopLogprobs
from deepinfer_jax.serve.protocols import RESPONSES
from deepinfer_jax.serve.tasks import ChatTask

Chunk = tuple[str | None, dict[str, Any]]  # (name of the event, its data)
#: JSON has no -inf; OpenAI says this for a probability of nothing.
_LEAST = -9999.0


class ChoiceReader:
    """Reads the tokens of one completion. `is_finished` turns true at a stop string too."""

    def __init__(
        self, task: ChatTask, encoder: ChatEncoder, created: int, fingerprint: str
    ) -> None:
        """Makes recipe's processor of the completion; `start` comes first."""
        self._recipe = recipe = import_recipe()
        self._eos, self._fingerprint = encoder.config.eos_token_id, fingerprint
        self._prompt_tokens = len(task.prompt_ids)
        self._kind = getattr(recipe, f"{task.protocol.classes}Response")
        self._head = (task.id, task.model, created)
        self._processor = recipe.StreamProcessor(
            task.converted.generator(task.id, task.model),
            task.converted.request.parsing_options,
            encoder.recipe_tokenizer,
        )
        self._has_logprobs = task.converted.request.inference_options.logprobs
        # Recipe repeats the request in the answer, but for this.
        is_single = task.is_single and task.protocol is RESPONSES
        self._said = {"parallel_tool_calls": False} if is_single else {}
        self.token_ids: list[int] = []
        self.is_finished = False

    def start(self, cached_tokens: int) -> list[Chunk]:
        """Returns what opens the answer. cached_tokens: of the prompt, reused."""
        self._response = self._kind(*self._head, self._prompt_tokens, cached_tokens)
        usage = self._recipe.PromptUsage(
            prompt_tokens=self._prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )
        ready = self._recipe.InferenceChunk.ready(
            prompt_usage=usage, system_fingerprint=self._fingerprint
        )
        return self._take(self._processor.push(ready))

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        top: Sequence[TopLogprobs],
    ) -> list[Chunk]:
        """Returns what tokens add; those behind a stop string are dropped."""
        chunks: list[Chunk] = []
        for place, token in enumerate(token_ids):  # one by one, to stop at the right one
            if self.is_finished:
                break
            self.token_ids.append(token)
            if token == self._eos:  # of ignore_eos; recipe would show its spelling
                continue
            values = None
            if self._has_logprobs and logprobs is not None:
                best = top[place] if place < len(top) else ()
                pairs = [(other, _finite(value)) for other, value in best]
                values = [(_finite(logprobs[place]), pairs)]
            made = self._recipe.InferenceChunk.tokens([token], values)
            chunks += self._take(self._processor.push(made))
            if self._processor.finished:
                chunks += self._take(self._processor.finish())
                self.is_finished = True
        return chunks

    def finish(self, reason: FinishReason) -> list[Chunk]:
        """Returns what was held back. reason: why the engine ended the completion."""
        if self.is_finished:
            return []
        kinds = self._recipe.InferenceFinishReason
        kind = kinds.Stop if reason == "stop" else kinds.Length
        chunks = self._take(self._processor.push(self._recipe.InferenceChunk.finish(kind)))
        self.is_finished = True
        return chunks + self._take(self._processor.finish())

    def response(self) -> dict[str, Any]:
        """Returns the answer so far as the protocol's response."""
        return orjson.loads(self._response.to_json()) | self._said

    def _take(self, chunks: list[Any]) -> list[Chunk]:
        taken = []
        for chunk in chunks:
            data = orjson.loads(chunk.to_json())
            if "response" in data:
                data["response"] |= self._said
            taken.append((self._kind.sse_event_name(chunk), data))
            self._response.accumulate(chunk)  # consumes the chunk
        return taken


def merge_choices(responses: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the Chat Completions response of several completions of one prompt."""
    first = responses[0]
    choices = [one["choices"][0] | {"index": index} for index, one in enumerate(responses)]
    return first | {"choices": choices, "usage": merge_usage([one["usage"] for one in responses])}


def merge_usage(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the usage of several completions: the prompt counts once."""
    first = usages[0]
    generated = sum(one["completion_tokens"] for one in usages)
    merged = first | {
        "completion_tokens": generated,
        "total_tokens": first["prompt_tokens"] + generated,
    }
    if "completion_tokens_details" in first:
        details = [one["completion_tokens_details"]["reasoning_tokens"] for one in usages]
        merged["completion_tokens_details"] = {"reasoning_tokens": sum(details)}
    return merged


def _finite(value: float) -> float:
    return max(float(value), _LEAST)
