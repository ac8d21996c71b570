"""Calls that are promised are made and follow their schemas, in every protocol (io.md 2.8)."""

import json
from dataclasses import replace

import anthropic
import jsonschema
import openai
import pytest

import deepinfer_jax as di
from deepinfer_jax.serve.server import serving

from .conftest import CONFIG, RUNTIME, USER, ask_stats

pytestmark = pytest.mark.accept(11)
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "unit": {"type": ["string", "null"], "enum": ["kelvin", None]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
# Recipe wants a type beside every enum of a strict tool.
CITY["properties"]["city"] |= {"type": "string"}
PING = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "ping": PING}


@pytest.fixture(scope="module")
def roomy(model):
    """A server with room for the declarations of tools."""
    with serving(di.AsyncLLM(model, runtime=replace(RUNTIME, max_len=1024)), CONFIG) as found:
        yield found


@pytest.fixture(scope="module")
def client(roomy):
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def claude(roomy):
    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0) as found:
        yield found


def declared(protocol, strict=True, names=("get_weather", "ping")):
    """Returns the tools as a protocol's clients declare them."""
    if protocol == "messages":
        return [{"name": n, "input_schema": SCHEMAS[n], "strict": strict} for n in names]
    inner = [{"name": n, "parameters": SCHEMAS[n], "strict": strict} for n in names]
    if protocol == "responses":
        return [{"type": "function", **one} for one in inner]
    return [{"type": "function", "function": one} for one in inner]


def by_chat(client, claude, choice, thinks, **options):
    named = {"type": "function", "function": {"name": choice}}
    choice = {"auto": "auto", "required": "required"}.get(choice, named)
    extra = {} if thinks else {"thinking": {"type": "disabled"}}
    asked = {
        "model": "nano", "messages": [USER], "max_tokens": 250, "seed": 4, "temperature": 1.3,
        "tools": declared("chat"), "tool_choice": choice, "extra_body": extra,
    } | options  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    calls = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or ()]
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    streamed = final.message.tool_calls or ()
    assert [(one.function.name, one.function.arguments) for one in streamed] == calls
    assert final.finish_reason == whole.finish_reason == ("tool_calls" if calls else "stop")
    return calls, whole.message.content, getattr(whole.message, "reasoning_content", None)


def by_responses(client, claude, choice, thinks, **options):
    choice = {"auto": "auto", "required": "required"}.get(
        choice, {"type": "function", "name": choice}
    )
    reasoning = {} if thinks else {"reasoning": {"effort": "none"}}
    asked = {
        "model": "nano", "input": "hi", "max_output_tokens": 250, "temperature": 1.3,
        "tools": declared("responses"), "tool_choice": choice, "extra_body": {"seed": 4},
    } | reasoning | options  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    said = whole.tool_choice
    assert said == choice or said.model_dump() == choice
    assert whole.parallel_tool_calls == asked.get("parallel_tool_calls", True)
    items = [one for one in whole.output if one.type == "function_call"]
    calls = [(one.name, one.arguments) for one in items]
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.parallel_tool_calls == whole.parallel_tool_calls
    assert [(one.name, one.arguments) for one in final.output if one.type == "function_call"] == (
        calls
    )
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == "".join(arguments for _, arguments in calls)
    reasoned = [one for one in whole.output if one.type == "reasoning"]
    return calls, whole.output_text, reasoned


def by_messages(client, claude, choice, thinks, **options):
    choice = {"auto": {"type": "auto"}, "required": {"type": "any"}}.get(
        choice, {"type": "tool", "name": choice}
    )
    if options.pop("parallel_tool_calls", True) is False:
        choice["disable_parallel_tool_use"] = True
    extra = {"seed": 4, "temperature": 1.3}
    if not thinks:
        extra["thinking"] = {"type": "disabled"}
    asked = {
        "model": "nano", "messages": [USER], "max_tokens": 250, "tool_choice": choice,
        "tools": declared("messages"), "extra_body": extra,
    } | options  # fmt: skip
    whole = claude.messages.create(**asked)
    blocks = [one for one in whole.content if one.type == "tool_use"]
    calls = [(one.name, json.dumps(one.input)) for one in blocks]
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [(one.name, json.dumps(one.input)) for one in final.content if one.type == "tool_use"] \
        == calls  # fmt: skip
    assert whole.stop_reason == final.stop_reason == ("tool_use" if calls else "end_turn")
    text = "".join(one.text for one in whole.content if one.type == "text")
    return calls, text, [one for one in whole.content if one.type == "thinking"]


PROTOCOLS = [by_chat, by_responses, by_messages]


def check(calls, names=("get_weather", "ping")):
    for name, arguments in calls:
        assert name in names
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_the_first_constrained_request_waits_for_no_compilation(roomy, client):
    before = roomy.service.metrics.compilations
    assert ask_stats(roomy).grammar.compiled == 1  # the server's own, which reads the vocabulary
    by_chat(client, None, "required", False)
    assert ask_stats(roomy).grammar.compiled == 2
    assert roomy.service.metrics.compilations == before


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("ask", PROTOCOLS)
def test_a_required_call_is_made(client, claude, ask, thinks):
    calls, text, reasoning = ask(client, claude, "required", thinks)
    assert calls
    check(calls)
    assert not (text or "").strip()
    assert bool(reasoning) == thinks


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("ask", PROTOCOLS)
def test_the_named_tool_is_called(client, claude, ask, thinks):
    name = "ping" if thinks else "get_weather"
    calls, _, _ = ask(client, claude, name, thinks, parallel_tool_calls=False)
    assert [called for called, _ in calls] == [name]
    check(calls)


@pytest.mark.parametrize("ask", PROTOCOLS)
def test_strict_tools_leave_the_choice_and_bind_the_call(client, claude, ask):
    calls, text, _ = ask(client, claude, "auto", False)
    check(calls)
    assert calls or text


def test_tools_that_are_not_strict_are_called_too(client, claude):
    odd = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}
    odd |= {"required": ["a"], "minProperties": 1}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    calls, _, _ = by_chat(client, claude, "required", False, tools=tools)
    assert calls
    assert all(isinstance(json.loads(arguments)["a"], int) for _, arguments in calls)
    tools[0]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError):
        by_chat(client, claude, "required", False, tools=tools)


def test_what_messages_cannot_enforce_is_refused_by_its_place(claude):
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"name": "odd", "input_schema": odd, "strict": True}]
    asked = {"model": "nano", "messages": [USER], "max_tokens": 50}
    with pytest.raises(anthropic.BadRequestError, match=r"uniqueItems.*odd.*, /properties/a"):
        claude.messages.create(**asked, tools=tools)
    with pytest.raises(anthropic.BadRequestError, match="strict must be true or false"):
        claude.messages.create(**asked, tools=[tools[0] | {"strict": "yes"}])


def test_two_constraints_are_one_too_many(client):
    asked = {"model": "nano", "messages": [USER], "max_tokens": 50}
    extra = {"regex": "[0-9]{3}", "thinking": {"type": "disabled"}}
    with pytest.raises(openai.BadRequestError, match="give one"):
        client.chat.completions.create(**asked, tools=declared("chat"), extra_body=extra)
    free = declared("chat", strict=False)
    answer = client.chat.completions.create(
        **asked, tools=free, extra_body=extra, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.content) == 3


def test_all_calls_can_be_bound(with_config):
    async def main(client, service):
        body = {"model": "nano", "messages": [USER], "max_tokens": 10, "seed": 1}
        body["tools"] = declared("chat", strict=False)
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        return (await service.stats()).grammar.compiled

    free = with_config(main)
    assert with_config(main, tool_grammar="auto") == free + 1


def test_usage_counts_the_prompt_that_was_read(claude):
    asked = {
        "model": "nano", "messages": [USER], "tools": declared("messages"),
        "tool_choice": {"type": "any"},
    }  # fmt: skip
    count = claude.messages.count_tokens(**asked).input_tokens
    usage = claude.messages.create(**asked, max_tokens=200).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
