"""The ASGI application: routes, keys, and errors as answers."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.serve import info
from deepinfer_jax.serve.completions import completions
from deepinfer_jax.serve.conversations import (
    conversation,
    count_tokens,
    json_response,
    service_of,
    stored_response,
)
from deepinfer_jax.serve.errors import ApiError, as_api_error
from deepinfer_jax.serve.protocols import CHAT, MESSAGES, RESPONSES
from deepinfer_jax.serve.service import Service

Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """Returns the application of a service, which must have been warmed up to answer."""
    routes = [
        _route("/v1/chat/completions", conversation(CHAT), "POST"),
        _route("/v1/responses", conversation(RESPONSES), "POST"),
        _route("/v1/responses/{id}", stored_response, "GET", "DELETE"),
        _route("/v1/messages", conversation(MESSAGES), "POST"),
        _route("/v1/messages/count_tokens", count_tokens, "POST"),
        _route("/v1/completions", completions, "POST"),
        _route("/v1/models", info.models, "GET"),
        _route("/v1/models/{name:path}", info.model, "GET"),
        _route("/tokenize", info.tokenize, "POST"),
        _route("/detokenize", info.detokenize, "POST"),
        _route("/abort", info.abort, "POST", is_admin=True),
        _route("/server_info", info.server_info, "GET", is_admin=True),
        _route("/metrics", info.metrics, "GET", is_admin=True),
        _route("/version", info.version, "GET"),
        Route("/health", info.health, methods=["GET"]),
        Route("/health/live", info.live, methods=["GET"]),
    ]
    handlers = {
        ApiError: _answer_error,
        DeepInferError: _answer_error,
        HTTPException: _answer_http,
        ClientDisconnect: _answer_nobody,
        Exception: _answer_error,  # logged as well
    }
    app = Starlette(routes=routes, exception_handlers=handlers)  # pyright: ignore[reportArgumentType]
    app.state.service = service
    return app


def _route(path: str, handler: Handler, *methods: str, is_admin: bool = False) -> Route:
    """Returns a route that only a key opens; answers are counted."""

    async def guarded(request: Request) -> Response:
        service = service_of(request)
        service.check_key(request.headers, is_admin=is_admin)
        response = await handler(request)
        service.metrics.responses[response.status_code] += 1
        return response

    return Route(path, guarded, methods=list(methods))


async def _answer_error(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    service_of(request).metrics.responses[found.status] += 1
    headers = {}
    if found.retry_after_s is not None:
        headers["retry-after"] = str(found.retry_after_s)
    if found.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(found.envelope(is_anthropic=_is_anthropic(request)), found.status, headers)


async def _answer_http(request: Request, error: HTTPException) -> Response:
    text = {404: f"no route {request.url.path[:80]!r}", 405: f"{request.method} is not for here"}
    message = text.get(error.status_code, str(error.detail))
    response = await _answer_error(request, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _answer_nobody(request: Request, _: Exception) -> Response:
    service_of(request).metrics.disconnects += 1
    return Response(status_code=499)


def _is_anthropic(request: Request) -> bool:
    return request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
