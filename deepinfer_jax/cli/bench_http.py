"""Streaming clients that load a server and note when tokens come; asyncio and no HTTP library."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deepinfer_jax.errors import InputError

Body = dict[str, Any]
#: A stream that says nothing for so long has failed; servers send signs of life.
_SILENCE_S = 120.0
#: Events closer than this were sent together: the tokens of one step.
_BURST_S = 5e-4


@dataclass(slots=True)
class Seen:
    """What one client saw of one request. Times are seconds from its sending.

    status: of HTTP, 0 if the connection broke. arrivals: of events with content. has_left: the
    client hung up on purpose. error: what the stream said at its end.
    """

    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    total_s: float = 0.0
    has_left: bool = False
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it was answered, to its end or until the client left."""
        return self.status == 200 and self.error is None


async def stream_once(
    url: str, path: str, body: Body, key: str | None, leave_after: int | None
) -> Seen:
    """Sends one streaming request and reads it.

    Args:
        url: of the server, `http://host:port`.
        path: of the route.
        body: of the request.
        key: for a server that asks for one.
        leave_after: hang up after so many events with content; None reads to the end.
    """
    place = urlsplit(url)
    if place.scheme != "http" or place.hostname is None or place.port is None:
        raise InputError(f"a server is named http://host:port, got {url!r}")
    raw = json.dumps(body | {"stream": True}).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {place.netloc}",
        "content-type: application/json",
        f"content-length: {len(raw)}",
        "connection: close",
        *([f"authorization: Bearer {key}"] if key else []),
    ]
    seen, began = Seen(), time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**20)
    except OSError as error:
        seen.error = str(error)
        return seen
    try:
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + raw)
        await _read(reader, seen, began, leave_after)
    except (OSError, EOFError, TimeoutError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    finally:
        writer.transport.abort()
    seen.total_s = time.perf_counter() - began
    return seen


async def _read(
    reader: asyncio.StreamReader, seen: Seen, began: float, leave_after: int | None
) -> None:
    async with asyncio.timeout(_SILENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
    seen.status = int(head.split(b" ", 2)[1])
    while True:
        async with asyncio.timeout(_SILENCE_S):
            line = await reader.readline()
        if not line:
            return
        if not line.startswith(b"data: "):
            if seen.status != 200 and line.startswith(b"{"):
                seen.error = line.decode(errors="replace").strip()[:200]
            continue
        if line.startswith((b"data: [DONE]", b'data: {"type":"message_stop"')):
            return
        if line.startswith(b'data: {"error"'):
            seen.error = line.decode(errors="replace").strip()[:200]
        elif b'"content":"' in line or b'"reasoning_content":"' in line or b'"text":"' in line:
            seen.arrivals.append(time.perf_counter() - began)
        if leave_after is not None and len(seen.arrivals) >= leave_after:
            seen.has_left = True
            return


async def load(
    url: str,
    path: str,
    make_body: Callable[[random.Random], Body],
    *,
    clients: int,
    seconds: float | None = None,
    requests: int | None = None,
    leave_share: float = 0.0,
    key: str | None = None,
    seed: int = 0,
) -> list[Seen]:
    """Returns what clients saw that send one request after the other.

    Args:
        url: of the server.
        path: of the route.
        make_body: draws the next request.
        clients: that run together.
        seconds: no request begins after that time.
        requests: of each client.
        leave_share: of the requests, whose client hangs up after 1 to 8 events.
        key: for a server that asks for one.
        seed: of what is drawn.
    """
    end = None if seconds is None else time.monotonic() + seconds
    found: list[Seen] = []

    async def client(number: int) -> None:
        rng = random.Random(f"{seed}.{number}")
        done = 0
        while (end is None or time.monotonic() < end) and (requests is None or done < requests):
            leaves = rng.random() < leave_share
            after = rng.randint(1, 8) if leaves else None
            seen = await stream_once(url, path, make_body(rng), key, after)
            found.append(seen)
            done += 1
            if seen.status == 429 or seen.status == 0:
                await asyncio.sleep(rng.uniform(0.5, 1.5))

    await asyncio.gather(*(client(number) for number in range(clients)))
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns p50, p90 and p99 in milliseconds; nothing for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[round(last * p / 100)] * 1e3, 2) for p in (50, 90, 99)}


def summary(found: list[Seen], seconds: float) -> dict[str, Any]:
    """Returns counts, throughput and latencies of what clients saw in so many seconds."""
    whole = [one for one in found if one.is_ok and not one.has_left]
    gaps = [
        after - before
        for one in found
        if one.is_ok
        for before, after in zip(one.arrivals, one.arrivals[1:], strict=False)
        if after - before > _BURST_S
    ]
    errors = [one for one in found if not one.is_ok]
    return {
        "seconds": round(seconds, 1),
        "answered": len(whole),
        "left": sum(one.has_left for one in found),
        "errors": len(errors),
        "first_error": errors[0].error if errors else None,
        "requests_per_s": round(len(whole) / seconds, 2),
        "events_per_s": round(sum(len(one.arrivals) for one in found) / seconds, 1),
        "first_token_ms": percentiles([one.arrivals[0] for one in found if one.arrivals]),
        "between_bursts_ms": percentiles(gaps),
        "request_ms": percentiles([one.total_s for one in whole]),
    }
