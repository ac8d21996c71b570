"""The JSON object in a request's body, within limits."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request

from deepinfer_jax.serve.errors import ApiError

MAX_DEPTH = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 256
#: Bodies above this are parsed and encoded beside the event loop.
INLINE_BYTES = 64 * 2**10


async def read_object(
    request: Request, limit: int, timeout_s: float, *, image_limit: int = 0
) -> tuple[dict[str, Any], int]:
    """Returns a body's JSON object and its size in bytes.

    Args:
        request: whose body it is.
        limit: most bytes.
        timeout_s: for the client to send them.
        image_limit: most bytes of a body that speaks of images before it reaches `limit`.

    Raises:
        ApiError: 400 no JSON object, 408 too slow, 413 too large, 415 not said to be JSON.
        ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type must be application/json, got {kind or 'none'!r}")
    body = await _read(request, limit, max(limit, image_limit), timeout_s)
    return await aside(len(body), lambda: parse_object(body)), len(body)


async def aside[T](size: int, work: Callable[[], T]) -> T:
    """Returns what `work` returns; off the event loop if `size` bytes make it slow."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
        ApiError: 400; it is none, or is nested too deeply.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(value)}")
    _check_depth(value)
    for name, most in (("messages", MAX_MESSAGES), ("input", MAX_MESSAGES), ("tools", MAX_TOOLS)):
        many = value.get(name)
        if isinstance(many, list) and len(many) > most:
            rule = f"{name} must have at most {most} entries, got {len(many)}"
            raise ApiError(400, rule, param=name)
    return value


async def _read(request: Request, limit: int, most: int, timeout_s: float) -> bytes:
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > most:
        raise too_large(most)
    parts, size, has_image = [], 0, False
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                parts.append(part)
                has_image = has_image or b"image" in b"".join(parts[-2:])
                if size > (most if has_image else limit):
                    raise too_large(most if has_image else limit)
    except TimeoutError as error:
        rule = f"the body must arrive within {timeout_s:g} s, {size} bytes of it did"
        raise ApiError(408, rule) from error
    return b"".join(parts)


def too_large(limit: int) -> ApiError:
    """Returns the 413 of a body with more bytes than `limit`."""
    return ApiError(413, f"the body must have at most {limit} bytes, and has more")


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            items = one.values() if isinstance(one, dict) else one
            inner += [item for item in items if isinstance(item, dict | list)]
        if not inner:
            return
        level = inner
    raise ApiError(400, f"JSON may be nested {MAX_DEPTH} deep, the body is nested deeper")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
