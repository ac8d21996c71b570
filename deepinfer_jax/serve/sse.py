"""Server-sent events that notice a client who left or does not read (io.md 4)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Disconnected(Exception):
    """The client is gone, or has not read for too long (`is_stall`)."""

    def __init__(self, *, is_stall: bool = False) -> None:
        """Says which."""
        super().__init__("the client has not read" if is_stall else "the client is gone")
        self.is_stall = is_stall


def frame(name: str | None, data: object) -> bytes:
    """Returns one event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


async def until_disconnect[T](receive: Receive, work: Awaitable[T]) -> T:
    """Returns what `work` gives, and cancels it as soon as the client leaves.

    Raises:
        Disconnected: the client left first.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """A response whose parts come from `parts`; `close` is called at its end, whichever it is."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        *,
        stall_s: float,
        headers: dict[str, str],
        close: Callable[[Disconnected | None], None],
    ) -> None:
        """Keeps where parts come from.

        Args:
            parts: what is sent; an error in it must have been turned into a part.
            stall_s: how long a part may wait for the client.
            headers: beside those of every stream.
            close: called once, with what ended the stream early.
        """
        super().__init__(headers=headers | HEADERS)
        del self.headers["content-length"]
        self._parts, self._stall_s, self._close = parts, stall_s, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        early: Disconnected | None = None
        try:
            await until_disconnect(receive, self._write(send))
        except Disconnected as error:
            early = error
        finally:
            self._close(early)

    async def _write(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await self._send(send, part, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, part: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": part, "more_body": more})
        except TimeoutError as error:
            raise Disconnected(is_stall=True) from error


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
