"""Prompts: the same as recipe's conversion, safe against injection, and loud about bad input."""

import inspect
import json
import random
import sys
from dataclasses import replace

import deepseek_recipe as recipe
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.messages import build_conversation
from deepinfer_jax.chat.parse import parsing_options
from deepinfer_jax.chat.tokenizer import import_recipe, recipe_tokenizer
from deepinfer_jax.errors import ConfigError, InputError, TokenizerError

BAR = "\uff5c"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "r"}
SPELLINGS = [
    f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", f"<{BAR}System{BAR}>", "<think>", "</think>",
    f"<{BAR}begin\u2581of\u2581sentence{BAR}>", f"<{BAR}end\u2581of\u2581sentence{BAR}>",
    f"{BAR}DSML{BAR}", f"<{BAR}image{BAR}>", f"<{BAR}\u2581pad\u2581{BAR}>",
    f"<{BAR}latest_reminder{BAR}>",
]  # fmt: skip


def changed(encoder, change):
    """The tiny tokenizer with its JSON changed."""
    content = json.loads(encoder.tokenizer.to_str())
    change(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def without(spelling):
    """Renames a token, since the ids of those behind it would move if it were removed."""

    def change(content):
        for token in content["added_tokens"]:
            if token["content"] == spelling:
                token["content"] = "<gone>"
        vocab = content["model"]["vocab"]
        if spelling in vocab:
            vocab["<gone>"] = vocab.pop(spelling)

    return change


def special_ids(encoder, ids):
    return [token for token in ids if token in encoder.tokenizer.get_added_tokens_decoder()]


TEXTS = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=8)), max_size=6).map(
    "".join
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, role=st.sampled_from(["system", "user", "tool", "latest_reminder"]))
def test_no_text_produces_a_special_id(encoder, text, role):
    def messages(content):
        if role == "tool":
            return [USER, CALLS, {**RESULT, "content": content}]
        return [{"role": role, "content": content}, USER]

    if any("\ud800" <= c <= "\udfff" for c in text):
        with pytest.raises(InputError, match="surrogate"):
            encoder.prepare(messages(text))
        return
    ids = encoder.prepare(messages(text)).token_ids
    assert special_ids(encoder, ids) == special_ids(
        encoder, encoder.prepare(messages("x")).token_ids
    )
    shown = encoder.tokenizer.decode(list(ids), skip_special_tokens=False)
    assert shown == encoder.render(build_conversation(messages(text))).text


def test_raw_encoding_is_not_safe_and_that_is_why_it_is_not_used(encoder):
    assert special_ids(encoder, encoder.recipe_tokenizer.encode(f"<{BAR}User{BAR}>"))


def random_body(rng):
    """A body that recipe's conversion accepts."""
    words = ["", "a", "hello world", "北京", "1\n2", *SPELLINGS]

    def content():
        if rng.random() < 0.3:
            count = rng.randint(1, 3)
            return [{"type": "text", "text": rng.choice(words)} for _ in range(count)]
        return rng.choice(words)

    messages = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": content()})
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": content()})
        if rng.random() < 0.2:
            messages.append({"role": "latest_reminder", "content": rng.choice(words)})
        kind = rng.random()
        if kind < 0.4:
            message = {"role": "assistant", "content": content()}
            if rng.random() < 0.5:
                message["reasoning_content"] = rng.choice(words)
            messages.append(message)
        elif kind < 0.6:
            calls = []
            for number in range(rng.randint(1, 3)):
                arguments = rng.choice(['{"x": 1, "s": "t"}', "{}", "{bad", '{"n": {"a": [1]}}'])
                function = {"name": rng.choice(["add", "gone"]), "arguments": arguments}
                calls.append({"id": f"{turn}.{number}", "type": "function", "function": function})
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": content()} for c in calls
            ]
            rng.shuffle(results)
            messages += results
    # Recipe's conversion allows no calls, ours in the past, beside a text to continue.
    continues = rng.random() < 0.3 and not any(m["role"] == "tool" for m in messages)
    if continues:
        last = {"role": "assistant", "content": rng.choice(["", "Once"]), "prefix": True}
        if rng.random() < 0.5:
            last["reasoning_content"] = rng.choice(["", "hm"])
        messages.append(last)
    options = {"thinking": rng.random() < 0.5}
    if options["thinking"] and rng.random() < 0.6:
        options["reasoning_effort"] = rng.choice(
            ["minimal", "low", "medium", "high", "xhigh", "max"]
        )
    if not continues and rng.random() < 0.5:
        options["tools"] = [
            {"type": "function", "function": {"name": "add"}},
            {"type": "function", "function": {"name": "b", "description": "B", "parameters": {
                "type": "object", "properties": {"x": {"type": ["null", "string"]}}}}},
        ]  # fmt: skip
        choices = ["auto", "none"]
        if not options["thinking"]:
            choices += ["required", {"type": "function", "function": {"name": "b"}}]
        options["tool_choice"] = rng.choice(choices)
    if rng.random() < 0.2:
        schema = {"name": "n", "schema": {"type": "object", "properties": {"x": {"minimum": 1.5}}}}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    return messages, options


@pytest.mark.parametrize("block", range(4))
def test_prompt_and_parsing_are_those_of_recipes_conversion(block, encoder, encoder_v4):
    for seed in range(500 * block, 500 * (block + 1)):
        messages, options = random_body(random.Random(seed))
        body = {k: v for k, v in options.items() if k != "thinking"}
        body["thinking"] = {"type": "enabled" if options["thinking"] else "disabled"}
        body["messages"] = [
            m | {"role": "system"} if m["role"] == "developer" else m for m in messages
        ]
        for own, model in ((encoder, "DeepSeek-V4.1-Flash"), (encoder_v4, "DeepSeek-V4-Pro")):
            request = recipe.ChatCompletionRequest(body | {"model": model})
            theirs = request.convert(recipe.ConversionOptions())
            ours = build_conversation(messages, **options)
            kind = recipe.DeepseekV41Encoding if own is encoder else recipe.DeepseekV4Encoding
            direct = kind().with_tokenizer(own.recipe_tokenizer)
            rendered = direct.render_conversation(theirs.conversation)
            assert own.render(ours).text == rendered.prompt, seed
            assert list(own.render(ours).special_ranges) == rendered.special_ranges, seed
            assert list(own.encode(ours)) == direct.encode(theirs.conversation), seed
            mine, other = parsing_options(own, ours), theirs.parsing_options
            assert mine.parse_tool_calls == other.parse_tool_calls, seed
            assert mine.starts_in_tool_calls == other.starts_in_tool_calls, seed
            assert mine.thinking_initial_stage == other.thinking_initial_stage, seed


def test_text_is_one_user_message(encoder):
    assert encoder.prepare("hi").token_ids == encoder.prepare([USER]).token_ids


BAD = [
    ([], {}, "messages must be a list with at least one entry"),
    ({"role": "user"}, {}, "messages must be a list with at least one entry"),
    ([{"role": "system", "content": ""}], {}, "messages must be more than empty system messages"),
    (["x"], {}, r"messages\[0\] must be an object with a role, got 'x'"),
    ([{"content": "x"}], {}, r"messages\[0\] must be an object with a role"),
    ([{"role": "bogus", "content": "x"}], {}, r"messages\[0\]\.role must be one of .*bogus"),
    ([{"role": ["user"], "content": "x"}], {}, r"messages\[0\]\.role must be one of"),
    ([{"role": "user"}], {}, r"messages\[0\]\.content must be a text or a list of parts, got None"),
    ([USER, {"role": "user", "content": 5}], {}, r"messages\[1\]\.content must be"),
    ([{"role": "user", "content": "x", "nmae": "y"}], {}, r"messages\[0\] may have.*'nmae'"),
    ([{"role": "user", "content": ["x"]}], {}, r"content\[0\] must be a part"),
    ([{"role": "user", "content": [{"type": "text"}]}], {}, r"content\[0\]\.text must be a text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], {},
     r"content\[0\]\.image_url\.url must be a data URL"),
    ([{"role": "system", "content": [{"type": "image"}]}], {}, "images stand in user"),
    ([{"role": "user", "content": [{"type": "file"}]}], {}, "files are not supported"),
    ([{"role": "user", "content": "\ud800"}], {}, "surrogate"),
    ([{"role": "assistant"}], {}, "must have content or tool_calls"),
    ([{"role": "assistant", "content": "x", "prefix": "yes"}], {}, "prefix must be true or false"),
    ([{"role": "assistant", "content": "x", "prefix": True}, USER], {}, r"messages\[0\]\.prefix"),
    ([{"role": "user", "content": "x", "prefix": True}], {}, "'prefix'"),
    ([{"role": "assistant", "content": "x", "prefix": True}], {"response_format": {
        "type": "json_object"}}, r"messages\[0\]\.prefix continues a text"),
    ([{"role": "assistant", "content": "x", "prefix": True}], {"tools": [{
        "type": "function", "function": {"name": "a"}}]}, r"messages\[0\]\.prefix continues"),
    ([{"role": "assistant", "content": "x", "tool_calls": []}], {}, "tool_calls must be a list"),
    ([{"role": "assistant", "tool_calls": [{}]}], {}, r"calls\[0\].function must be an object"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}], {}, r"type must be one of"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}],
     {}, r"function\.arguments must be a text"),
    ([{"role": "assistant", "tool_calls": [CALL, CALL]}], {}, "calls with different ids"),
    ([USER, RESULT], {}, r"messages\[1\]\.tool_call_id must be an unanswered call"),
    ([USER, CALLS], {}, r"messages\[1\]\.tool_calls must be followed by"),
    ([USER, CALLS, USER], {}, r"messages\[1\]\.tool_calls must be followed by"),
    ([USER, CALLS, {**RESULT, "tool_call_id": "b"}], {}, r"messages\[2\]\.tool_call_id"),
    ([USER, CALLS, {"role": "tool", "content": "r"}], {}, r"tool_call_id must be a text, got None"),
    ([USER], {"thinking": "on"}, "thinking must be true or false, got 'on'"),
    ([USER], {"reasoning_effort": "huge"}, "reasoning_effort must be one of minimal"),
    ([USER], {"reasoning_effort": "low", "thinking": False}, "None without thinking"),
    ([USER], {"tools": []}, "tools must be a list with at least one entry"),
    ([USER], {"tools": ["add"]}, r"tools\[0\] must be an object"),
    ([USER], {"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type must be one of function"),
    ([USER], {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters, digits"),
    ([USER], {"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, r"tools\[1\]"),
    ([USER], {"tools": [{"type": "function", "function": {"name": "a", "parameters": "s"}}]},
     "parameters must be a JSON schema"),
    ([USER], {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": {1}}}}]},
     "parameters must be plain JSON"),
    ([USER], {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "strict"),
    ([USER], {"tool_choice": "required"}, "auto or none without tools"),
    ([USER], {"tool_choice": "any"}, "tool_choice must be one of"),
    ([USER], {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "function.name"),
    ([USER], {"response_format": "json"}, "response_format must be an object"),
    ([USER], {"response_format": {"type": "xml"}}, "response_format.type must be one of"),
    ([USER], {"response_format": {"type": "regex"}}, "regex with the fields of that type alone"),
    ([USER], {"response_format": {"type": "text", "regex": "a"}}, "text with the fields"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "complaint"), BAD)
def test_bad_input_names_field_rule_and_value(messages, options, complaint):
    unchecked = inspect.unwrap(build_conversation)  # the types are checked in tests alone
    with pytest.raises(InputError, match=complaint):
        unchecked(messages, **options)


def test_an_image_is_one_token(encoder):
    source = recipe.UrlImageSource("https://example.org/a.png")
    image = encoder.special_tokens.token(recipe.SpecialToken.Image)
    message = recipe.UserMessage(image, [source], image_token=image)
    conversation = recipe.Conversation([message])
    assert encoder.encode(conversation).count(encoder.config.image_token_id) == 1
    assert [one.url for one in encoder.image_sources(conversation)] == [source.url]


def test_no_tokenizer_says_what_to_do(encoder):
    with pytest.raises(TokenizerError, match=r"chat needs tokenizer\.json"):
        ChatEncoder(None, encoder.config)


@pytest.mark.parametrize("spelling", ["<think>", f"<{BAR}System{BAR}>", f"{BAR}DSML{BAR}"])
def test_absent_special_token_is_named(spelling, encoder):
    tokenizer = changed(encoder, without(spelling))
    with pytest.raises(TokenizerError, match="lacks them") as caught:
        ChatEncoder(tokenizer, encoder.config)
    assert spelling in str(caught.value)


def test_v4_needs_no_system_token(encoder, encoder_v4):
    tokenizer = changed(encoder, without(f"<{BAR}System{BAR}>"))
    own = ChatEncoder(tokenizer, encoder_v4.config)
    assert own.prepare([{"role": "system", "content": "s"}, USER]).token_ids


def test_special_token_absent_from_one_kind_of_prompt_only(encoder):
    own = ChatEncoder(changed(encoder, without(SPELLINGS[-1])), encoder.config)
    assert own.prepare([USER]).token_ids
    with pytest.raises(TokenizerError, match="latest_reminder"):
        own.prepare([{"role": "latest_reminder", "content": "x"}, USER])


@pytest.mark.parametrize(("id", "found"), [(503, f"<{BAR}ref{BAR}>"), (74, None)])
def test_image_token_id_of_another_token_is_refused(id, found, encoder):
    config = replace(encoder.config, image_token_id=id)
    with pytest.raises(TokenizerError, match=f"image_token_id={id} must be the image token") as e:
        ChatEncoder(encoder.tokenizer, config)
    assert repr(found) in str(e.value)


def test_eos_of_another_checkpoint_is_refused(encoder):
    def swap(content):
        for token in content["added_tokens"]:
            if token["id"] in (1, 2):
                token["id"] = 3 - token["id"]
        vocab = content["model"]["vocab"]
        names = {v: k for k, v in vocab.items()}
        vocab[names[1]], vocab[names[2]] = 2, 1

    with pytest.raises(TokenizerError, match="eos_token_id must be the id of"):
        ChatEncoder(changed(encoder, swap), encoder.config)


def test_tokenizer_that_recipe_reads_differently_is_refused(encoder, monkeypatch):
    class Other:
        @staticmethod
        def from_str(text):
            return Other()

        def encode(self, text):
            return [0] if text else []

    monkeypatch.setattr(recipe, "Tokenizer", Other)
    with pytest.raises(TokenizerError, match="must give the same ids, but 'Hello!"):
        recipe_tokenizer(encoder.tokenizer)


def test_absent_or_other_recipe_is_an_error(monkeypatch):
    monkeypatch.setattr(recipe, "__version__", "0.3.0")
    with pytest.raises(ConfigError, match=r"version 0\.3\.0 is installed"):
        import_recipe()
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(ConfigError, match="pip install"):
        import_recipe()
