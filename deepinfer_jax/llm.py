"""`LLM`: prompts in, completions out, over a static batch."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.messages import Messages
from deepinfer_jax.chat.parse import ChatDelta
from deepinfer_jax.chat.session import ChatOutput, Conversations, chat, stream_chat
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.batch import BatchSequence, run_batch
from deepinfer_jax.engine.detokenize import Detokenizer
from deepinfer_jax.engine.output import RequestOutput, StreamDelta
from deepinfer_jax.engine.request import Request
from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.loading import Model, load
from deepinfer_jax.model.forward import check_ids
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.random import fresh_seed

Prompt = str | Sequence[int]


class LLM:
    """A loaded model with `generate`, `stream`, `chat` and `stream_chat`.

    source: what `load` takes, or the `Model` it returned. load_options: keywords of `load`.

    Raises:
        DeepInferError: as `load`.
    """

    def __init__(
        self,
        source: "str | os.PathLike[str] | Model",
        *,
        runtime: RuntimeConfig | None = None,
        **load_options: Any,
    ) -> None:
        """Loads the source unless it is a `Model` already."""
        if isinstance(source, Model):
            if load_options:
                raise InputError(
                    f"a loaded Model takes no load options, got {sorted(load_options)}: give "
                    "them to di.load"
                )
            self.model = source
        else:
            self.model = load(source, **load_options)
        self.runtime = runtime or RuntimeConfig()

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and completion together."""
        return self.runtime.longest(self.model.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order.

        prompts: a text, token ids, or a list of either. params: one for all or one per prompt.
        progress: show a progress bar on stderr if it is a terminal.

        Raises:
            InputError: A prompt or parameter that cannot be honoured. Nothing has run then.
        """
        many = _as_list(prompts)
        requests = self._requests(many, params)
        with _progress_bar(progress, sum(r.params.max_tokens for r in requests)) as tick:
            for start in range(0, len(requests), self.runtime.max_seqs):
                for _, delta in self._run(requests[start : start + self.runtime.max_seqs]):
                    tick(delta)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Yields the completion of one prompt as it grows.

        Raises:
            InputError: as `generate`, before anything runs.
        """
        requests = self._requests([prompt], params)
        return (delta for _, delta in self._run(requests))

    @cached_property
    def chat_encoder(self) -> ChatEncoder:
        """Messages to prompt ids, with the checkpoint's own special tokens.

        Raises:
            TokenizerError: The checkpoint has no tokenizer, or it lacks special tokens.
        """
        return ChatEncoder(self.model.tokenizer, self.model.config)

    def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[ChatOutput]:
        """Returns one answer per conversation, in order.

        messages: Chat Completions messages, a text (one user message), or a list of conversations.
        params: one for all or one per conversation; `stop` is matched in the answer, not in its
            reasoning. options: `thinking=True`, `reasoning_effort`, `tools`, `tool_choice`.

        Raises:
            InputError: A message, option or parameter that cannot be honoured; nothing has run.
            TokenizerError: as `chat_encoder`.
        """
        return chat(self, self.chat_encoder, messages, params, progress=progress, **options)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[ChatDelta]:
        """Yields the answer to one conversation as it grows; arguments as `chat`.

        Raises:
            InputError: as `chat`, before anything runs.
        """
        return stream_chat(self, self.chat_encoder, messages, params, **options)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a raw text.

        Raises:
            TokenizerError: The checkpoint has no tokenizer.
            InputError: The text holds a lone surrogate.
        """
        if self.model.tokenizer is None:
            raise TokenizerError("a text prompt needs tokenizer.json: give token ids instead")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"a prompt must be valid Unicode text: {error}") from error
        return list(self.model.tokenizer.encode(text).ids)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(
                f"params must be one SamplingParams or one per prompt, got {len(params)} for "
                f"{len(prompts)} prompts"
            )
        return [
            self._request(number, prompt, one)
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]

    def _request(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        require_supported(params)
        config, tokenizer = self.model.config, self.model.tokenizer
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_ids(config, ids, minimum=1)
        outside = [t for t in params.stop_token_ids if t >= config.vocab_size]
        if outside:
            raise InputError(f"stop_token_ids must be below {config.vocab_size}, got {outside}")
        if len(ids) >= self.max_len:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens, and a sequence may have "
                f"{self.max_len} with at least one to generate: shorten it, or raise "
                "RuntimeConfig.max_len"
            )
        if params.stop and tokenizer is None:
            raise TokenizerError("stop strings need tokenizer.json: use stop_token_ids")
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params.stop)
        room = min(params.max_tokens, self.max_len - len(ids))
        seed = fresh_seed() if params.seed is None else params.seed
        return Request(number, ids, params, detokenizer, room, config.eos_token_id, seed)

    def _run(self, requests: list[Request]) -> Iterator[tuple[Request, StreamDelta]]:
        """Yields deltas of all requests until each has finished."""
        for request in requests:
            request.started = time.perf_counter()
        waiting = [request for request in requests if request.room > 0]
        for request in requests:
            if request.room == 0:
                yield request, request.delta("", (), "length")
        if not waiting:
            return
        sequences = [BatchSequence(ids=r.ids, params=r.params, seed=r.seed) for r in waiting]
        room = max(request.room for request in waiting)
        source = run_batch(self.model.params, self.model.config, self.runtime, sequences, room)
        finished: list[int] | None = None
        while True:
            try:
                step = source.send(finished)
            except StopIteration:
                return
            finished = []
            for owner, emitted in step:
                delta = waiting[owner].push(emitted)
                if delta.finish_reason is not None:
                    finished.append(owner)
                yield waiting[owner], delta


_DEFAULTS = SamplingParams()
_NOT_YET = (
    "min_tokens",
    "prompt_logprobs",
    "n",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "grammar",
    "verify",
    "deadline_s",
    "priority",
)


def require_supported(params: SamplingParams) -> None:
    """Raises InputError for every parameter this engine cannot honour yet."""
    fields = [name for name in _NOT_YET if getattr(params, name) != getattr(_DEFAULTS, name)]
    if params.max_draft not in (None, 0):
        fields.append("max_draft")
    if fields:
        given = ", ".join(f"{name}={getattr(params, name)!r}" for name in fields)
        raise InputError(f"not supported yet: {given}. Leave these at their defaults")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    if ids and len(ids) == len(prompts):
        return [ids]  # token ids of one prompt
    many = [item for item in prompts if not isinstance(item, int)]
    if ids:
        raise InputError("prompts mix token ids with whole prompts: give one or the other")
    return many


@contextmanager
def _progress_bar(is_wanted: bool, total: int) -> Iterator[Callable[[StreamDelta], None]]:
    """Shows a bar of generated tokens on stderr; hidden if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        "tokens",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not (is_wanted and console.is_terminal),
        transient=True,
    ) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda delta: bar.update(task, advance=len(delta.token_ids))
