"""What hostile constraints do to the requests beside them (io.md 2.4; 7, gate 5).

`python -m benchmarks.hostile [--model nano] [--streams 16] [--seconds 20]` starts `deepinfer-jax
serve` on loopback in a process of its own. Streams run for some seconds alone, and then for as long
as constraints of the list below are sent one after the other, each a few times with other sizes, so
that none is compiled already. It prints one JSON line: status and time of every answer, the time
between tokens of the streams alone and beside them, and the server's memory. Exit code 1 if an
answer is not 200, 400 or 408 within 11 s, a compilation is still stuck in the end, or memory grew
by 500 MB.
"""

import argparse
import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from benchmarks.serving import PROMPTS, metrics, resident_mb, start, wait_idle
from deepinfer_jax.cli.bench_http import load, summary

Schema = dict[str, Any]


def deep(levels: int) -> Schema:
    """Returns a schema of objects in objects."""
    schema: Schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


#: Name -> the constraint of a body; the number makes each call another grammar.
HOSTILE: dict[str, Callable[[int], Schema]] = {
    "backtracking": lambda n: {"regex": f"(a+)+b{{{1 + n}}}"},
    "doubling": lambda n: {"regex": f"[ab]*a[ab]{{{30 + n}}}"},
    "long repeat": lambda n: {"regex": f"a{{1,{100_000 + n}}}"},
    "nested repeat": lambda n: {"regex": f"(a{{0,{1000 + n}}}){{0,1000}}"},
    "far": lambda n: {"regex": f".*x.{{{500 + n}}}"},
    "look-ahead": lambda n: {"regex": f"(?=a)b{n}"},
    "long string": lambda n: {"guided_json": {"type": "string", "maxLength": 10**6 + n}},
    "pattern": lambda n: {"guided_json": {"type": "string", "pattern": f"^(ab?){{1,{5000 + n}}}$"}},
    "many items": lambda n: {"guided_json": {"type": "array", "maxItems": 10**6 + n}},
    "least items": lambda n: {"guided_json": {"type": "array", "minItems": 5000 + n}},
    "huge enum": lambda n: {"guided_json": {"enum": [f"v{k}" for k in range(20_000 + n)]}},
    "large enum": lambda n: {"guided_json": {"enum": [f"v{k}" for k in range(4000 + n)]}},
    "deep": lambda n: {"guided_json": deep(70 + n)},
    "nested": lambda n: {"guided_json": deep(25 + n)},
    "itself": lambda n: {"guided_json": {"$ref": "#", "title": str(n)}},
    "remote": lambda n: {"guided_json": {"$ref": f"https://example.org/{n}.json"}},
    "endless rule": lambda n: {"ebnf": f"start: start\nother: /{n}/"},
    "ambiguous": lambda n: {"ebnf": f'root ::= root root | "a" | "{n}"'},
    "many fields": lambda n: {
        "guided_json": {
            "type": "object",
            "properties": {f"p{k}": {"type": "integer"} for k in range(2000 + n)},
        }
    },
}


def ask(url: str, body: Schema) -> tuple[int, float]:
    """Returns the status of an answer, and the seconds it took."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    begin = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    return status, time.monotonic() - begin


async def run(url: str, model: str, streams: int, seconds: float, times: int) -> dict[str, Any]:
    """Returns what the streams and the hostile clients saw."""

    def make_body(rng: Any) -> Schema:
        messages = [{"role": "user", "content": rng.choice(PROMPTS)}]
        return {"model": model, "messages": messages, "max_tokens": 48, "seed": rng.getrandbits(32)}

    path = "/v1/chat/completions"
    await load(url, path, make_body, clients=streams, requests=1)  # every program has run once
    alone = summary(await load(url, path, make_body, clients=streams, seconds=seconds), seconds)
    answers: dict[str, list[tuple[int, float]]] = {name: [] for name in HOSTILE}

    async def attack() -> None:
        for number in range(times):
            for name, make in HOSTILE.items():
                body = {"model": model, "prompt": "x", "max_tokens": 20, **make(number)}
                answers[name].append(await asyncio.to_thread(ask, url, body))

    began, found = time.monotonic(), []
    attacker = asyncio.create_task(attack())
    seed = 1
    while not attacker.done():
        found += await load(url, path, make_body, clients=streams, seconds=5, seed=seed)
        seed += 1
    await attacker
    beside = summary(found, time.monotonic() - began)
    return {"alone": alone, "beside": beside, "answers": answers}


def main() -> None:
    """Runs what the command line asks for."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", default="nano")
    arguments.add_argument("--streams", type=int, default=16)
    arguments.add_argument("--seconds", type=float, default=20)
    arguments.add_argument("--times", type=int, default=3)
    given, options = arguments.parse_known_args()
    process, url = start(given.model, options)
    try:
        name = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
        before = resident_mb(process.pid)
        found = asyncio.run(run(url, name, given.streams, given.seconds, given.times))
        after = wait_idle(url)
        grown = resident_mb(process.pid) - before
        stuck = metrics(url)["deepinfer_grammar_stuck_compiles"]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    answers = found.pop("answers")
    gaps = [found[name]["between_bursts_ms"].get("p99") for name in ("alone", "beside")]
    line = {
        "benchmark": "hostile",
        "model": given.model,
        "streams": given.streams,
        **found,
        "p99_between_ratio": round(gaps[1] / gaps[0], 2),
        "statuses": {name: sorted({status for status, _ in one}) for name, one in answers.items()},
        "slowest_s": {name: round(max(t for _, t in one), 2) for name, one in answers.items()},
        "grown_mb": round(grown, 1),
        "stuck_compiles": stuck,
        "running_after": after["deepinfer_num_requests_running"],
        "exit_code": code,
    }
    print(json.dumps(line))
    every = [pair for one in answers.values() for pair in one]
    is_answered = all(status in (200, 400, 408) and t <= 11 for status, t in every)
    if code or not is_answered or stuck or grown >= 500 or found["beside"]["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
