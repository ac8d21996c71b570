"""A client that leaves frees what it held, at once; one that does not read as well."""

import asyncio
import json
import random
import socket

import httpx
import pytest

from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.serve.sse import Disconnected, EventStream

from .conftest import RUNTIME, USER, ask_stats, no_leak

LONG = {"model": "nano", "messages": [USER], "max_tokens": 450, "ignore_eos": True}
PATHS = {
    "/v1/chat/completions": LONG,
    "/v1/messages": LONG,
    "/v1/responses": {
        "model": "nano", "input": "hi", "max_output_tokens": 450, "ignore_eos": True,
    },
    "/v1/completions": {
        "model": "nano", "prompt": ["a", "b"], "max_tokens": 450, "ignore_eos": True,
    },
}  # fmt: skip


@pytest.fixture
def log(monkeypatch):
    """What the engine does: ("abort", name), and ("step", names that ended) for each step."""
    entries = []
    abort, step = Engine.abort, Engine.step

    def logged_abort(self, name):
        entries.append(("abort", name))
        return abort(self, name)

    def logged_step(self):
        done = step(self)
        entries.append(("step", [request.request_id for request in done]))
        return done

    monkeypatch.setattr(Engine, "abort", logged_abort)
    monkeypatch.setattr(Engine, "step", logged_step)
    return entries


def steps_until_free(log):
    """Steps from the first abort of each request to the one that returned it."""
    found = []
    for place, (kind, name) in enumerate(log):
        if kind == "abort" and ("abort", name) not in log[:place]:
            steps = [names for what, names in log[place:] if what == "step"]
            found.append(next(n for n, names in enumerate(steps, 1) if name in names))
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_closed_frees_its_slot(server, http, log, path):
    before = server.service.metrics.disconnects
    with no_leak(server), http.stream("POST", path, json=PATHS[path] | {"stream": True}) as stream:
        next(stream.iter_bytes())
    found = steps_until_free(log)
    assert len(found) == (2 if path == "/v1/completions" else 1)
    assert max(found) <= RUNTIME.async_depth + 1
    assert server.service.metrics.disconnects == before + 1


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_hangs_up_on_a_whole_answer_frees_its_slot(server, log, path):
    body = json.dumps(PATHS[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    host, port = server.servers[0].sockets[0].getsockname()
    with no_leak(server), socket.create_connection((host, port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while ask_stats(server).running == 0:
            pass  # every look is a turn of the engine's loop
    assert max(steps_until_free(log)) <= RUNTIME.async_depth + 1


def test_a_stop_string_ends_the_engines_work(server, http, log):
    body = LONG | {"stop": [" "], "thinking": {"type": "disabled"}, "max_tokens": 60}
    with no_leak(server):
        found = http.post("/v1/chat/completions", json=body).json()
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 60
    assert max(steps_until_free(log)) <= RUNTIME.async_depth + 1


def random_disconnects(server, count, seed=0):
    rng = random.Random(seed)

    async def one(client, path, events, pause):
        body = PATHS[path] | {"stream": True, "seed": 1}
        async with client.stream("POST", path, json=body) as stream:
            async for _ in stream.aiter_bytes():
                events -= 1
                if events < 0:
                    return
                await asyncio.sleep(pause)

    async def main():
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=None) as client:
            plans = [(rng.choice(list(PATHS)), rng.randint(0, 6)) for _ in range(count)]
            batch = [one(client, path, events, 0) for path, events in plans]
            for start in range(0, count, 16):
                await asyncio.gather(*batch[start : start + 16])

    with no_leak(server):
        asyncio.run(main())


def test_random_disconnects_leave_nothing(server):
    random_disconnects(server, 24)


@pytest.mark.slow
@pytest.mark.accept(11)
def test_a_thousand_random_disconnects_leave_nothing(server):
    random_disconnects(server, 1000)


def run_stream(parts, send, *, receive=None, stall_s=5.0):
    closed = []

    async def silent():
        await asyncio.Event().wait()

    stream = EventStream(parts, stall_s=stall_s, headers={"x-a": "b"}, close=closed.append)
    asyncio.run(stream({}, receive or silent, send))
    return closed


async def endless():
    while True:
        yield b"x"
        await asyncio.sleep(0)


def test_a_client_that_does_not_read_is_dropped():
    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    (early,) = run_stream(endless(), send, stall_s=0.01)
    assert isinstance(early, Disconnected)
    assert early.is_stall


def test_a_stream_notices_that_nobody_is_there():
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        while len(sent) < 5:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    (early,) = run_stream(endless(), send, receive=receive)
    assert not early.is_stall
    assert (b"x-a", b"b") in sent[0]["headers"]
    assert not any(name == b"content-length" for name, _ in sent[0]["headers"])


def test_a_record_that_takes_long_is_not_lost_to_a_sign_of_life(with_config, monkeypatch):
    to_thread = asyncio.to_thread

    async def slow(work, *arguments):
        for _ in range(50):  # turns of the loop, in which a heartbeat is due
            await asyncio.sleep(1e-3)
        return await to_thread(work, *arguments)

    async def main(client, service):
        monkeypatch.setattr("deepinfer_jax.serve.answers.asyncio.to_thread", slow)
        body = LONG | {"stream": True, "max_tokens": 3, "record": True}
        return (await client.post("/v1/chat/completions", json=body)).text

    text = with_config(main, heartbeat_s=1e-2)
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    found = json.loads(lines[-2].removeprefix("data: "))
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["deepinfer"]["record"]["request"]["params"]["max_tokens"] == 3


def test_a_silent_stream_gives_signs_of_life(with_config):
    async def main(client, service):
        texts = {}
        for path, body in PATHS.items():
            body = body | {"stream": True}
            for name in ("max_tokens", "max_output_tokens"):
                if name in body:
                    body[name] = 40
            texts[path] = (await client.post(path, json=body)).text
        return texts

    texts = with_config(main, heartbeat_s=1e-4)
    assert all(": ping\n\n" in text for path, text in texts.items() if path != "/v1/messages")
    assert texts["/v1/messages"].count("event: ping") > 1
