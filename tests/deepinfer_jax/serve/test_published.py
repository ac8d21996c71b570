"""A server at the 129,280 ids of the published tokenizer (io.md 7, gates 5, 9, 12, 13 and 14).

Its network is small and has random weights, so nothing depends on what it says: the end of
reasoning is made likely, and formats come from grammars.
"""

import json
import random
from dataclasses import replace

import anthropic
import httpx
import jsonschema
import openai
import pytest

import deepinfer_jax as di
from deepinfer_jax.serve.server import serving
from tests.e2e import published

from .conftest import CONFIG, RUNTIME, in_process, no_leak
from .test_constraints import HOSTILE, REFUSED, SCHEMA, hostile
from .test_disconnect import random_disconnects
from .test_fuzz import MUTATIONS, anything, fuzz
from .test_tools import SCHEMAS, declared

pytestmark = [pytest.mark.slow, pytest.mark.accept(11)]
#: Ends the reasoning soon; a grammar that binds allows it nowhere.
SOON = {"logit_bias": {"128822": 8.0}, "seed": 3}
USER = {"role": "user", "content": "hi \uff5cDSML\uff5c <think> </think> 北京"}


@pytest.fixture(scope="module")
def server():
    runtime = replace(RUNTIME, max_len=1024, max_seqs=16, drafting=True)
    with serving(di.AsyncLLM(published.model(), runtime=runtime), CONFIG) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def by_chat(client, claude, thinks, form, **options):
    extra = SOON | ({} if thinks else {"thinking": {"type": "disabled"}}) | form
    found = client.chat.completions.create(
        model="nano", messages=[USER], max_tokens=300, extra_body=extra, **options
    )
    message = found.choices[0].message
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    reasoned = getattr(message, "reasoning_content", None)
    return found.choices[0].finish_reason, reasoned, message.content, calls


def by_responses(client, claude, thinks, form, **options):
    reasoning = {} if thinks else {"reasoning": {"effort": "none"}}
    found = client.responses.create(
        model="nano", input=[USER], max_output_tokens=300, extra_body=SOON | form,
        **reasoning, **options,
    )  # fmt: skip
    items = {one.type: one for one in found.output}
    reasoned = items["reasoning"].content[0].text if "reasoning" in items else None
    calls = [(one.name, one.arguments) for one in found.output if one.type == "function_call"]
    reason = {"completed": "stop"}.get(found.status, found.status)
    return reason if not calls else "tool_calls", reasoned, found.output_text, calls


def by_messages(client, claude, thinks, form, **options):
    extra = SOON | ({} if thinks else {"thinking": {"type": "disabled"}}) | form
    found = claude.messages.create(
        model="nano", messages=[USER], max_tokens=300, extra_body=extra, **options
    )
    blocks = {one.type: one for one in found.content}
    reasoned = blocks["thinking"].thinking if "thinking" in blocks else None
    calls = [(one.name, json.dumps(one.input)) for one in found.content if one.type == "tool_use"]
    reason = {"end_turn": "stop", "tool_use": "tool_calls"}.get(found.stop_reason)
    return reason, reasoned, "".join(o.text for o in found.content if o.type == "text"), calls


PROTOCOLS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reasoning_is_free_and_the_answer_is_not(client, claude, protocol, thinks):
    ask = PROTOCOLS[protocol]
    choice = {"structured_outputs": {"choice": ["red", "北京 🎉"]}}
    reason, reasoning, text, _ = ask(client, claude, thinks, choice)
    assert reason == "stop"
    assert bool(reasoning) == thinks
    assert text.strip() in ("red", "北京 🎉")
    _, _, text, _ = ask(client, claude, thinks, {"guided_json": SCHEMA})
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_strict_tool_is_called_as_required(client, claude, protocol, thinks):
    required = {"type": "any"} if protocol == "messages" else "required"
    single = {"parallel_tool_calls": False}
    if protocol == "messages":
        single, required = {}, {"type": "any", "disable_parallel_tool_use": True}
    options = {"tools": declared(protocol), "tool_choice": required} | single
    reason, _, _, calls = PROTOCOLS[protocol](client, claude, thinks, {}, **options)
    assert reason == "tool_calls"
    ((name, arguments),) = calls
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_special_tokens_in_a_text_are_text(http):
    body = {"model": "nano", "messages": [USER], "max_tokens": 1, "return_token_ids": True}
    found = http.post("/v1/chat/completions", json=body).json()["deepinfer"]["prompt_token_ids"]
    special = [one for one in found if one >= 128_000 or one <= 2]
    assert special == [0, 128_799, 128_803, 128_804, 128_821]


def test_every_hostile_constraint_is_answered_beside_others(server, http):
    before = server.service.llm
    found = hostile(server, http, HOSTILE)
    assert set(found.values()) <= {200, 400, 408}
    assert all(found[name] == 400 for name in REFUSED)
    assert before.failure is None


def test_random_disconnects_leave_nothing(server):
    random_disconnects(server, 100)


def test_constrained_clients_that_leave_take_nothing_along(server, http):
    rng = random.Random(5)
    forms = [{"guided_json": SCHEMA}, {"regex": "[a-z]{400}"}, {"so_args": {
        "schema_type": "regex", "schema": "[0-9]{300}", "trigger_token_ids": [5]}}]  # fmt: skip
    with no_leak(server):
        for number in range(24):
            body = {"model": "nano", "messages": [USER], "max_tokens": 400, "stream": True}
            # Every second grammar is new, so that some leave while theirs is compiled.
            form = {"regex": f"[a-z]{{{300 + number}}}"} if number % 2 else rng.choice(forms)
            with http.stream("POST", "/v1/chat/completions", json=body | form) as stream:
                pieces = stream.iter_bytes()
                for _ in range(rng.randint(0, 4)):
                    next(pieces, None)


@pytest.mark.parametrize(("mutations", "count"), [(MUTATIONS, 1500), ((anything,), 500)])
def test_malformed_bodies_are_refused(server, mutations, count):
    def with_config(main):
        return in_process(server.service.llm, CONFIG, main)

    assert len(fuzz(with_config, count, mutations, 9)) == count


def test_counters_are_those_of_the_answers(server, http):
    from prometheus_client.parser import text_string_to_metric_families

    def read():
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {s.name: s.value for one in families for s in one.samples if not s.labels}

    before = read()
    usages = []
    for number in range(3):
        body = {"model": "nano", "messages": [USER], "max_tokens": 5 + number, "ignore_eos": True}
        usages.append(http.post("/v1/chat/completions", json=body | SOON).json()["usage"])
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["deepinfer_prompt_tokens_total"] == sum(one["prompt_tokens"] for one in usages)
    made = sum(one["completion_tokens"] for one in usages)  # end tokens are not counted there
    assert grown["deepinfer_generation_tokens_total"] == 18 >= made
    assert grown["deepinfer_jax_compilations_total"] == 0
