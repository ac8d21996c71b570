"""`AsyncLLM`: one engine for many coroutines (engine.md 1.3).

A worker thread owns the engine: it steps while there is work and sleeps on its inbox otherwise.
Callers send it messages; what it finds goes back to each caller's event loop once a step.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from deepinfer_jax.async_llm.call import (
    Call,
    News,
    RequestStream,
    deliver,
    failed,
    newly_admitted,
)
from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.messages import Messages
from deepinfer_jax.chat.parse import ChatDelta, ChatParser
from deepinfer_jax.chat.session import prepare_answer, read_chat_stream, stream_params
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.output import RequestOutput, ScoreOutput, StreamDelta
from deepinfer_jax.engine.request import Request, request_factory
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.errors import DeepInferError, GrammarError, InputError
from deepinfer_jax.llm import LLM, Prompt
from deepinfer_jax.loading import Model
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.vision.image import ImageInput

Asked = tuple[list[int], SamplingParams, tuple[ImageInput, ...]]


class AsyncLLM:
    """A loaded model for asyncio: `generate`, `complete`, `score`, `chat`; arguments as `LLM`.

    Loading blocks; the engine is made by the worker thread at first use. Callers may live in
    several event loops and threads. Tokens are those of `LLM.generate`. An error of the engine
    reaches every waiting caller and every later one; only `close` is left then.

    Raises:
        DeepInferError: as `load`.

    Examples:
        >>> di.AsyncLLM(model).max_len
        4096
    """

    def __init__(
        self,
        source: "str | os.PathLike[str] | Model",
        *,
        runtime: RuntimeConfig | None = None,
        **load_options: Any,
    ) -> None:
        """Loads the source unless it is a `Model` already."""
        self._llm = LLM(source, runtime=runtime, **load_options)
        self._factory = request_factory(self.model, self._llm.runtime)
        self._names = count()
        self._inbox: SimpleQueue[Callable[[Engine], object] | None] = SimpleQueue()
        # Guards the next five. With it, no message comes after the None that ends the worker.
        self._lock = threading.Lock()
        self._calls: dict[str, Call] = {}
        self._futures: set[Future[Any]] = set()
        self._worker: threading.Thread | None = None
        self._is_closed = False
        self._failure: BaseException | None = None
        self._outbox: list[tuple[Call, News]] = []  # of the worker, as the next three
        self._queued: list[tuple[Call, Request]] = []
        self._busy_since: float | None = None

    @property
    def model(self) -> Model:
        """The loaded model."""
        return self._llm.model

    @property
    def runtime(self) -> RuntimeConfig:
        """How it is run."""
        return self._llm.runtime

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and completion together."""
        return self._llm.max_len

    @property
    def chat_encoder(self) -> ChatEncoder:
        """As `LLM.chat_encoder`."""
        return self._llm.chat_encoder

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it lives."""
        return self._failure

    @property
    def busy_s(self) -> float:
        """Seconds that the present step has taken; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def encode(self, text: str) -> list[int]:
        """As `LLM.encode`."""
        return self._llm.encode(text)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        images: Sequence[Any] = (),
    ) -> AsyncGenerator[StreamDelta, None]:
        """Returns an async iterator of what the completions of a prompt grow by.

        The request starts at its first `anext`. `aclose` and cancellation abort it.

        Args:
            prompt: a text or token ids.
            params: what is asked for.
            request_id: a name for `abort`, not in use.
            images: of the prompt, as in `LLM.generate`.

        Raises:
            InputError: something cannot be honoured. Nothing has run then.
        """
        return self._stream(self._checked(prompt, params, images), request_id)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        images: Sequence[Any] = (),
    ) -> RequestStream:
        """Sends a request of the running event loop and returns it; `close` it in the end.

        Beside what `generate` yields it tells of admission, alternatives and the whole output.
        Arguments and errors as `generate`.
        """
        asked = self._checked(prompt, params, images)
        call = self._call(asked, request_id, is_streamed=True)
        return RequestStream(call, self._abort)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        images: Sequence[Any] = (),
    ) -> RequestOutput:
        """Returns the finished completions of a prompt; arguments and errors as `generate`."""
        asked = self._checked(prompt, params, images)
        call = self._call(asked, request_id, is_streamed=False)
        try:
            output = await call.news.get()
        finally:
            self._abort(call)
        if isinstance(output, BaseException):
            raise failed(output) from output
        assert isinstance(output, RequestOutput)
        return output

    async def score(self, prompt: Prompt, *, top_logprobs: int = 0) -> ScoreOutput:
        """Returns raw log-probabilities of the prompt's ids from the second on."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)
        return (await self.complete(prompt, params)).score()

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[ChatDelta, None]:
        """Returns an async iterator of the answer to one conversation, as `LLM.stream_chat`.

        Raises:
            InputError: a message, option or parameter that cannot be honoured; nothing has run.
            TokenizerError: the checkpoint has no tokenizer, or it lacks special tokens.
        """
        params = params or SamplingParams()
        encoder = self._llm.chat_encoder
        prompt, asked = prepare_answer(encoder, messages, stream_params(params), options)
        parser = ChatParser(encoder, prompt.conversation, params.stop)
        source = self.generate(list(prompt.token_ids), asked, images=prompt.images)
        return read_chat_stream(parser, source)

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason "abort", soon; returns whether it was unfinished."""
        with self._lock:
            call = self._calls.get(request_id)
        return call is not None and self._abort(call)

    async def stats(self) -> EngineStats:
        """Returns counters and gauges of the engine, between two of its steps."""
        return await self._ask(Engine.stats)

    async def replace_params(self, params: Any) -> None:
        """Uses other weights of the same shapes; cached prefixes are forgotten.

        Raises:
            InputError: the tree differs in structure, shapes or dtypes, or requests are running.
        """
        await self._ask(partial(self._replace, params))

    async def close(self) -> None:
        """Aborts what runs, waits for the worker to end and frees the engine's memory."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(None)
            worker = self._worker
        if worker is not None:
            await asyncio.to_thread(worker.join)

    async def __aenter__(self) -> "AsyncLLM":
        """Returns itself; `close` is called at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes."""
        await self.close()

    # -- callers ----------------------------------------------------------------------------------

    def _checked(
        self, prompt: Prompt, params: SamplingParams | None, images: Sequence[Any]
    ) -> Asked:
        params = params or SamplingParams()
        ids, seen = self._llm.read_prompt(prompt, images)
        self._factory.check(ids, params, "0", seen)
        return ids, params, seen

    async def _stream(self, asked: Asked, request_id: str | None) -> AsyncGenerator[StreamDelta]:
        stream = RequestStream(self._call(asked, request_id, is_streamed=True), self._abort)
        async with aclosing(stream.deltas()) as deltas:
            async for delta in deltas:
                yield delta

    def _call(self, asked: Asked, name: str | None, *, is_streamed: bool) -> Call:
        """Sends a request to the worker."""
        name = f"async-{next(self._names)}" if name is None else name
        call = Call(name, *asked, is_streamed, asyncio.get_running_loop())
        with self._lock:
            self._check_open()
            if name in self._calls:
                raise InputError(f"request_id must not be in use, {name!r} is")
            self._calls[name] = call
            self._send(partial(self._submit, call))
        return call

    def _abort(self, call: Call) -> bool:
        with self._lock:
            # Another call may have taken the name of one that has ended.
            is_there = self._calls.get(call.name) is call
            if is_there:
                self._inbox.put(lambda engine: engine.abort(call.name))
        return is_there

    async def _ask(self, question: Callable[[Engine], Any]) -> Any:
        """Returns what the worker answers between two steps."""
        future: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._futures.add(future)
            self._send(partial(self._answer, question, future))
        return await asyncio.wrap_future(future)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise failed(self._failure) from self._failure
        if self._is_closed:
            raise InputError("this AsyncLLM is closed: make a new one of its model")

    def _send(self, message: Callable[[Engine], object]) -> None:
        if self._worker is None:
            # A daemon, so that a program that forgets `close` can end.
            self._worker = threading.Thread(target=self._work, name="AsyncLLM", daemon=True)
            self._worker.start()
        self._inbox.put(message)

    # -- the worker -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Runs the engine until `close` or until it fails."""
        try:
            self._busy_since = time.monotonic()
            engine = self._llm.engine
            while self._read_inbox(engine):
                if engine.has_work:
                    self._step(engine)
            engine.abort_all()
            while engine.has_work:
                self._step(engine)
            self._llm.close()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tells everybody, now and later, that there is no engine any more."""
        with self._lock:
            self._failure = error
            for call in self._calls.values():
                self._note(call, error)
            self._calls.clear()
            for future in self._futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(failed(error))
            self._futures.clear()
        self._deliver()

    def _read_inbox(self, engine: Engine) -> bool:
        """Acts on all messages, and waits for one if there is nothing else; false is the end."""
        is_idle = not engine.has_work
        while True:
            try:
                self._busy_since = None if is_idle else time.monotonic()
                message = self._inbox.get(block=is_idle)
            except Empty:
                return True
            if message is None:
                return False
            message(engine)
            is_idle = False

    def _step(self, engine: Engine) -> None:
        finished = engine.step()
        if self._queued:
            admitted, self._queued = newly_admitted(self._queued)
            self._outbox = admitted + self._outbox  # before what these requests have produced
        for request in finished:
            self._finish(request)
        self._deliver()

    def _grow(self, call: Call, delta: StreamDelta) -> None:
        self._note(call, call.grown(delta))

    def _submit(self, call: Call, engine: Engine) -> None:
        sink = partial(self._grow, call) if call.is_streamed else None
        try:
            call.request = engine.submit(
                call.ids, call.params, request_id=call.name, sink=sink, images=call.images
            )
            self._queued.append((call, call.request))
        except DeepInferError as error:  # the request's fault; any other is the engine's
            self._release(call.name)
            self._note(call, error)
            self._deliver()

    def _answer(
        self, question: Callable[[Engine], Any], future: "Future[Any]", engine: Engine
    ) -> None:
        with self._lock:
            self._futures.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(question(engine))
        except Exception as error:
            future.set_exception(error)
            if not isinstance(error, DeepInferError):
                raise  # it is the engine that failed

    def _replace(self, params: Any, engine: Engine) -> None:
        stats = engine.stats()
        while engine.has_work and not stats.running and not stats.waiting:
            self._step(engine)  # the last steps of requests that have ended
        engine.replace_params(params)

    def _finish(self, request: Request) -> None:
        request.sink = None  # it leads to the call and back: a circle lives until a collection
        error = request.error  # a grammar is refused when it has been compiled, beside the loop
        news = error if isinstance(error, GrammarError) else request.output()
        self._note(self._release(request.request_id), news)

    def _release(self, name: str) -> Call:
        with self._lock:
            return self._calls.pop(name)

    def _note(self, call: Call, news: News) -> None:
        self._outbox.append((call, news))

    def _deliver(self) -> None:
        """Hands what is new to the callers, one wake-up for each event loop."""
        items, self._outbox = self._outbox, []
        for call in deliver(items):
            self._abort(call)
