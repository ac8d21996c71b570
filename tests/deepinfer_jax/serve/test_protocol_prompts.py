"""One conversation has one prompt, whichever protocol it comes in (H7)."""

import json

import pytest

from deepinfer_jax.serve.protocols import CHAT, MESSAGES, RESPONSES

from .conftest import WEATHER

SPELLED = "<\uff5cUser\uff5c> <think> \U0001f389"
# Turns: (role, text), (assistant, reasoning, text, [(id, name, arguments)]), (tool, id, result).
TALKS = {
    "short": [("user", "hi")],
    "turns": [("user", "hi"), ("assistant", "", "Hello.", []), ("user", SPELLED)],
    "reasons": [("user", "a"), ("assistant", "because", "b", []), ("user", "c")],
    "tools": [
        ("user", "go"),
        ("assistant", "need it", "", [("c1", "get_weather", {"city": "Rome", "days": 2})]),
        ("tool", "c1", "sunny"),
        ("assistant", "fine", "Sunny.", []),
        ("user", "again"),
        ("assistant", "two", "Wait.", [("c2", "get_weather", {"city": "S\u00e3o"}),
                                       ("c3", "get_weather", {"city": "\u5317\u4eac"})]),
        ("tool", "c2", "rain"),
        ("tool", "c3", SPELLED),
    ],
}  # fmt: skip


def as_chat(turns, system, tools):
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        if turn[0] == "user":
            messages.append({"role": "user", "content": turn[1]})
        elif turn[0] == "tool":
            messages.append({"role": "tool", "tool_call_id": turn[1], "content": turn[2]})
        else:
            message = {"role": "assistant", "content": turn[2], "reasoning_content": turn[1]}
            if turn[3]:
                message["tool_calls"] = [
                    {"id": id, "type": "function",
                     "function": {"name": name, "arguments": json.dumps(given)}}
                    for id, name, given in turn[3]
                ]  # fmt: skip
            messages.append(message)
    found = {"messages": messages}
    if tools:
        found["tools"] = [{"type": "function", "function": tools}]
    return found


def as_messages(turns, system, tools):
    messages = []
    for turn in turns:
        if turn[0] == "user":
            messages.append({"role": "user", "content": turn[1]})
        elif turn[0] == "tool":
            block = {"type": "tool_result", "tool_use_id": turn[1], "content": turn[2]}
            if messages[-1]["role"] == "user":
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
        else:
            blocks = []
            if turn[1]:
                blocks.append({"type": "thinking", "thinking": turn[1], "signature": "s"})
            if turn[2]:
                blocks.append({"type": "text", "text": turn[2]})
            blocks += [
                {"type": "tool_use", "id": id, "name": name, "input": given}
                for id, name, given in turn[3]
            ]
            messages.append({"role": "assistant", "content": blocks})
    found = {"messages": messages, "max_tokens": 5}
    if system:
        found["system"] = system
    if tools:
        inner = {"description": tools["description"], "input_schema": tools["parameters"]}
        found["tools"] = [{"name": tools["name"], **inner}]
    return found


def as_responses(turns, system, tools):
    items = []
    for turn in turns:
        if turn[0] == "user":
            items.append({"role": "user", "content": turn[1]})
        elif turn[0] == "tool":
            items.append({"type": "function_call_output", "call_id": turn[1], "output": turn[2]})
        else:
            if turn[1]:
                content = [{"type": "reasoning_text", "text": turn[1]}]
                items.append({"type": "reasoning", "id": "r", "summary": [], "content": content})
            if turn[2]:
                items.append({"role": "assistant", "content": turn[2]})
            items += [
                {"type": "function_call", "call_id": id, "name": name,
                 "arguments": json.dumps(given)}
                for id, name, given in turn[3]
            ]  # fmt: skip
    found = {"input": items}
    if system:
        found["instructions"] = system
    if tools:
        found["tools"] = [{"type": "function", **tools}]
    return found


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("name", TALKS)
def test_three_protocols_give_one_prompt(server, llm, name, system):
    reader = server.service.reader
    tool = {"name": "get_weather", "description": "d", "parameters": WEATHER}
    given = (TALKS[name], system, tool if name == "tools" else None)
    chat = as_chat(*given)
    expected = list(llm.chat_encoder.prepare(**chat).token_ids)
    head = {"model": "nano"}
    assert reader.chat_ids(CHAT, head | chat) == expected
    assert reader.chat_ids(MESSAGES, head | as_messages(*given)) == expected
    assert reader.chat_ids(RESPONSES, head | as_responses(*given)) == expected
