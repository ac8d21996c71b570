"""Encoders on the tiny tokenizer, which has the DeepSeek spellings at its own ids."""

import pytest

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.loading import read_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="session")
def tools():
    return [WEATHER, ADD]


@pytest.fixture(scope="session")
def encoder(fixtures_dir):
    folder = fixtures_dir / "tiny_v41"
    return ChatEncoder(read_tokenizer(folder), read_config(folder))


@pytest.fixture(scope="session")
def encoder_v4(fixtures_dir, encoder):
    return ChatEncoder(encoder.tokenizer, read_config(fixtures_dir / "tiny_v4"))


@pytest.fixture
def talk(encoder):
    """A conversation with a model that always says the same."""
    from rich.console import Console

    from deepinfer_jax.cli.talk import Talk
    from deepinfer_jax.sampling.params import SamplingParams

    from .test_session import Replay

    replay = Replay(tuple(encoder.tokenizer.encode("why</think>Yes\x1b[2J.").ids))
    return Talk(
        llm=replay, encoder=encoder, params=SamplingParams(seed=1), options={"thinking": True},
        console=Console(stderr=True), is_interactive=False,
    )  # fmt: skip
