"""Chat over an LLM: batches, streams, stop strings, and what is refused."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.session import chat, stream_chat
from deepinfer_jax.engine.output import Completion, RequestMetrics
from deepinfer_jax.errors import InputError

USER = {"role": "user", "content": "hi"}


@dataclass
class Replay:
    """An LLM that always says the same."""

    ids: tuple[int, ...]
    reason: str = "stop"
    prompts: list = field(default_factory=list)
    params: list = field(default_factory=list)
    images: tuple = ()
    was_closed: bool = False

    def generate(self, prompts, params=None, *, progress=True, images=()):
        self.prompts, self.params, self.images = prompts, params, images
        values = np.arange(len(self.ids), dtype=np.float32)
        completion = Completion(
            text="", token_ids=self.ids, logprobs=values, top_logprobs=None,
            finish_reason=self.reason, stop_reason=1 if self.reason == "stop" else None,
        )  # fmt: skip
        return [
            di.RequestOutput(
                request_id=str(number), prompt_token_ids=tuple(prompt), outputs=(completion,),
                seed=3, metrics=RequestMetrics(first_token_s=0.0, total_s=0.0),
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip

    def stream(self, prompt, params=None, *, images=()):
        self.prompts, self.params, self.images = [prompt], [params], images
        try:
            for number, token in enumerate(self.ids):
                yield di.StreamDelta(
                    index=0, text="", token_ids=(token,), logprobs=(float(number),)
                )
            yield di.StreamDelta(index=0, text="", token_ids=(), finish_reason=self.reason)
        finally:
            self.was_closed = True


@pytest.fixture
def replay(encoder):
    return Replay(tuple(encoder.tokenizer.encode("why</think>Let me check. More").ids))


def test_one_answer_per_conversation_in_order(encoder, replay):
    conversations = [[USER], "ho", [{"role": "system", "content": "s"}, USER]]
    outputs = chat(replay, encoder, conversations, progress=False)
    assert [list(o.prompt_token_ids) for o in outputs] == replay.prompts
    assert replay.prompts == [list(encoder.prepare(c).token_ids) for c in conversations]
    assert {(o.text, o.reasoning, o.finish_reason) for o in outputs} == {
        ("Let me check. More", "why", "stop")
    }
    (single,) = chat(replay, encoder, [USER], progress=False)
    assert (single.text, single.stop_reason, single.seed) == ("Let me check. More", 1, 3)
    assert single.token_ids == replay.ids
    assert single.message.as_dict()["reasoning_content"] == "why"
    assert len(single.logprobs) == len(replay.ids)


def test_params_go_through_except_stop(encoder, replay):
    params = di.SamplingParams(temperature=0.3, top_p=0.5, stop=("me ch",))
    (output,) = chat(replay, encoder, "hi", params, progress=False)
    assert replay.params == [replace(params, stop=())]
    assert (output.text, output.finish_reason, output.stop_reason) == ("Let ", "stop", "me ch")
    assert len(output.token_ids) == len(output.logprobs) < len(replay.ids)
    with pytest.raises(InputError, match="one per conversation, got 2 for 1"):
        chat(replay, encoder, "hi", [params, params], progress=False)


@pytest.mark.parametrize("stop", [(), ("me ch",), ("why", "Mor")])
@pytest.mark.parametrize("reason", ["stop", "length", "numerical"])
def test_stream_adds_up_to_the_answer(stop, reason, encoder, replay):
    replay.reason = reason
    params = di.SamplingParams(stop=stop, logprobs=0)
    (output,) = chat(replay, encoder, "hi", params, progress=False)
    deltas = list(stream_chat(replay, encoder, "hi", params))
    assert "".join(d.content for d in deltas) == output.text
    assert "".join(d.reasoning for d in deltas) == output.reasoning
    assert tuple(t for d in deltas for t in d.token_ids) == output.token_ids
    assert [p for d in deltas for p in d.logprobs or ()] == list(output.logprobs)
    assert [d.finish_reason for d in deltas if d.finish_reason] == [output.finish_reason]
    assert deltas[-1].finish_reason == output.finish_reason


def test_stop_string_ends_the_engines_stream(encoder, replay):
    stream = stream_chat(replay, encoder, "hi", di.SamplingParams(stop=("me",)))
    assert "".join(d.content for d in stream) == "Let "
    assert replay.was_closed


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def listed(*names, strict=()):
    return [{"name": one, "parameters": SCHEMA, "strict": one in strict} for one in names]


@pytest.mark.parametrize(
    ("choice", "strict", "thinking", "expected", "begin"),
    [
        ("auto", (), True, None, "auto"),
        ("none", ("a",), True, None, "auto"),
        ("auto", ("a",), True, ("a", "b"), "auto"),
        ("auto", ("a",), False, ("a", "b"), "auto"),
        ("required", (), False, ("a", "b"), "opened"),
        ("required", ("b",), True, ("a", "b"), "required"),
        ({"type": "function", "function": {"name": "b"}}, (), True, ("b",), "required"),
        ({"type": "function", "function": {"name": "b"}}, ("b",), False, ("b",), "opened"),
    ],
)
def test_calls_that_are_promised_are_bound(
    encoder, replay, choice, strict, thinking, expected, begin
):
    tools = [tool(name, strict=name in strict) for name in ("a", "b")]
    options = {"tools": tools, "tool_choice": choice, "thinking": thinking}
    for start in (chat, stream_chat):
        list(start(replay, encoder, "hi", **options))
        grammar = None
        if expected is not None:
            grammar = di.Grammar.tool_calls(
                listed(*expected, strict=strict), begin=begin,
                start_after="</think>" if thinking else None,
            )  # fmt: skip
        assert replay.params[0].grammar == grammar
    text = encoder.tokenizer.decode(replay.prompts[0], skip_special_tokens=False)
    assert text.endswith("<think>" if thinking else " calls>\n" if begin == "opened" else "think>")
    if expected is not None:
        declared = [name for name in ("a", "b") if f'{{"name": "{name}"' in text]
        assert declared == list(expected)


def test_one_constraint_binds_an_answer(encoder, replay):
    strict = {"tools": [tool("a", strict=True)]}
    form = {"response_format": {"type": "json_object"}}
    grammar = di.SamplingParams(grammar=di.Grammar.regex("a"))
    for start in (chat, stream_chat):
        for options, params in ((strict | form, None), (strict, grammar), (form, grammar)):
            with pytest.raises(InputError, match="give one"):
                start(replay, encoder, "say json", params, **options)
        choice = {"type": "function", "function": {"name": "b"}}
        with pytest.raises(InputError, match=r"function\.name must be one of a"):
            start(replay, encoder, "hi", **strict, tool_choice=choice)
    assert replay.prompts == []


def test_bad_message_is_refused_before_anything_runs(encoder, replay):
    with pytest.raises(InputError, match=r"messages\[0\]\.role"):
        chat(replay, encoder, [[USER], [{"role": "x", "content": "y"}]])
    with pytest.raises(InputError, match=r"messages\[0\]\.role"):
        stream_chat(replay, encoder, [{"role": "x", "content": "y"}])
    assert replay.prompts == []


def test_model_streams_what_it_answers(fixtures_dir):
    llm = di.LLM(fixtures_dir / "tiny_v41", numerics="float32")
    encoder = ChatEncoder(llm.model.tokenizer, llm.model.config)
    params = di.SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    (output,) = chat(llm, encoder, "hi", params, progress=False, thinking=False)
    assert output.prompt_token_ids == encoder.prepare("hi", thinking=False).token_ids
    deltas = list(stream_chat(llm, encoder, "hi", params, thinking=False))
    assert "".join(d.content for d in deltas) == output.text
    assert tuple(t for d in deltas for t in d.token_ids) == output.token_ids
    assert deltas[-1].finish_reason == output.finish_reason


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


def test_response_format_binds_the_answer_behind_the_reasoning(encoder, replay):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    json_say = "say json"
    expected = di.Grammar.json_schema(SCHEMA)
    for start in (chat, stream_chat):
        list(start(replay, encoder, json_say, response_format=form))
        assert replay.params[0].grammar == expected.after("</think>")
        list(start(replay, encoder, json_say, response_format=form, thinking=False))
        assert replay.params[0].grammar == expected
        with pytest.raises(InputError, match="give one"):
            list(start(replay, encoder, json_say, di.SamplingParams(grammar=expected),
                       response_format=form))  # fmt: skip
        list(start(replay, encoder, json_say, di.SamplingParams(grammar=di.Grammar.regex("a"))))
        assert replay.params[0].grammar == di.Grammar.regex("a").after("</think>")


def test_images_go_with_their_conversation(encoder):
    pixels = np.zeros((20, 20, 3), np.uint8)
    seen = [{"role": "user", "content": [{"type": "image", "image": pixels}]}]
    llm = Replay(tuple(encoder.tokenizer.encode("a</think>b").ids))
    chat(llm, encoder, [seen, "no image"], progress=False)
    assert [len(images) for images in llm.images] == [1, 0]
    assert llm.images[0][0].pixels.shape[2] == 3
    assert [p.count(encoder.config.image_token_id) for p in llm.prompts] == [1, 0]
    list(stream_chat(llm, encoder, seen))
    assert len(llm.images) == 1
    chat(llm, encoder, "no image", progress=False)
    assert llm.images == ()
