"""A real server on nano, and applications with other options around the same model."""

import asyncio
import contextlib
from dataclasses import replace

import httpx
import pytest

import deepinfer_jax as di
from deepinfer_jax.serve.app import make_app
from deepinfer_jax.serve.config import ServerConfig
from deepinfer_jax.serve.server import serving
from deepinfer_jax.serve.service import Service

RUNTIME = di.RuntimeConfig(
    max_seqs=4, max_tokens_per_step=32, max_len=512, block_tokens=16, warm_grammars=True
)
CONFIG = ServerConfig(port=0, served_model_name=("nano", "deepseek-chat"), max_waiting=64)
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@pytest.fixture(scope="session")
def model():
    return di.load("nano")


@pytest.fixture(scope="session")
def server(model):
    with serving(di.AsyncLLM(model, runtime=RUNTIME), CONFIG) as found:
        yield found


@pytest.fixture(scope="session")
def llm(server):
    """The model behind the server, for whom tokens and texts are compared with."""
    return server.service.llm


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture
def ask(http):
    """Posts a body for nano and returns (status, JSON)."""

    def post(path, body, **options):
        answer = http.post(path, json={"model": "nano", **body}, **options)
        return answer.status_code, answer.json()

    return post


def in_process(llm, config, main):
    """Returns what `main(client, service)` returns, of an application without a socket."""

    async def session():
        service = Service(llm, config)
        await service.warm_up()
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            try:
                return await main(client, service)
            finally:
                service.metrics.close()

    return asyncio.run(session())


@pytest.fixture
def with_config(llm):
    """Runs `main(client, service)` against an application with other options."""
    return lambda main, **changes: in_process(llm, replace(CONFIG, **changes), main)


@contextlib.contextmanager
def no_leak(server):
    """Checks that whatever runs inside leaves no request, slot or block behind."""
    yield
    wait_idle(server)


def wait_idle(server, steps=3000):
    """Waits until nothing runs; each look at the engine is a turn of its loop."""
    for _ in range(steps):
        stats = ask_stats(server)
        if not (server.service.live or server.service.llm._calls):
            break
    assert not server.service.live
    assert (stats.running, stats.waiting, stats.cache.referenced) == (0, 0, 0)
    return stats


def ask_stats(server):
    """Returns the engine's counters."""
    return asyncio.run(server.service.llm.stats())
