"""`LLM`: prompts in, completions out, over the engine."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.messages import Messages
from deepinfer_jax.chat.parse import ChatDelta
from deepinfer_jax.chat.session import ChatOutput, Conversations, chat, stream_chat
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.lockstep import FollowingDevice
from deepinfer_jax.engine.output import RequestOutput, ScoreOutput, StreamDelta
from deepinfer_jax.engine.prompt import read_images, with_image_tokens
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.loading import Model, load
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.vision.image import ImageInput

Prompt = str | Sequence[int]


class LLM:
    """A loaded model with `generate`, `stream`, `chat`, `stream_chat` and `score`.

    source: what `load` takes, or the `Model` it returned. load_options: keywords of `load`. The
    engine, its cache included, is made at first use and kept; `close` gives it up. Use it from one
    thread; `AsyncLLM` serves several callers.

    Raises:
        DeepInferError: as `load`.

    Examples:
        >>> with di.LLM(model, runtime=llm.runtime) as own:
        ...     own.max_len
        256
        >>> output = llm.generate("Mara lives in", di.SamplingParams(temperature=0, max_tokens=3))
        >>> len(output[0].token_ids)  # int ids; log-probabilities would be float32 [3]
        3
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

    @cached_property
    def engine(self) -> Engine:
        """The engine, warmed up: everything it can need is compiled."""
        engine = Engine(self.model, self.runtime)
        engine.warm_up()
        return engine

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and completion together."""
        return self.runtime.longest(self.model.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Sequence[Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order.

        prompts: a text, token ids, or a list of either. params: one for all or one per prompt.
        images: those of the prompt, or of a list of prompts a sequence for each: files as bytes,
        paths, data URLs, pictures or arrays (`vision.image.read_image`). Ids hold one
        `config.image_token_id` for each; a text without any gets them in front. progress: show a
        progress bar on stderr if it is a terminal. An interrupt aborts what runs and keeps the
        model loaded.

        Raises:
            InputError: A prompt, image or parameter that cannot be honoured. Nothing has run then.
            ConfigError: There are images and Pillow is not installed.
        """
        listed = _as_list(prompts)
        many = self._checked(listed, params, _images_of(prompts, listed, images))
        requests = [self.engine.submit(ids, one, images=seen) for ids, seen, one in many]
        total = sum(one.max_tokens * one.n for _, _, one in many)
        self._run(requests, progress, total)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
    ) -> Iterator[StreamDelta]:
        """Yields the completions of one prompt as they grow; `index` tells them apart.

        images: of the prompt, as in `generate`. Closing the iterator aborts the request.

        Raises:
            InputError: as `generate`, before anything runs.
        """
        ((ids, seen, one),) = self._checked([prompt], params, [images])
        return self._stream(ids, seen, one)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        images: Sequence[Any] | None = None,
        top_logprobs: int = 0,
        progress: bool = True,
    ) -> list[ScoreOutput]:
        """Returns raw log-probabilities of every prompt's ids from the second on; samples nothing.

        images: as in `generate`.

        Raises:
            InputError: as `generate`; a prompt of one id has nothing to score and gives none.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)
        outputs = self.generate(prompts, params, images=images, progress=progress)
        return [output.score() for output in outputs]

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

    def abort(self, request_id: str) -> bool:
        """Ends a running or queued request; returns whether there was one of that name."""
        return self.engine.abort(request_id)

    def stats(self) -> EngineStats:
        """Returns counters and gauges of the engine."""
        return self.engine.stats()

    def replace_params(self, params: Any) -> None:
        """Uses other weights of the same shapes; cached prefixes are forgotten.

        Raises:
            InputError: the tree differs in structure, shapes or dtypes, or requests are running.
        """
        self.engine.replace_params(params)
        self.model = self.engine.model

    def follow(self) -> None:
        """Runs what the first process of a job does with its own `LLM`, until that is closed.

        For all other processes, with the same model, mesh and runtime: they take no requests.

        Raises:
            InputError: this is the first process, or the only one.
        """
        device = Engine(self.model, self.runtime).device
        if not isinstance(device, FollowingDevice):
            raise InputError(
                "follow is for the processes of a job other than the first; this is process "
                f"{jax.process_index()} of {jax.process_count()}"
            )
        device.follow()

    def close(self) -> None:
        """Aborts what runs and frees the engine's memory; the next call makes a new engine."""
        engine = self.__dict__.pop("engine", None)
        if engine is not None:
            engine.abort_all()
            engine.drain()
            engine.device.close()

    def __enter__(self) -> "LLM":
        """Returns itself; `close` is called at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def read_prompt(
        self, prompt: Prompt, images: Sequence[Any] = ()
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Returns the ids of a prompt, an image token for each image, and the images read.

        Raises:
            InputError: text or an image that cannot be used.
            TokenizerError: a text, and the checkpoint has no tokenizer.
            ConfigError: there are images and Pillow is not installed.
        """
        found = read_images(self.model.config, images)
        if not isinstance(prompt, str):
            return list(prompt), found
        return with_image_tokens(self.model.config, self.encode(prompt), len(found)), found

    def _checked(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        images: Sequence[Sequence[Any]],
    ) -> list[tuple[list[int], tuple[ImageInput, ...], SamplingParams]]:
        """Returns ids, images and parameters of every prompt, all of them legal."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(
                f"params must be one SamplingParams or one per prompt, got {len(params)} for "
                f"{len(prompts)} prompts"
            )
        many = [
            (*self.read_prompt(prompt, seen), one)
            for prompt, seen, one in zip(prompts, images, params, strict=True)
        ]
        for number, (ids, seen, one) in enumerate(many):
            self.engine.check(ids, one, str(number), seen)
        return many

    def _run(self, requests: list[Request], progress: bool, total: int) -> None:
        engine = self.engine
        with _progress_bar(progress, total) as tick:
            try:
                while not all(request.ended is not None for request in requests):
                    engine.step()
                    tick(engine)
            except BaseException:
                for request in requests:
                    engine.abort(request.request_id)
                raise

    def _stream(
        self, ids: list[int], images: tuple[ImageInput, ...], params: SamplingParams
    ) -> Iterator[StreamDelta]:
        engine, ready = self.engine, deque[StreamDelta]()
        request = engine.submit(ids, params, sink=ready.append, images=images)
        try:
            while request.ended is None or ready:
                while ready:
                    yield ready.popleft()
                if request.ended is None:
                    engine.step()
        finally:
            engine.abort(request.request_id)


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


def _images_of(
    prompts: Prompt | Sequence[Prompt], listed: list[Prompt], images: Sequence[Any] | None
) -> Sequence[Sequence[Any]]:
    """Returns the images of every prompt; of a prompt that is not in a list, all of them."""
    if images is None:
        return [()] * len(listed)
    if len(listed) == 1 and (isinstance(prompts, str) or (prompts and prompts[0] is listed[0][0])):
        return [images]
    if len(images) != len(listed):
        raise InputError(
            f"images of several prompts are one sequence for each, got {len(images)} for "
            f"{len(listed)} prompts: give an empty one to a prompt without"
        )
    return images


@contextmanager
def _progress_bar(is_wanted: bool, total: int) -> Iterator[Callable[[Engine], None]]:
    """Shows tokens, tokens/s and cache use on stderr; hidden if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    is_shown = is_wanted and console.is_terminal
    columns = (
        "tokens",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as bar:
        task = bar.add_task("tokens", total=total, text="")
        before: list[int] = []

        def tick(engine: Engine) -> None:
            if not is_shown:
                return
            count = engine.counters["tokens"]
            before[:] = before or [count]
            done, stats = count - before[0], engine.stats()
            used = 1 - stats.cache.free / max(stats.blocks, 1)
            speed = bar.tasks[0].speed or 0.0
            text = f"{speed:.0f} tokens/s, {stats.running} running, cache {used:.0%}"
            bar.update(task, completed=done, text=text)

        yield tick
