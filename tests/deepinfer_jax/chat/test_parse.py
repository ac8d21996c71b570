"""Completions: reasoning, content and calls, the same however the ids are cut."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.parse import ChatParser, ToolCall, parse_ids, parse_text

DSML = "\uff5cDSML\uff5c"
CALLS, INVOKE, PARAMETER = f"{DSML} calls", f"{DSML} invoke", f"{DSML} parameter"
ANSWER = "</think>Let me check."


def dsml(*calls):
    """Tool calls as V4.1 writes them."""
    text = f"\n\n<{CALLS}>\n"
    for name, arguments in calls:
        text += f'<{INVOKE} name="{name}">\n'
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            body = value if is_text else json.dumps(value)
            kind = "true" if is_text else "false"
            text += f'<{PARAMETER} name="{key}" string="{kind}">{body}</{PARAMETER}>\n'
        text += f"</{INVOKE}>\n"
    return text + f"</{CALLS}>"


@pytest.fixture(scope="module")
def thinking(encoder, tools):
    return encoder.prepare("hi", tools=tools).conversation


@pytest.fixture(scope="module")
def plain(encoder):
    return encoder.prepare("hi", thinking=False).conversation


def ids(encoder, text):
    return encoder.tokenizer.encode(text).ids


def test_reasoning_content_and_calls_are_told_apart(encoder, thinking):
    arguments = {"city": 'São "P"', "days": 2}
    text = "think a bit" + ANSWER + dsml(("get_weather", arguments), ("add", {}))
    message = parse_ids(encoder, thinking, ids(encoder, text))
    assert (message.reasoning, message.content) == ("think a bit", "Let me check.")
    assert [call.name for call in message.tool_calls] == ["get_weather", "add"]
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1"]
    assert json.loads(message.tool_calls[0].arguments) == arguments
    assert [call.problem for call in message.tool_calls] == [None, None]
    assert parse_text(encoder, thinking, text) == message


def test_v4_calls_are_read_in_their_own_format(encoder_v4, tools):
    conversation = encoder_v4.prepare("hi", tools=tools, thinking=False).conversation
    text = dsml(("add", {"x": 1})).replace(f"{DSML} calls", f"{DSML}tool_calls")
    message = parse_ids(encoder_v4, conversation, ids(encoder_v4, text.replace(f"{DSML} ", DSML)))
    assert message.tool_calls == (
        ToolCall(id="call_0", name="add", arguments='{"x": 1}', problem=None),
    )


def test_answer_goes_back_into_the_prompt_and_comes_out_again(encoder, thinking, tools):
    text = "why" + ANSWER + dsml(("add", {"x": [1, {"y": None}], "s": "a\nb"}))
    message = parse_ids(encoder, thinking, ids(encoder, text))
    results = [{"role": "tool", "tool_call_id": "call_0", "content": "3"}]
    history = [{"role": "user", "content": "hi"}, message.as_dict(), *results]
    prompt = encoder.prepare(history, tools=tools)
    rendered = encoder.render(prompt.conversation).text
    assert "<think>" + text in rendered
    assert rendered.endswith("<tool_result>3</tool_result><\uff5cAssistant\uff5c><think>")
    again = parse_ids(encoder, prompt.conversation, ids(encoder, text))
    assert again.tool_calls[0].id == "call_1"  # one more than in the past
    assert again.tool_calls[0].arguments == message.tool_calls[0].arguments


def test_without_thinking_there_is_no_reasoning(encoder, plain):
    message = parse_ids(encoder, plain, ids(encoder, "Hello."))
    assert (message.reasoning, message.content) == (None, "Hello.")
    assert message.as_dict() == {"role": "assistant", "content": "Hello."}


def test_tags_spelled_by_ordinary_tokens_are_text(encoder, thinking):
    quoted = encoder.prepare("</think>", thinking=False).token_ids[2:-2]
    assert encoder.tokenizer.decode(quoted, skip_special_tokens=False) == "</think>"
    message = parse_ids(encoder, thinking, [*quoted, *ids(encoder, "</think>x")])
    assert (message.reasoning, message.content) == ("</think>", "x")


def test_calls_without_declared_tools_are_text(encoder, plain):
    text = "Look:" + dsml(("add", {}))
    message = parse_ids(encoder, plain, ids(encoder, text))
    assert (message.content, message.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (dsml(("gone", {})), "no tool is named 'gone'"),
        (dsml(("add", {"x": 1})).replace(">1<", ">{1<"), "the arguments are no JSON"),
        (dsml(("add", {"x": "abc"})).split("c</")[0], "the arguments are no JSON"),
    ],
)
def test_call_that_cannot_be_made_says_why(text, problem, encoder, thinking):
    message = parse_ids(encoder, thinking, ids(encoder, "</think>" + text), reason="length")
    assert message.tool_calls[0].problem.startswith(problem)


def test_required_call_begins_inside_the_block(encoder, tools):
    prompt = encoder.prepare("hi", thinking=False, tools=tools, tool_choice="required")
    text = dsml(("add", {"x": 1})).removeprefix(f"\n\n<{CALLS}>\n")
    (call,) = parse_ids(encoder, prompt.conversation, ids(encoder, text)).tool_calls
    assert (call.name, call.arguments) == ("add", '{"x": 1}')


@pytest.mark.parametrize(
    ("own", "text", "reasoning", "content"),
    [
        ({"content": "Once"}, " upon", "", " upon"),
        ({"content": "", "reasoning_content": "hm"}, "\n\nyes</think>so", "\n\nyes", "so"),
        ({"content": "", "reasoning_content": ""}, "\nyes</think>so", "yes", "so"),
    ],
)
def test_continued_text_begins_where_the_prefix_ends(own, text, reasoning, content, encoder):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "prefix": True, **own}]
    conversation = encoder.prepare(messages).conversation
    message = parse_ids(encoder, conversation, ids(encoder, text))
    assert (message.reasoning, message.content) == (reasoning, content)


def test_eos_is_not_shown(encoder, plain):
    eos = encoder.config.eos_token_id
    assert parse_ids(encoder, plain, [*ids(encoder, "a"), eos, *ids(encoder, "b")]).content == "ab"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "tool_calls"), ("length", "length"), ("capacity", "capacity"),
     ("numerical", "numerical")],
)  # fmt: skip
def test_finish_reason_of_the_engine_is_kept(reason, expected, encoder, thinking):
    parser = ChatParser(encoder, thinking)
    parser.push(ids(encoder, "</think>" + dsml(("add", {}))))
    assert parser.finish(reason).finish_reason == expected


def test_stop_string_ends_the_content_and_further_ids_are_dropped(encoder, plain):
    parser = ChatParser(encoder, plain, ["me ch"])
    tokens = ids(encoder, "Let me check. More")
    delta = parser.push(tokens)
    assert (delta.content, delta.finish_reason) == ("Let ", "stop")
    assert parser.is_finished
    assert encoder.tokenizer.decode(delta.token_ids).startswith("Let me ch")
    assert len(delta.token_ids) < len(tokens)
    assert parser.push(tokens).token_ids == ()
    assert parser.finish("length").finish_reason == "stop"
    assert parser.message.content == "Let "


def test_stop_strings_are_not_matched_in_reasoning_or_calls(encoder, thinking):
    text = "stop</think>go" + dsml(("add", {"x": "stop"}))
    message = parse_ids(encoder, thinking, ids(encoder, text), stop=["stop"])
    assert (message.reasoning, message.content) == ("stop", "go")
    assert message.tool_calls[0].arguments == '{"x": "stop"}'


def test_reading_before_the_end_is_our_mistake(encoder, plain):
    with pytest.raises(AssertionError, match="before finish"):
        _ = ChatParser(encoder, plain).message


def collect(parser, chunks, reason):
    """The message that the deltas add up to, and that of the parser."""
    content, reasoning, calls, tokens = "", "", {}, []
    deltas = [parser.push(chunk) for chunk in chunks]
    deltas.append(parser.finish(reason))
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        tokens += delta.token_ids
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls[call.index] = [call.id, call.name, ""]
            calls[call.index][2] += call.arguments
    message = parser.message
    assert content == message.content
    assert reasoning == (message.reasoning or "")
    assert list(calls.values()) == [[c.id, c.name, c.arguments] for c in message.tool_calls]
    return message, tuple(tokens), deltas[-1].finish_reason


WORDS = [
    "a",
    " <b",
    "</div>",
    "北京",
    "🎉",
    "\n\n",
    "é",
    "stop",
    "</think>",
    f"<{CALLS}>",
    "{",
    '"',
]


def random_answer(rng, encoder):
    """Returns ids of reasoning, text and up to five calls, perhaps cut off, and stop strings."""
    words = lambda n: "".join(rng.choices(WORDS, k=rng.randint(0, n)))  # noqa: E731
    calls = []
    for _ in range(rng.randint(0, 5)):
        arguments = {"x": words(4), "n": rng.choice([1, [2], None])}
        calls.append((rng.choice(["add", "get_weather"]), arguments if rng.random() < 0.8 else {}))
    text = words(6) + "</think>" + words(6) + (dsml(*calls) if calls else "")
    tokens = ids(encoder, text)
    tokens = tokens[: rng.choice([len(tokens), rng.randint(0, len(tokens))])]
    return tokens, rng.choice([(), ("stop",), ("op", "京")])


def assert_cuts_change_nothing(encoder, conversation, tokens, stop, cuts):
    """Reads ids at once, in chunks of 1..7, and in two parts at each of `cuts`."""
    whole = collect(ChatParser(encoder, conversation, stop), [tokens], "stop")
    for size in range(1, 8):
        chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        assert collect(ChatParser(encoder, conversation, stop), chunks, "stop") == whole
    for cut in cuts:
        parts = [tokens[:cut], tokens[cut:]]
        assert collect(ChatParser(encoder, conversation, stop), parts, "stop") == whole


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_deltas_add_up_to_the_whole_however_the_ids_are_cut(encoder, thinking, seed):
    rng = random.Random(seed)
    tokens, stop = random_answer(rng, encoder)
    cut = rng.randint(0, len(tokens))
    assert_cuts_change_nothing(encoder, thinking, tokens, stop, [cut])


def test_every_byte_value_of_the_vocabulary_can_be_pushed(encoder, plain):
    assert isinstance(encoder, ChatEncoder)
    parser = ChatParser(encoder, plain)
    parser.push(range(encoder.config.vocab_size))
    parser.finish("length")
    assert parser.message.content
