"""Keys, limits and states: what is refused before anything runs."""

import asyncio
import json
import re

import openai
import pytest

import deepinfer_jax as di
from deepinfer_jax.serve.config import ServerConfig

from .conftest import USER, wait_idle

CHAT = "/v1/chat/completions"
BODY = {"model": "nano", "messages": [USER], "max_tokens": 2}
KEYS = {"api_key": ("right", "other")}
JSON = {"content-type": "application/json"}


def post(path=CHAT, **options):
    async def main(client, service):
        return await client.post(path, **({"json": BODY} | options))

    return main


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic right"}, 401),
        ({"x-api-key": "righ"}, 401),
        ({"x-api-key": "\u00e9".encode()}, 401),
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "right"}, 200),
    ],
)
def test_a_key_is_needed_where_keys_are_set(with_config, headers, status):
    answer = with_config(post(headers=headers), **KEYS)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_refused_keys_have_the_protocols_envelope(with_config):
    answer = with_config(post("/v1/messages"), **KEYS)
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


def test_admin_routes_have_a_key_of_their_own(with_config):
    async def main(client, service):
        statuses = {}
        for path in ("/metrics", "/server_info", "/health", "/health/live", "/version"):
            for key in ("right", "admin"):
                answer = await client.get(path, headers={"x-api-key": key})
                statuses[path, key] = answer.status_code
            assert "right" not in answer.text
            assert "admin" not in answer.text
        return statuses

    found = with_config(main, **KEYS, admin_key="admin")
    assert found["/metrics", "right"] == found["/server_info", "right"] == 401
    assert found["/metrics", "admin"] == found["/server_info", "admin"] == 200
    assert found["/version", "admin"] == 401
    assert found["/health", "admin"] == found["/health/live", "right"] == 200


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ({"content": b"{", "headers": JSON}, 400, "JSON object"),
        ({"content": b"[1]", "headers": JSON}, 400, "got a list"),
        ({"content": b"\xff{}", "headers": JSON}, 400, "UTF-8|JSON"),
        ({"content": b'{"x": NaN}', "headers": JSON}, 400, "JSON"),
        ({"content": b'{"model": "\\ud800"}', "headers": JSON}, 400, "JSON"),
        ({"content": b'{"x":' + b"[" * 200 + b"]" * 200 + b"}", "headers": JSON}, 400, "nested"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "application/json"),
        ({"content": b"{}"}, 415, "none"),
        ({"json": {"x": "y" * 3000}}, 413, "at most 2000 bytes"),
        ({"json": {**BODY, "messages": [USER] * 5}}, 200, ""),
        ({"json": {}}, 400, "model is missing"),
        ({"json": {"model": "nano"}}, 400, "messages is missing"),
        ({"json": {**BODY, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}}, 400,
         "image"),
    ],
)  # fmt: skip
def test_bodies_are_read_within_limits(with_config, options, status, text):
    options = {"json": None} | options
    answer = with_config(post(**options), max_body_bytes=2000)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert re.search(text, answer.json()["error"]["message"])


def test_a_body_without_a_length_is_cut_off_too(with_config):
    async def parts():
        for _ in range(100):
            yield b"x" * 100

    async def main(client, service):
        headers = {"content-type": "application/json"}
        return await client.post(CHAT, content=parts(), headers=headers)

    assert with_config(main, max_body_bytes=2000).status_code == 413


def test_a_body_that_does_not_come_times_out(with_config):
    async def never():
        yield b"{"
        await asyncio.Event().wait()

    async def main(client, service):
        headers = {"content-type": "application/json"}
        return await client.post(CHAT, content=never(), headers=headers)

    assert with_config(main, request_timeout_s=0.05).status_code == 408


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405)],
)
def test_routes_that_are_none_are_answered_in_json(http, method, path, status):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_too_many_completions_are_told_to_come_back(with_config):
    answer = with_config(post(json={**BODY, "n": 5}), max_waiting=0)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["type"] == "rate_limit_error"
    many = {"model": "nano", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}
    assert with_config(post("/v1/completions", json=many), max_waiting=0).status_code == 429


def test_the_official_client_knows_these_refusals(with_config):
    async def refusal(client, **options):
        ours = openai.AsyncOpenAI(
            http_client=client, base_url="http://x/v1", api_key="wrong", max_retries=0
        )
        try:
            await ours.chat.completions.create(**BODY, **options)
        except openai.APIStatusError as error:
            return type(error)

    async def main(client, service):
        return await refusal(client, n=5)

    assert with_config(main, **KEYS) is openai.AuthenticationError
    assert with_config(main, max_waiting=0) is openai.RateLimitError
    assert with_config(main, max_body_bytes=10) is openai.APIStatusError


def test_what_is_not_ready_says_so(with_config):
    async def main(client, service):
        found = []
        for name in ("_is_warm", "_is_draining"):
            before = getattr(service, name)
            setattr(service, name, not before)
            answer = await client.post(CHAT, json=BODY)
            health = await client.get("/health")
            found.append((answer.status_code, answer.json()["error"]["code"], health.status_code))
            assert (await client.get("/health/live")).status_code == 200
            setattr(service, name, before)
        return found

    assert with_config(main) == [(503, "loading", 503), (503, "draining", 503)]


def test_a_step_that_hangs_is_unhealthy(with_config, monkeypatch):
    async def main(client, service):
        monkeypatch.setattr(di.AsyncLLM, "busy_s", 31.0)
        return await client.get("/health"), await client.get("/metrics")

    health, metrics = with_config(main)
    assert health.status_code == 503
    assert "jax_compilations_total" in metrics.text
    assert "num_requests_running" not in metrics.text


def test_an_error_of_our_own_is_500_and_tells_no_details(with_config, monkeypatch):
    async def main(client, service):
        monkeypatch.setattr(type(service), "start", lambda *_: 1 / 0)
        return await client.post(CHAT, json=BODY)

    answer = with_config(main)
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"host": "0.0.0.0"}, "no API key"),
        ({"port": 70000}, "port"),
        ({"api_key": ("",)}, "api_key"),
        ({"drain_seconds": -1}, "drain_seconds"),
        ({"served_model_name": ()}, "served_model_name"),
        ({"heartbeat_s": True}, "heartbeat_s"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(di.ConfigError, match=text):
        ServerConfig(**options)
    assert ServerConfig(host="0.0.0.0", api_key=("k",)).port == 8000
    assert ServerConfig(host="0.0.0.0", insecure=True).port == 8000


def test_deepseeks_own_api_ignores_temperature_with_thinking(with_config):
    async def main(client, service):
        body = {**BODY, "temperature": 0, "seed": 3, "record": True}
        return (await client.post(CHAT, json=body)).json()["deepinfer"]["record"]["request"]

    for parity, temperature in ((False, 0), (True, 1)):
        params = with_config(main, deepseek_api_parity=parity)["params"]
        assert params["temperature"] == temperature


def test_a_deadline_ends_what_takes_longer(with_config):
    body = {**BODY, "max_tokens": 400, "messages": [{"role": "user", "content": "Story!"}]}
    body |= {"ignore_eos": True}
    found = with_config(post(json=body), deadline_s=0.001).json()
    assert found["deepinfer"]["finish_reasons"] == ["deadline"]
    assert found["choices"][0]["finish_reason"] == "length"


def test_abort_ends_a_response_by_its_id(server, http):
    body = {**BODY, "max_tokens": 400, "ignore_eos": True, "request_id": "mine", "stream": True}
    with http.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        again = http.post(CHAT, json=body)
        assert again.status_code == 400
        assert "in use" in again.json()["error"]["message"]
        name = stream.headers["x-request-id"]
        assert name == "chatcmpl-mine"
        assert http.post("/abort", json={"request_id": name}).status_code == 200
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "abort"
    wait_idle(server)
    assert http.post("/abort", json={"request_id": name}).status_code == 404
