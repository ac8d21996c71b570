"""The official `openai` client against a real server (H1, io.md 7 gate 11)."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from .conftest import USER, WEATHER

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client, **options):
    options = {"model": "nano", "messages": [USER], "max_tokens": 24, "seed": 5} | options
    return client.chat.completions.create(**options)


def test_stream_adds_up_to_the_answer(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == whole.choices[0].message.reasoning_content
    assert reasoning
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    assert chunks[-1].deepinfer["seed"] == whole.deepinfer["seed"] == 5


def test_the_stream_helper_gives_the_same_message(client):
    whole = chat(client)
    with client.chat.completions.stream(
        model="nano", messages=[USER], max_tokens=24, seed=5
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_a_seed_repeats_and_is_reported(client):
    free = chat(client, seed=None, temperature=2.0, messages=STORY)
    seed = free.deepinfer["seed"]
    again = chat(client, seed=seed, temperature=2.0, messages=STORY)
    assert again.choices[0].message == free.choices[0].message
    assert again.system_fingerprint == free.system_fingerprint
    assert again.system_fingerprint.startswith("di-")


def test_record_holds_the_request_and_its_tokens(client, llm):
    extra = {"record": True, "return_token_ids": True}
    found = chat(client, extra_body=extra, n=2).deepinfer
    record = found["record"]
    assert record["request"]["prompt_token_ids"] == found["prompt_token_ids"]
    assert record["request"]["params"]["seed"] == 5
    assert [one["token_ids"] for one in record["outputs"]] == found["token_ids"]
    prompt = llm.chat_encoder.prepare([USER]).token_ids
    assert tuple(found["prompt_token_ids"]) == prompt


def test_several_choices_differ_and_count_once(client):
    whole = chat(client, n=3, messages=STORY, temperature=1.5)
    assert [one.index for one in whole.choices] == [0, 1, 2]
    assert len({one.message.content for one in whole.choices}) > 1
    single = chat(client, messages=STORY, temperature=1.5)
    assert single.choices[0].message == whole.choices[0].message
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens
    assert whole.usage.completion_tokens > single.usage.completion_tokens
    chunks = list(chat(client, n=3, messages=STORY, temperature=1.5, stream=True))
    for one in whole.choices:
        parts = [c.choices[0].delta for c in chunks if c.choices[0].index == one.index]
        assert "".join(part.content or "" for part in parts) == (one.message.content or "")


def test_logprobs_are_those_of_the_tokens(client):
    found = chat(client, logprobs=True, top_logprobs=3, temperature=0, messages=STORY)
    content = found.choices[0].logprobs.content
    assert len(content) > 2
    for one in content:
        assert [len(one.top_logprobs), one.top_logprobs[0].token] == [3, one.token]
        assert one.logprob == one.top_logprobs[0].logprob <= 0
    assert "".join(one.token for one in content) == found.choices[0].message.content
    chunks = chat(client, logprobs=True, top_logprobs=3, temperature=0, messages=STORY, stream=True)
    streamed = [c.choices[0].logprobs for c in chunks]
    assert [one for part in streamed if part for one in part.content or ()] == content


def test_stop_ends_the_answer_and_the_engine(client, server):
    whole = chat(client, max_tokens=60).choices[0].message.content
    word = whole.split()[1]
    for stream in (False, True):
        found = chat(client, stop=[word], max_tokens=60, stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in found]
            text = "".join(one.delta.content or "" for one in chunks)
            assert chunks[-1].finish_reason == "stop"
        else:
            text = found.choices[0].message.content
            assert found.choices[0].finish_reason == "stop"
        assert text == whole[: whole.index(word)]


def test_json_schema_is_kept_and_parsed(client):
    class Trip(BaseModel):
        city: Literal["Rome", "Paris"]
        days: Literal[1, 2, 3]

    found = client.chat.completions.parse(
        model="nano", messages=[USER], response_format=Trip, max_tokens=200, temperature=0.7,
        seed=3, extra_body={"thinking": {"type": "disabled"}},
    )  # fmt: skip
    assert found.choices[0].finish_reason == "stop"
    assert isinstance(found.choices[0].message.parsed, Trip)


def test_constraints_bind_behind_the_reasoning(client):
    form = {"structured_outputs": {"choice": ["red", "blue"]}}
    found = chat(client, extra_body=form, max_tokens=120).choices[0]
    assert found.finish_reason == "stop"
    assert found.message.content.strip() in ("red", "blue")
    assert found.message.reasoning_content
    found = chat(client, extra_body={"regex": "[0-9]{3}"}, reasoning_effort="none").choices[0]
    assert found.message.content.isdigit()
    assert len(found.message.content) == 3


def test_required_tool_is_called_and_its_result_read(client):
    options = {"tools": [TOOL], "tool_choice": "required", "reasoning_effort": "none"}
    (call, *_) = chat(client, max_tokens=120, **options).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    chunks = [c.choices[0].delta for c in chat(client, max_tokens=120, stream=True, **options)]
    parts = [call for delta in chunks for call in delta.tool_calls or ()]
    text = "".join(part.function.arguments or "" for part in parts if part.index == 0)
    assert text == call.function.arguments
    turn = {
        "role": "assistant", "content": None, "tool_calls": [{
            "id": "a", "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": "Rome"})},
        }],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
    answer = chat(client, tools=[TOOL], messages=[USER, turn, result])
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_names_other_programs_use(client):
    developer = {"role": "developer", "content": "Be brief."}
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    found = client.chat.completions.create(
        model="deepseek-chat", messages=[developer, parts], max_completion_tokens=4, seed=1
    )
    assert found.usage.completion_tokens == 4
    assert found.choices[0].finish_reason == "length"


def test_special_tokens_in_a_text_are_text(client, llm):
    bar = "\uff5c"
    text = f"<{bar}User{bar}> <think> <{bar}image{bar}> <{bar}end\u2581of\u2581sentence{bar}>"
    found = chat(
        client, messages=[{"role": "user", "content": text}], extra_body={"return_token_ids": True}
    )
    ids = found.deepinfer["prompt_token_ids"]
    special = set(llm.chat_encoder.tokenizer.get_added_tokens_decoder())
    plain = llm.chat_encoder.prepare([USER]).token_ids
    assert [one for one in ids if one in special] == [one for one in plain if one in special]


def test_responses_whole_streamed_and_by_helper(client):
    options = {"model": "nano", "input": "hi", "max_output_tokens": 40, "extra_body": {"seed": 5}}
    whole = client.responses.create(**options)
    assert whole.status in ("completed", "incomplete")
    assert whole.output_text
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = list(client.responses.create(stream=True, **options))
    assert events[0].type == "response.created"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.deepinfer["seed"] == 5
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text


def test_a_failing_response_ends_its_stream_in_its_own_words(client):
    options = {"model": "nano", "input": "hi", "max_output_tokens": 40, "stream": True}
    events = list(client.responses.create(**options, extra_body={"guided_json": {"not": {}}}))
    assert events[-1].type == "response.failed"
    assert "not" in events[-1].response.error.message


def test_responses_take_instructions_turns_and_a_schema(client):
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "hi"},
    ]
    schema = {"type": "json_schema", "name": "x", "schema": WEATHER}
    found = client.responses.create(
        model="nano", input=turns, instructions="Be kind.", max_output_tokens=100,
        reasoning={"effort": "none"}, text={"format": schema},
    )  # fmt: skip
    assert found.output_text.startswith("{")


def test_completions_whole_and_streamed(client):
    options = {"model": "nano", "prompt": ["Once", [5, 6, 7]], "max_tokens": 8, "n": 2, "seed": 5}
    whole = client.completions.create(**options)
    assert [one.index for one in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens <= 32
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    )
    for one in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == one.index]
        assert "".join(part.text for part in parts) == one.text
        assert parts[-1].finish_reason == one.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_completions_echo_scores_the_prompt(client, llm):
    found = client.completions.create(
        model="nano", prompt="Once upon", echo=True, logprobs=2, max_tokens=0
    ).choices[0]
    assert found.text.endswith("Once upon")
    ids = [llm.model.config.bos_token_id, *llm.encode("Once upon")]
    assert len(found.logprobs.tokens) == len(ids)
    assert found.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in found.logprobs.token_logprobs[1:])
    assert found.logprobs.text_offset[0] == 0
    assert [len(one) for one in found.logprobs.top_logprobs[1:]] == [2] * (len(ids) - 1)
    whole = client.completions.create(
        model="nano", prompt="Once", echo=True, logprobs=0, max_tokens=3, temperature=0
    ).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text


def test_completions_draw_a_seed_for_each_prompt(client):
    found = client.completions.create(
        model="nano", prompt=["Once"] * 3, max_tokens=12, temperature=1.5
    )
    assert len({one.text for one in found.choices}) > 1
    assert len(set(found.deepinfer["seeds"])) == 3


def test_models(client):
    assert [one.id for one in client.models.list()] == ["nano", "deepseek-chat"]
    assert client.models.retrieve("nano").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [USER, {"role": "boss", "content": "x"}]}, openai.BadRequestError,
         "messages[1]"),
        ({"max_tokens": 511}, openai.BadRequestError, "max_tokens"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
        ({"n": 17}, openai.BadRequestError, "n"),
        ({"stop": [""]}, openai.BadRequestError, "stop[0]"),
        ({"extra_body": {"top_q": 1}}, openai.BadRequestError, "top_q"),
        ({"extra_body": {"best_of": 2}}, openai.BadRequestError, "best_of"),
        ({"extra_body": {"min_p": "x"}}, openai.BadRequestError, "min_p"),
        ({"extra_body": {"seed": 2**64}}, openai.BadRequestError, "seed"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, openai.BadRequestError,
         "tools[0]"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object", "not": {}}}}}, openai.BadRequestError, None),
        ({"extra_body": {"regex": "a", "ebnf": "root ::= b"}}, openai.BadRequestError, "ebnf"),
        ({"extra_body": {"regex": ""}}, openai.BadRequestError, "regex"),
        ({"store": True}, openai.BadRequestError, "store"),
        ({"parallel_tool_calls": 1}, openai.BadRequestError, "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_errors_have_a_kind_and_name_the_field(client, options, kind, param):
    with pytest.raises(kind) as found:
        chat(client, **options)
    assert found.value.param == param
    assert found.value.body["message"]


def test_stored_responses_are_not_there(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    for option in ({"previous_response_id": "resp_1"}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as found:
            client.responses.create(model="nano", input="hi", **option)
        assert found.value.param == next(iter(option))
