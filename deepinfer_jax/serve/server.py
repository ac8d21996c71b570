"""uvicorn around a service: listens, warms up, and drains at SIGTERM (io.md 4)."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepinfer_jax.async_llm import AsyncLLM
from deepinfer_jax.errors import ConfigError, DeepInferError
from deepinfer_jax.serve.app import make_app
from deepinfer_jax.serve.config import ServerConfig
from deepinfer_jax.serve.memory import keep_what_is_there
from deepinfer_jax.serve.service import Service

#: Seconds for the headers of a request, from its first byte or from the connection on.
_HEADERS_S = 10.0


class Server(uvicorn.Server):
    """A server of one model. The first SIGTERM or SIGINT drains it, the second one ends it.

    error: why the engine could not be made, if that ended the server.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        note: Callable[[str], object] = lambda text: None,
        *,
        is_alone: bool = False,
    ) -> None:
        """Prepares to serve; `run` does it.

        note: as `serve`. is_alone: the process does nothing else, so what it holds once it is ready
        stays to its end.
        """
        self.service, self._note, self._is_alone = Service(llm, config), note, is_alone
        app = make_app(self.service)
        app.router.lifespan_context = self._lifespan
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=_Protocol,
                ws="none",
                lifespan="on",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=10,
            )
        )
        self.error: Exception | None = None
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Where it listens; known once `started` is true."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain; called again, ends at once."""
        if self._drain is None and self._loop is not None and not self.should_exit:
            self.stop()
        else:
            super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Drains and ends, soon; from any thread."""
        assert self._loop is not None, "the server has not started"
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        running = sum(live.count for live in self.service.live)
        try:
            self._note(f"no new requests; {running} completions may end")
            await self.service.drain()
        finally:
            self.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Warms up beside the first requests, which are told to wait."""
        self._loop = asyncio.get_running_loop()
        warming = asyncio.ensure_future(self._warm_up())
        try:
            yield
        finally:
            warming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await warming
            await self.service.close()

    async def _warm_up(self) -> None:
        try:
            self._note("compiling what the engine can need")
            await self.service.warm_up()
            if self._is_alone:
                keep_what_is_there()
            self._note(f"ready at {self.url} as {', '.join(self.service.names)}")
        except Exception as error:  # `serve` raises it
            self.error = error
            self.should_exit = True


class _Protocol(H11Protocol):
    """HTTP/1.1 that hangs up on clients who take too long over their headers."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
        """Starts the clock."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_HEADERS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Stops it once the headers are there, and starts it with those of the next request."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel()
        elif self._deadline is None and self.transport is not None:
            self._deadline = self.loop.call_later(_HEADERS_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops it."""
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def listen(config: ServerConfig) -> socket.socket:
    """Returns a socket that listens where the options say.

    Raises:
        ConfigError: it cannot.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"the server must be able to listen on {config.host}:{config.port}: {error}. Choose "
            "another --port"
        ) from error


def serve(llm: AsyncLLM, config: ServerConfig, note: Callable[[str], object]) -> None:
    """Serves a model in this thread until a signal ends it.

    note: is told what a person wants to know: where it listens, and when it is ready.

    Raises:
        ConfigError: it cannot listen there.
        DeepInferError: the engine could not be made.
    """
    server = Server(llm, config, note, is_alone=True)
    server.run([listen(config)])
    if server.error is not None:
        raise server.error


@contextmanager
def serving(llm: AsyncLLM, config: ServerConfig) -> Iterator[Server]:
    """Serves a model from a thread of its own inside the block; for notebooks and tests.

    Use port 0 and read `Server.url`. The model is closed at the end.

    Raises:
        ConfigError: it cannot listen there.
        DeepInferError: the engine could not be made.
    """
    server = Server(llm, config)
    sockets = [listen(config)]
    thread = threading.Thread(target=server.run, args=(sockets,), name="serve", daemon=True)
    thread.start()
    ready = threading.Event()
    while thread.is_alive() and not (server.started and server.service.state == "ready"):
        ready.wait(0.01)
    if not thread.is_alive():
        raise server.error or DeepInferError("the server ended before it was ready: see its log")
    try:
        yield server
    finally:
        server.stop()
        thread.join()
