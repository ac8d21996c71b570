"""Constraints through all protocols, with and without reasoning; hostile ones harm nobody else."""

import json
import threading

import pytest

from .conftest import USER, no_leak

CHOICES = {"structured_outputs": {"choice": ["red", "blue"]}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
COMMON = {"model": "nano", "seed": 3}


def chat(ask, thinking, constraint):
    off = {} if thinking else {"thinking": {"type": "disabled"}}
    body = {"messages": [USER], "max_tokens": 150, "seed": 3, **off, **constraint}
    status, found = ask("/v1/chat/completions", body)
    assert status == 200, found
    choice = found["choices"][0]
    message = choice["message"]
    return choice["finish_reason"], message.get("reasoning_content"), message["content"], found


def messages(ask, thinking, constraint):
    off = {} if thinking else {"thinking": {"type": "disabled"}}
    body = {"messages": [USER], "max_tokens": 150, "seed": 3, **off, **constraint}
    status, found = ask("/v1/messages", body)
    assert status == 200, found
    texts = {block["type"]: block for block in found["content"]}
    reason = {"end_turn": "stop"}.get(found["stop_reason"], found["stop_reason"])
    return reason, texts.get("thinking", {}).get("thinking"), texts["text"]["text"], found


def responses(ask, thinking, constraint):
    off = {} if thinking else {"reasoning": {"effort": "none"}}
    body = {"input": "hi", "max_output_tokens": 150, "seed": 3, **off, **constraint}
    status, found = ask("/v1/responses", body)
    assert status == 200, found
    items = {item["type"]: item for item in found["output"]}
    reasoning = items.get("reasoning", {}).get("content", [{}])[0].get("text")
    reason = {"completed": "stop"}.get(found["status"], found["status"])
    return reason, reasoning, items["message"]["content"][0]["text"], found


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("send", [chat, messages, responses])
def test_reasoning_is_free_and_the_answer_is_not(ask, send, thinking):
    reason, reasoning, text, _ = send(ask, thinking, CHOICES)
    assert reason == "stop"
    assert bool(reasoning) == thinking
    assert text.strip() in ("red", "blue")


@pytest.mark.parametrize(
    ("send", "form"),
    [
        (chat, {"response_format": {"type": "json_schema",
                                    "json_schema": {"name": "x", "schema": SCHEMA}}}),
        (messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (responses, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        (chat, {"guided_json": SCHEMA}),
        (chat, {"json_schema": json.dumps(SCHEMA)}),
        (chat, {"so_args": {"schema_type": "json", "schema": SCHEMA}}),
    ],
)  # fmt: skip
def test_a_schema_is_kept_under_every_name(ask, send, form):
    reason, _, text, _ = send(ask, False, form)
    assert reason == "stop"
    assert json.loads(text)["n"] in (1, 2)


def test_a_prefix_goes_on_constrained(ask):
    turns = [USER, {"role": "assistant", "content": "My answer is ", "prefix": True}]
    _, _, text, _ = chat(ask, False, CHOICES | {"messages": turns})
    assert text in ("red", "blue")


def test_raw_prompts_are_bound_from_the_first_token(ask):
    for constraint, legal in (
        ({"regex": "[ab]{3}c"}, {a + b + c + "c" for a in "ab" for b in "ab" for c in "ab"}),
        ({"ebnf": 'root ::= "x" | "yy"'}, {"x", "yy"}),
        ({"guided_grammar": 'start: "x" | "yy"'}, {"x", "yy"}),
    ):
        body = {"prompt": "Once", "max_tokens": 40, "temperature": 1.5, "seed": 1}
        status, found = ask("/v1/completions", body | constraint)
        assert status == 200
        assert found["choices"][0]["text"] in legal


def test_what_cannot_be_enforced_is_refused_or_named(ask):
    odd = SCHEMA | {"if": {}, "then": {}}
    body = {"messages": [USER], "max_tokens": 60, "thinking": {"type": "disabled"}}
    status, found = ask("/v1/chat/completions", body | {"guided_json": odd})
    assert status == 400
    assert "if" in found["error"]["message"]
    status, found = ask("/v1/chat/completions", body | {"guided_json": odd, "strict": False})
    assert status == 200
    assert any("if" in text for text in found["deepinfer"]["warnings"])


def test_a_stream_that_is_refused_says_why(http):
    body = {"model": "nano", "messages": [USER], "stream": True, "guided_json": {"not": {}}}
    lines = [line for line in http.post("/v1/chat/completions", json=body).text.split("\n") if line]
    assert "not" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]


DEEP = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
HOSTILE = {
    "backtracking": {"regex": "(a+)+b"},
    "doubling": {"regex": "[ab]*a[ab]{30}"},
    "long repeat": {"regex": "a{1,100000}"},
    "nested repeat": {"regex": "(a{0,1000}){0,1000}"},
    "far": {"regex": ".*x.{500}"},
    "look-ahead": {"regex": "(?=a)b"},
    "broken regex": {"regex": "(a"},
    "long string": {"guided_json": {"type": "string", "maxLength": 10**6}},
    "many items": {"guided_json": {"type": "array", "maxItems": 10**6}},
    "pattern": {"guided_json": {"type": "string", "pattern": "^(ab?){1,5000}$"}},
    "huge enum": {"guided_json": {"enum": [f"v{n}" for n in range(20000)]}},
    "deep": {"guided_json": DEEP},
    "itself": {"guided_json": {"$ref": "#"}},
    "remote": {"guided_json": {"$ref": "https://example.org/x.json"}},
    "endless rule": {"ebnf": "start: start"},
    "ambiguous": {"ebnf": 'root ::= root root | "a"'},
    "undefined": {"ebnf": "root ::= other"},
    "no start": {"ebnf": 'x ::= "a"'},
    "many fields": {"guided_json": {"type": "object", "properties": {
        f"p{n}": {"type": "integer"} for n in range(2000)}}},
}  # fmt: skip


def hostile(server, http, names):
    """Sends hostile constraints while streams run; returns the status of each."""
    body = {"model": "nano", "messages": [USER], "max_tokens": 100, "ignore_eos": True, "seed": 1}
    texts, stop = [], threading.Event()

    def stream():
        while not stop.is_set():
            answer = http.post("/v1/chat/completions", json=body)
            texts.append(answer.json()["choices"][0]["message"])

    with no_leak(server):
        streams = [threading.Thread(target=stream) for _ in range(2)]
        for thread in streams:
            thread.start()
        found = {}
        for name in names:
            attack = {"model": "nano", "prompt": "x", "max_tokens": 20, **HOSTILE[name]}
            answer = http.post("/v1/completions", json=attack)
            found[name] = answer.status_code
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        stop.set()
        for thread in streams:
            thread.join()
    assert all(text == texts[0] for text in texts)
    return found


REFUSED = {"look-ahead", "broken regex", "huge enum", "deep", "remote", "undefined", "no start"}


def test_hostile_constraints_are_answered_beside_others(server, http):
    names = ("doubling", "nested repeat", "look-ahead", "huge enum", "deep", "remote", "no start")
    found = hostile(server, http, names)
    assert set(found.values()) <= {200, 400}
    assert all(found[name] == 400 for name in names if name in REFUSED)


@pytest.mark.slow
@pytest.mark.accept(11)
def test_every_hostile_constraint_is_answered_beside_others(server, http):
    found = hostile(server, http, HOSTILE)
    assert set(found.values()) <= {200, 400, 408}
    assert all(found[name] == 400 for name in REFUSED)
