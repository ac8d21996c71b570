"""A request of `AsyncLLM` as its caller sees it, and the news about it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from deepinfer_jax.engine.output import RequestOutput, StreamDelta, TopLogprobs
from deepinfer_jax.engine.request import Request
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.vision.image import ImageInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request has its place in the batch. cached_tokens: of the prompt, reused."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A completion grew. top_logprobs: of the delta's tokens; empty unless asked for."""

    delta: StreamDelta
    top_logprobs: tuple[TopLogprobs, ...]


Event = Admitted | Grown | RequestOutput
News = Event | BaseException


@dataclass(slots=True, eq=False)
class Call:
    """One request. `news` is touched in `loop` alone, `request` by the worker alone.

    news: events if `is_streamed`, else the output alone; or what went wrong.
    """

    name: str
    ids: list[int]
    params: SamplingParams
    images: tuple[ImageInput, ...]
    is_streamed: bool
    loop: asyncio.AbstractEventLoop
    news: "asyncio.Queue[News]" = field(default_factory=asyncio.Queue)
    request: Request | None = None

    def grown(self, delta: StreamDelta) -> Grown:
        """Returns what a completion grew by, with the alternatives of its tokens."""
        top: tuple[TopLogprobs, ...] = ()
        if self.params.logprobs and delta.token_ids and self.request is not None:
            builder = self.request.sequences[delta.index].output
            sent = builder.sent_ids
            top = tuple(builder.top_logprobs[sent - len(delta.token_ids) : sent])
        return Grown(delta=delta, top_logprobs=top)


class RequestStream:
    """A running request: `read` what is new until the `RequestOutput`, or `close` it."""

    def __init__(self, call: Call, abort: Callable[[Call], bool]) -> None:
        """Follows a call that was sent; abort: ends it if it is unfinished."""
        self._call, self._abort = call, abort

    @property
    def error(self) -> BaseException | None:
        """What ended the request if its finish reason is "error"; after the output."""
        return None if self._call.request is None else self._call.request.error

    async def read(self) -> list[Event]:
        """Waits for something new and returns all there is; cancelling it loses nothing.

        Raises:
            DeepInferError: the request could not be honoured, or the engine failed.
        """
        news = [await self._call.news.get()]
        while not self._call.news.empty():
            news.append(self._call.news.get_nowait())
        events: list[Event] = []
        for one in news:
            if isinstance(one, BaseException):
                raise failed(one) from one
            events.append(one)
        return events

    def close(self) -> None:
        """Aborts the request unless it has ended."""
        self._abort(self._call)

    async def deltas(self) -> AsyncGenerator[StreamDelta, None]:
        """Yields what the completions grow by, and closes in the end; errors as `read`."""
        try:
            while True:
                for event in await self.read():
                    if isinstance(event, RequestOutput):
                        return
                    if isinstance(event, Grown):
                        yield event.delta
        finally:
            self.close()


def failed(error: BaseException) -> DeepInferError:
    """Returns an error of its own for every waiting caller; raise it from `error`."""
    if isinstance(error, DeepInferError):
        return type(error)(*error.args)
    return DeepInferError(
        f"the engine failed with {error!r}, and with it every request of this AsyncLLM: close it "
        "and make a new one"
    )


def newly_admitted(
    queued: list[tuple[Call, Request]],
) -> tuple[list[tuple[Call, News]], list[tuple[Call, Request]]]:
    """Returns (what to tell streamed calls that now have their place, the calls still waiting)."""
    told: list[tuple[Call, News]] = []
    left = []
    for call, request in queued:
        if request.admitted is None and request.ended is None:
            left.append((call, request))
        elif call.is_streamed and request.admitted is not None:
            told.append((call, Admitted(cached_tokens=request.sequences[0].cached or 0)))
    return told, left


def deliver(items: list[tuple[Call, News]]) -> list[Call]:
    """Hands news to the callers, one wake-up for each event loop; returns calls without a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, News]]] = {}
    for call, news in items:
        by_loop.setdefault(call.loop, []).append((call, news))
    lost = []
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, own)
        except RuntimeError:  # the loop is closed: nobody will read the rest either
            lost += [call for call, _ in own]
    return lost


def _put_all(items: list[tuple[Call, News]]) -> None:
    for call, news in items:
        call.news.put_nowait(news)
