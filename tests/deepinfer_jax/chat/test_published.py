"""Prompts and answers at the 129,280 ids of the published tokenizer (io.md 7: 1, 2, 15, 16)."""

import json
import random

import deepseek_recipe as recipe
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.messages import build_conversation
from deepinfer_jax.cli import main as cli
from deepinfer_jax.vision.prompt import expand_images
from tests.e2e import published
from tests.golden.test_prompts import CONVERSATIONS, GOLDEN, conversation_of

from .conftest import ADD, WEATHER
from .test_encode import CALLS, RESULT, TEXTS, USER, random_body
from .test_parse import assert_cuts_change_nothing, random_answer

pytestmark = pytest.mark.accept(11)
GOLDEN_IMAGE = GOLDEN["special_tokens"]["Image"]


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return published.encoder()


@pytest.fixture(scope="module")
def plain() -> tokenizers.Tokenizer:
    """The tokenizer without special tokens."""
    bare = json.loads(published.tokenizer_json())
    bare["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(bare))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_golden_prompts_and_their_ids(name, encoder, plain):
    golden = CONVERSATIONS[name]["v41"]
    conversation = conversation_of(CONVERSATIONS[name]["input"], published.IMAGE)
    rendered = encoder.render(conversation)
    assert rendered.text == golden["prompt"].replace(GOLDEN_IMAGE, published.IMAGE)
    expected, at = [], 0
    for start, end in rendered.special_ranges:
        expected += plain.encode(rendered.text[at:start], add_special_tokens=False).ids
        expected.append(encoder.tokenizer.token_to_id(rendered.text[start:end]))
        at = end
    expected += plain.encode(rendered.text[at:], add_special_tokens=False).ids
    assert list(encoder.encode(conversation)) == expected


def test_ids_are_those_of_the_specification(encoder):
    spellings = {"<think>": 128_821, "</think>": 128_822, "\uff5cDSML\uff5c": 128_825}
    spellings |= {"<\uff5cUser\uff5c>": 128_803, "<\uff5cAssistant\uff5c>": 128_804}
    spellings |= {"<\uff5cSystem\uff5c>": 128_799, published.IMAGE: 129_264}
    assert {one: encoder.tokenizer.token_to_id(one) for one in spellings} == spellings
    assert encoder.image_token == published.IMAGE
    ids = encoder.prepare([{"role": "system", "content": "x"}, USER], thinking=False).token_ids
    assert [one for one in ids if one >= 128_000 or one <= 2] == [0, 128_799, 128_803, 128_804,
                                                                  128_822]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "height", "rows"),
    [(1, 1, 184), (640, 480, 206), (1024, 768, 496), (1920, 1080, 968), (3000, 100, 221)],
)
def test_an_image_takes_its_rows(encoder, width, height, rows):
    pixels = np.zeros((height, width, 3), np.uint8)
    parts = [{"type": "image", "image": pixels}, {"type": "text", "text": published.IMAGE}]
    prompt = encoder.prepare([{"role": "user", "content": parts}])
    assert prompt.token_ids.count(129_264) == 1, "a text that spells the token is a text"
    ids, (span,) = expand_images(prompt.token_ids, prompt.images, encoder.config)
    assert ids.count(129_264) == span.length == rows


def test_commands_speak_in_these_ids(capsys, tmp_path):
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "hi <think>"}]))

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--model", str(published.folder())])
        assert stop.value.code == 0
        return capsys.readouterr().out

    assert json.loads(run("tokenize", "<think>北京 hi</think>")) == [
        128_821, *published.tokenizer().encode("北京 hi", add_special_tokens=False).ids, 128_822
    ]  # fmt: skip
    ids = published.encoder().prepare("hi <think>").token_ids
    assert json.loads(run("render", str(messages), "--ids")) == list(ids)
    text = run("tokenize", "--decode", json.dumps(list(ids)))
    assert text.endswith("<\uff5cAssistant\uff5c><think>\n")


def controls(ids):
    return [one for one in ids if one >= 128_000 or one <= 2]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)))
def test_no_text_produces_a_control_id(encoder, text):
    def messages(content):
        return [{"role": "system", "content": "s" + content}, {**USER, "content": content}, CALLS,
                {**RESULT, "content": content}]  # fmt: skip

    assert controls(encoder.prepare(messages(text)).token_ids) == controls(
        encoder.prepare(messages("x")).token_ids
    )


def assert_as_recipe(encoder, seeds):
    direct = (
        recipe.DeepseekV41Encoding()
        .with_special_tokens(encoder.special_tokens)
        .with_tokenizer(encoder.recipe_tokenizer)
    )
    options = recipe.ConversionOptions().with_special_tokens(encoder.special_tokens)
    for seed in seeds:
        messages, given = random_body(random.Random(seed))
        body = {name: value for name, value in given.items() if name != "thinking"}
        body["thinking"] = {"type": "enabled" if given["thinking"] else "disabled"}
        body["messages"] = [
            one | {"role": "system"} if one["role"] == "developer" else one for one in messages
        ]
        request = recipe.ChatCompletionRequest(body | {"model": "DeepSeek-V4.1-Flash"})
        theirs = request.convert(options).conversation
        ours = build_conversation(messages, **given)
        assert encoder.render(ours).text == direct.render_conversation(theirs).prompt, seed
        assert list(encoder.encode(ours)) == direct.encode(theirs), seed


def test_prompts_are_those_of_recipe(encoder):
    assert_as_recipe(encoder, range(5000, 5100))


@pytest.mark.slow
def test_two_thousand_prompts_are_those_of_recipe(encoder):
    assert_as_recipe(encoder, range(2000))


def assert_answers_are_read_alike(encoder, seeds):
    conversation = encoder.prepare("hi", tools=[WEATHER, ADD]).conversation
    for seed in seeds:
        tokens, stop = random_answer(random.Random(seed), encoder)
        cuts = range(len(tokens) + 1)
        assert_cuts_change_nothing(encoder, conversation, tokens, stop, cuts)


def test_answers_are_read_alike_however_they_are_cut(encoder):
    assert_answers_are_read_alike(encoder, range(1000, 1003))


@pytest.mark.slow
def test_two_hundred_answers_are_read_alike_however_they_are_cut(encoder):
    assert_answers_are_read_alike(encoder, range(200))
