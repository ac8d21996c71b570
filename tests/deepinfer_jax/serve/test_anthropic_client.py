"""The official `anthropic` client against a real server (H1, io.md 7 gate 11)."""

import inspect

import anthropic
import pytest

from .conftest import USER, WEATHER

TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def send(client, **options):
    options = {"model": "nano", "messages": [USER], "max_tokens": 60} | options
    extra = {"seed": 5} | options.pop("extra_body", {})
    return client.messages.create(**options, extra_body=extra)


def test_stream_adds_up_to_the_message(client):
    whole = send(client)
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text"]
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.output_tokens > 0
    with client.messages.stream(
        model="nano", messages=[USER], max_tokens=60, extra_body={"seed": 5}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[1].text
    assert [block.type for block in final.content] == kinds
    assert final.content[0].thinking == whole.content[0].thinking
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.deepinfer["seed"] == 5


def test_system_turns_and_thinking_off(client):
    turns = [USER, {"role": "assistant", "content": "Hello."}, USER]
    found = send(client, system="Be brief.", messages=turns, thinking={"type": "disabled"})
    assert [block.type for block in found.content] == ["text"]


def test_stop_sequence_is_reported(client):
    whole = send(client, thinking={"type": "disabled"}).content[0].text
    word = whole.split()[1]
    found = send(client, thinking={"type": "disabled"}, stop_sequences=[word])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert found.content[0].text == whole[: whole.index(word)]


def test_tools_and_their_results_are_read(client):
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
    turns = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    found = send(client, tools=[TOOL], messages=turns)
    assert found.content
    count = client.messages.count_tokens(model="nano", messages=turns, tools=[TOOL])
    usage = found.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_thinking_budget_is_said_to_be_no_limit(client):
    found = client.messages.with_raw_response.create(
        model="nano", messages=[USER], max_tokens=8,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    assert "budget_tokens is not enforced" in found.headers["x-deepinfer-warnings"]


def test_output_format_constrains_the_answer(client):
    form = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}}
    if "output_config" not in inspect.signature(client.messages.create).parameters:
        form = {"extra_body": form}  # a client of 2025
    found = send(client, thinking={"type": "disabled"}, max_tokens=150, **form)
    assert found.content[0].text.startswith("{")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "no model is named"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"max_tokens": 600}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "temperature"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
         anthropic.BadRequestError, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"extra_body": {"top_k": -5}}, anthropic.BadRequestError, "top_k"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_envelope(client, options, kind, text):
    with pytest.raises(kind, match=text) as found:
        send(client, **options)
    assert found.value.body["type"] == "error"
    assert found.value.body["error"]["type"] in ("invalid_request_error", "not_found_error")
