"""Starting, draining and measuring a whole server."""

import asyncio
import re
import signal
import socket
import threading
from dataclasses import replace

import httpx
import pytest

import deepinfer_jax as di
from deepinfer_jax.serve.server import Server, serving
from deepinfer_jax.serve.service import Service

from .conftest import CONFIG, RUNTIME, USER, wait_idle

CHAT = "/v1/chat/completions"
LONG = {"model": "nano", "messages": [USER], "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture
def another(llm, monkeypatch):
    """Makes more servers of the same model, which stays open."""

    async def keep(self):
        self.metrics.close()

    monkeypatch.setattr(Service, "close", keep)
    return lambda **changes: serving(llm, replace(CONFIG, **changes))


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(another):
    with another() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", CHAT, json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            while server.service.state != "draining":
                pass
            refused = httpx.post(server.url + CHAT, json=LONG, timeout=60)
            rest = [line for line in lines if line]
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert rest[-1] == "data: [DONE]"
    assert server.should_exit
    assert not server.service.live


def test_what_does_not_end_in_time_is_aborted(another):
    with (
        another(drain_seconds=0) as server,
        httpx.stream("POST", server.url + CHAT, json=LONG, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        rest = [line for line in lines if line]
    assert '"code":"abort"' in rest[-1]
    wait_idle(server)


def test_a_port_in_use_is_said(server, llm, another):
    port = server.servers[0].sockets[0].getsockname()[1]
    with pytest.raises(di.ConfigError, match="must be able to listen"), another(port=port):
        pass


def test_an_engine_that_cannot_be_made_ends_the_server(model):
    small = replace(RUNTIME, cache_bytes=1)
    with pytest.raises(di.CapacityError), serving(di.AsyncLLM(model, runtime=small), CONFIG):
        pass


def test_no_thread_is_left_behind(another):
    before = set(threading.enumerate())
    with another() as server:
        assert server.url.startswith("http://127.0.0.1:")
    left = set(threading.enumerate()) - before
    assert not [one for one in left if one.name == "serve"]


HEAD = b"GET /version HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_client_that_is_slow_with_its_headers_is_hung_up_on(server, monkeypatch, sent):
    monkeypatch.setattr("deepinfer_jax.serve.server._HEADERS_S", 0.2)
    place = server.servers[0].sockets[0].getsockname()
    with socket.create_connection(place, timeout=60) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(4096):  # until the server closes
            received += part
    assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")


def test_what_is_no_http_is_refused(server):
    place = server.servers[0].sockets[0].getsockname()
    with socket.create_connection(place, timeout=60) as connection:
        connection.sendall(b"\x16\x03\x01garbage\r\n\r\n")
        assert b"400 Bad Request" in connection.recv(4096)


def values(text):
    """Reads Prometheus text; every line must be legal."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# TYPE [a-z0-9_:]+ (counter|gauge|histogram)", line), line
            continue
        match = re.fullmatch(r"([a-z0-9_:]+(?:\{[a-z_]+=\"[^\"]*\"\})?) (\S+)", line)
        assert match, line
        assert match[1] not in found
        found[match[1]] = float(match[2])
    return found


def test_metrics_are_what_happened(with_config):
    async def main(client, service):
        async def read():
            return values((await client.get("/metrics")).text)

        async def ask():
            answers = []
            for options in ({"stream": False}, {"n": 2, "max_tokens": 3}, {"stop": [" "]}):
                body = {"model": "nano", "messages": [USER], "max_tokens": 6, "seed": 1} | options
                answers.append((await client.post(CHAT, json=body)).json())
            return answers

        for _ in range(2):  # with what earlier tests cached, then without: compiled by now
            await ask()
            await service.llm.replace_params(service.llm.model.params)
        before = await read()
        answers = await ask()
        await client.post(CHAT, json={})
        await service.llm.replace_params(service.llm.model.params)  # the last steps are over
        return before, answers, await read()

    before, answers, after = with_config(main)

    def grown(name):
        return after[f"deepinfer_{name}"] - before.get(f"deepinfer_{name}", 0)

    usages = [answer["usage"] for answer in answers]
    assert grown("prompt_tokens_total") == sum(one["prompt_tokens"] for one in usages)
    assert grown("generation_tokens_total") >= sum(one["completion_tokens"] for one in usages)
    assert grown('http_responses_total{status="200"}') == len(answers) + 1
    assert grown('http_responses_total{status="400"}') == 1
    for name in ("time_to_first_token", "e2e_request_latency", "queue_time"):
        assert grown(f"{name}_seconds_count") == len(answers)
        assert grown(f'{name}_seconds_bucket{{le="+Inf"}}') == len(answers)
    ended = [name for name in after if name.startswith("deepinfer_request_success_total")]
    assert sum(after[name] - before.get(name, 0) for name in ended) == 4
    assert grown("jax_compilations_total") == 0
    assert after["deepinfer_num_requests_running"] == after["deepinfer_num_requests_waiting"] == 0
    assert after["deepinfer_engine_requests_total"] >= 3


@pytest.mark.parametrize("is_alone", [True, False])
def test_only_a_process_that_does_nothing_else_hides_its_objects(llm, monkeypatch, is_alone):
    """In a notebook objects that are there must stay collectable."""
    called = []

    async def nothing():
        return None

    monkeypatch.setattr("deepinfer_jax.serve.memory.gc.freeze", lambda: called.append("freeze"))
    monkeypatch.setattr(Server, "url", "here")
    server = Server(llm, CONFIG, called.append, is_alone=is_alone)
    monkeypatch.setattr(server.service, "warm_up", nothing)
    asyncio.run(server._warm_up())
    server.service.metrics.close()
    assert called[0] == "compiling what the engine can need"
    assert called[1:-1] == ["freeze"] * is_alone
    assert called[-1].startswith("ready at here")
