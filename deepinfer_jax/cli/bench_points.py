"""Points of a benchmark: what so many requests together get, from an engine or from a server."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from deepinfer_jax.cli.bench_http import load, percentiles, summary
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.errors import InputError
from deepinfer_jax.pictures import new_picture, save_picture
from deepinfer_jax.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Requests that run together, and what they get.

    series: what was measured, such as "drafts". tokens_per_s: of all together.
    tokens_per_s_per_request: median, after the first token. first_token_ms, between_ms: p50, p90
    and p99; between_ms of a token, or of a burst of tokens if a server was measured.
    """

    series: str
    concurrency: int
    requests: int
    seconds: float
    tokens_per_s: float
    tokens_per_s_per_request: float
    first_token_ms: dict[str, float]
    between_ms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts of random ids, all different; ids are from the plain part of a vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(3, max(vocab // 2, 4)) for _ in range(length)] for _ in range(count)]


def engine_point(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    concurrency: int,
    requests: int,
    series: str,
) -> Point:
    """Returns what an engine gives while `concurrency` requests always run, `requests` in all."""
    begun, running, outputs = 0, 0, []
    started = time.perf_counter()
    while len(outputs) < requests:
        while running < concurrency and begun < requests:
            engine.submit(prompts[begun % len(prompts)], params)
            begun, running = begun + 1, running + 1
        for request in engine.step():
            outputs.append(request.output())
            running -= 1
    seconds = time.perf_counter() - started
    engine.drain()
    counts = [len(output.token_ids) for output in outputs]
    spans = [o.metrics.total_s - o.metrics.first_token_s for o in outputs]
    pairs = [(n - 1, span) for n, span in zip(counts, spans, strict=True) if n > 1 and span > 0]
    return Point(
        series=series,
        concurrency=concurrency,
        requests=requests,
        seconds=round(seconds, 3),
        tokens_per_s=round(sum(counts) / seconds, 1),
        tokens_per_s_per_request=round(median([n / span for n, span in pairs] or [0.0]), 2),
        first_token_ms=percentiles([output.metrics.first_token_s for output in outputs]),
        between_ms=percentiles([span / n for n, span in pairs]),
    )


def server_point(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    requests: int,
    max_tokens: int,
    key: str | None,
) -> Point:
    """Returns what streaming clients of `/v1/completions` see; prompts are sent as ids.

    Raises:
        InputError: the server refuses, or an answer failed.
    """

    def make_body(rng: random.Random) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(rng.choice(prompts)),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    each = max(requests // concurrency, 1)
    work = load(url, "/v1/completions", make_body, clients=concurrency, requests=each, key=key)
    started = time.perf_counter()
    found = asyncio.run(work)
    seconds = time.perf_counter() - started
    seen = summary(found, seconds)
    if seen["errors"]:
        raise InputError(f"{url} did not answer {seen['errors']} requests: {seen['first_error']}")
    spans = [one.total_s - one.arrivals[0] for one in found if one.arrivals]
    return Point(
        series="server",
        concurrency=concurrency,
        requests=len(found),
        seconds=round(seconds, 3),
        tokens_per_s=round(len(found) * max_tokens / seconds, 1),
        tokens_per_s_per_request=round(
            median([(max_tokens - 1) / span for span in spans if span > 0] or [0.0]), 2
        ),
        first_token_ms=seen["first_token_ms"],
        between_ms=seen["between_bursts_ms"],
    )


def pareto(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other one beats in both speeds, fastest request first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.tokens_per_s_per_request, -p.tokens_per_s)):
        if not best or point.tokens_per_s > best[-1].tokens_per_s:
            best.append(point)
    return best


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Writes two pictures side by side as one PNG: throughput against the speed of a request with
    the Pareto front, and latencies against the number of requests.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, (left, right) = new_picture((11.0, 4.5), columns=2)
    for number, series in enumerate(dict.fromkeys(point.series for point in points)):
        own = [point for point in points if point.series == series]
        color = f"C{number}"
        x = [p.tokens_per_s_per_request for p in own]
        left.plot(x, [p.tokens_per_s for p in own], "o", color=color, label=series)
        for point in own:
            left.annotate(
                str(point.concurrency),
                (point.tokens_per_s_per_request, point.tokens_per_s),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize=8,
            )
        counts = [p.concurrency for p in own]
        first = [p.first_token_ms.get("p50") for p in own]
        between = [p.between_ms.get("p50") for p in own]
        right.plot(counts, first, "o-", color=color, label=f"{series}: first token")
        right.plot(counts, between, "s--", color=color, label=f"{series}: next token")
    front = pareto(points)
    left.plot(
        [p.tokens_per_s_per_request for p in front],
        [p.tokens_per_s for p in front],
        "-",
        color="0.6",
        zorder=0,
        label="Pareto front",
    )
    left.set(xlabel="tokens/s of a request", ylabel="tokens/s of all", title=title)
    right.set(xlabel="requests together", ylabel="median ms", title="Latency")
    right.set(xscale="log", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save_picture(figure, path)
