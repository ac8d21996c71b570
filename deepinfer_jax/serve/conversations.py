"""The routes of the conversation protocols."""

import typing
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from deepinfer_jax.serve.answers import ChatAnswer
from deepinfer_jax.serve.body import INLINE_BYTES, aside, read_object, too_large
from deepinfer_jax.serve.errors import ApiError, bad_field
from deepinfer_jax.serve.images import mentions_image
from deepinfer_jax.serve.protocols import MESSAGES, Protocol
from deepinfer_jax.serve.service import Service
from deepinfer_jax.serve.sse import Disconnected, EventStream, until_disconnect
from deepinfer_jax.serve.tasks import Extras


class Answer(typing.Protocol):
    """What a route gives back, in pieces or at once."""

    def frames(self) -> AsyncGenerator[bytes]:
        """Yields the events of a stream."""
        ...

    async def whole(self) -> object:
        """Returns the answer as JSON types."""
        ...


def service_of(request: Request) -> Service:
    """Returns the service of the app that a request came to."""
    return request.app.state.service


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Returns a JSON answer."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def conversation(protocol: Protocol) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of a protocol's route."""

    async def handle(request: Request) -> Response:
        service = service_of(request)
        body, size = await read_conversation(request)
        task = await aside(size, lambda: service.reader.chat_task(protocol, body))
        check_record(service, task.extras)
        live = service.start(task.token_ids, task.params, task.id, task.images)
        answer = ChatAnswer(service, task, live)
        headers = {"x-request-id": task.id}
        if task.warnings:
            headers["x-deepinfer-warnings"] = "; ".join(task.warnings)
        return await deliver(request, answer, live.close, headers, is_stream=task.is_stream)

    return handle


async def read_conversation(request: Request) -> tuple[dict[str, Any], int]:
    """Returns the body of a conversation and how much work it is, in bytes (`body.aside`).

    Raises:
        ApiError: as `read_object`; bodies with images may be larger, if the model sees.
    """
    service = service_of(request)
    config, limit = service.config, service.config.max_body_bytes
    more = config.max_image_body_bytes if service.sees else 0
    body, size = await read_object(request, limit, config.request_timeout_s, image_limit=more)
    if not mentions_image(body):
        if size > limit:
            raise too_large(limit)
        return body, size
    return body, max(size, INLINE_BYTES + 1)  # even a small file may be slow to decode


async def deliver(
    request: Request,
    answer: Answer,
    close: Callable[[], None],
    headers: dict[str, str],
    *,
    is_stream: bool,
) -> Response:
    """Returns an answer as a stream or as a whole; `close` runs at its end, however it comes."""
    service = service_of(request)

    def end(early: Disconnected | None) -> None:
        close()
        note_early(service, early)

    if is_stream:
        stall_s = service.config.stream_stall_timeout_s
        return EventStream(answer.frames(), stall_s=stall_s, headers=headers, close=end)
    try:
        found = await until_disconnect(request.receive, answer.whole())
    except Disconnected as early:
        note_early(service, early)
        return Response(status_code=499)
    finally:
        close()
    return json_response(found, headers=headers)


async def count_tokens(request: Request) -> Response:
    """Answers how many tokens the prompt of a Messages body has."""
    service = service_of(request)
    body, size = await read_conversation(request)
    ids = await aside(size, lambda: service.reader.chat_ids(MESSAGES, body))
    return json_response({"input_tokens": len(ids)})


async def stored_response(request: Request) -> Response:
    """Answers that no response is stored."""
    raise ApiError(404, f"no response is stored here, {request.path_params['id']!r} neither")


def note_early(service: Service, early: Disconnected | None) -> None:
    """Counts a client that left or did not read."""
    if early is not None:
        service.metrics.stalls += early.is_stall
        service.metrics.disconnects += not early.is_stall


def check_record(service: Service, extras: Extras) -> None:
    """Raises ApiError 400 for a record that is not kept."""
    if extras.record and service.llm.runtime.record is None:
        raise bad_field("record", "false", True, "the server runs with RuntimeConfig.record=None")
