"""From the engine's events to the answer of a conversation, whole or as it grows."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from deepinfer_jax.async_llm.call import Admitted, Event, Grown
from deepinfer_jax.engine.output import RequestOutput
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.serve.choices import ChoiceReader, Chunk, merge_choices, merge_usage
from deepinfer_jax.serve.errors import ApiError, as_api_error
from deepinfer_jax.serve.protocols import CHAT, MESSAGES, RESPONSES
from deepinfer_jax.serve.service import Live, Service
from deepinfer_jax.serve.sse import DONE, PING, frame
from deepinfer_jax.serve.tasks import ChatTask

#: Finish reasons that are no answer -> status.
FAILURES = {"grammar": 400, "numerical": 500, "error": 500, "abort": 503}


def failed_completion(reason: str, why: object) -> ApiError:
    """Returns the answer to a completion that ended by one of `FAILURES`."""
    text = f"the completion ended by {reason}" + ("" if why is None else f": {why}")
    return ApiError(FAILURES[reason], text, code=reason)


class ChatAnswer:
    """The completions of one request of a conversation protocol.

    The chunks that end a completion wait for the end of all, because the last one says what the
    whole request was: its seed, its usage, its record.
    """

    def __init__(self, service: Service, task: ChatTask, live: Live) -> None:
        """Reads a request that was sent."""
        self._service, self._task, self._live = service, task, live
        encoder = service.reader.encoder
        self._readers = [
            ChoiceReader(task, encoder, service.created_now(), service.fingerprint)
            for _ in range(task.params.n)
        ]
        self._reasons: list[str] = [""] * task.params.n
        self._last: list[Chunk] = []
        self._known: dict[str, Any] = {}
        self._is_started = self._is_done = False
        self._sent = 0  # chunks

    async def whole(self) -> dict[str, Any]:
        """Returns the protocol's response."""
        while not self._is_done:
            await self._take(await self._live.read())
        responses = [reader.response() for reader in self._readers]
        response = merge_choices(responses) if len(responses) > 1 else responses[0]
        return response | {"deepinfer": self._known}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields the protocol's events; an error is the last one."""
        try:
            while not self._is_done:
                try:
                    async with asyncio.timeout(self._service.config.heartbeat_s):
                        events = await self._live.read()
                except TimeoutError:
                    yield self._ping()
                    continue
                chunks = await self._take(events)
                self._sent += len(chunks)
                if chunks:
                    yield b"".join(frame(name, data) for name, data in chunks)
        except (ApiError, DeepInferError) as error:
            yield self._failure(as_api_error(error))
            return
        except Exception as error:
            yield self._failure(as_api_error(error))
            raise
        if self._task.protocol is CHAT:
            yield DONE

    async def _take(self, events: list[Event]) -> list[Chunk]:
        """Returns what the engine's events add."""
        chunks: list[Chunk] = []
        output: RequestOutput | None = None
        for event in events:
            if not self._is_started:  # a request may end without having been admitted
                self._is_started = True
                cached = event.cached_tokens if isinstance(event, Admitted) else 0
                for index, reader in enumerate(self._readers):
                    chunks += self._numbered(index, reader.start(cached))
            if isinstance(event, Grown):
                chunks += self._grow(event)
            elif isinstance(event, RequestOutput):
                output = event
        has_stopped = all(reader.is_finished for reader in self._readers)
        # A record is that of the whole completion, so it is not cut short by a stop string.
        if output is not None or (has_stopped and not self._task.extras.record):
            self._live.done()
            await self._end(output)
            chunks += self._last
        return chunks

    def _grow(self, event: Grown) -> list[Chunk]:
        delta, reader = event.delta, self._readers[event.delta.index]
        if reader.is_finished:
            return []
        chunks = reader.push(delta.token_ids, delta.logprobs, event.top_logprobs)
        reason = "stop" if reader.is_finished else delta.finish_reason
        if reason is None:
            return self._numbered(delta.index, chunks)
        if reason in FAILURES and not reader.is_finished:
            raise failed_completion(reason, self._live.error or delta.stop_reason)
        self._reasons[delta.index] = reason
        if not reader.is_finished:
            chunks += reader.finish(reason)
        self._last += self._numbered(delta.index, chunks)
        return []

    async def _end(self, output: RequestOutput | None) -> None:
        """Completes the last chunk with what is known of the whole request."""
        self._is_done = True
        task = self._task
        known: dict[str, Any] = {"seed": task.params.seed, "finish_reasons": self._reasons}
        if task.extras.token_ids:
            known["prompt_token_ids"] = task.prompt_ids
            known["token_ids"] = [reader.token_ids for reader in self._readers]
        if task.extras.record and output is not None:
            record = await asyncio.to_thread(lambda: output.record)
            known["record"] = None if record is None else orjson.loads(record.to_json())
        if output is not None and output.warnings:
            known["warnings"] = list(output.warnings)
        self._known = known
        if not self._last:
            return
        if task.protocol is MESSAGES:
            next(data for name, data in self._last if name == "message_delta")["deepinfer"] = known
        elif task.protocol is RESPONSES:
            self._last[-1][1]["response"]["deepinfer"] = known
        else:
            end = self._last[-1][1]
            end["deepinfer"] = known
            counted = [data for _, data in self._last if data.get("usage") is not None]
            if counted:  # the client wants to know
                usage = merge_usage([data["usage"] for data in counted])
                for data in counted:
                    data["usage"] = None
                end["usage"] = usage

    def _numbered(self, index: int, chunks: list[Chunk]) -> list[Chunk]:
        if index:
            for _, data in chunks:
                data["choices"][0]["index"] = index
        return chunks

    def _ping(self) -> bytes:
        return frame("ping", {"type": "ping"}) if self._task.protocol is MESSAGES else PING

    def _failure(self, error: ApiError) -> bytes:
        protocol = self._task.protocol
        envelope = error.envelope(is_anthropic=protocol.is_anthropic)
        if protocol is MESSAGES:
            return frame("error", envelope)
        if protocol is CHAT:
            return frame(None, envelope)
        failed = {
            "id": self._task.id,
            "object": "response",
            "created_at": self._service.created_now(),
            "status": "failed",
            "model": self._task.model,
            "output": [],
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        event = {"type": "response.failed", "sequence_number": self._sent, "response": failed}
        return frame("response.failed", event)
