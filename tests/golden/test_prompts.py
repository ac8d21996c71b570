"""prompts_v41.json: 16 conversations rendered for both encodings, every key of the file used."""

import json
from pathlib import Path

import deepseek_recipe as recipe
import pytest
import tokenizers

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.messages import build_conversation
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.presets import preset

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
GOLDEN = json.loads((FIXTURES / "prompts_v41.json").read_text(encoding="utf-8"))
CONVERSATIONS = GOLDEN["conversations"]
TOKENIZER = FIXTURES / "tiny_v41" / "tokenizer.json"
CONFIGS = {"v41": FIXTURES / "tiny_v41", "v4": FIXTURES / "tiny_v4"}
OTHER_IMAGE = "<\uff5cdeepseek_image\uff5c>"


def encoder(encoding, tokenizer=None):
    tokenizer = tokenizer or tokenizers.Tokenizer.from_file(str(TOKENIZER))
    return ChatEncoder(tokenizer, read_config(CONFIGS[encoding]))


@pytest.fixture(scope="module", params=["v41", "v4"])
def both(request):
    return request.param, encoder(request.param)


def conversation_of(given, image=GOLDEN["special_tokens"]["Image"]):
    """The recipe conversation of a golden input, through our own checks where it has no images."""
    given = dict(given)
    schema, regex = given.pop("response_schema"), given.pop("response_regex")
    form = {"type": given.pop("response_format")}
    if form["type"] == "json_schema":
        form["json_schema"] = {"schema": schema}
    assert (schema is None) == (form["type"] != "json_schema")
    assert regex is None
    messages = given.pop("messages")
    thinking, effort = given.pop("thinking_mode"), given.pop("reasoning_effort")
    tools, choice = given.pop("tools"), given.pop("tool_choice")
    assert not given
    if any("n_images" in message for message in messages):
        # As the server will: parts of a body are joined by an empty line, this one is not.
        (message,) = messages
        assert message.keys() == {"role", "content", "n_images"}
        assert message["role"] == "user"
        assert (tools, choice, effort, form["type"]) == (None, "auto", None, "text")
        text = message["content"].replace(GOLDEN["special_tokens"]["Image"], image)
        source = recipe.UrlImageSource("https://example.org/a.png")
        user = recipe.UserMessage(text, [source] * message["n_images"], image_token=image)
        return recipe.Conversation([user], thinking_mode=thinking)
    return build_conversation(
        messages,
        thinking=thinking,
        reasoning_effort=effort,
        tools=tools,
        tool_choice=choice,
        response_format=form,
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_text_and_special_ranges_are_the_golden_ones(name, both):
    encoding, own = both
    golden = CONVERSATIONS[name][encoding]
    rendered = own.render(conversation_of(CONVERSATIONS[name]["input"]))
    assert rendered.text == golden["prompt"]
    assert [list(pair) for pair in rendered.special_ranges] == golden["special_ranges"]
    assert [rendered.text[a:b] for a, b in rendered.special_ranges] == golden["specials"]


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if "image" not in name])
def test_ids_are_special_ids_in_the_ranges_and_plain_text_between(name, both):
    encoding, own = both
    golden = CONVERSATIONS[name][encoding]
    bare = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in bare["added_tokens"]}
    bare["added_tokens"] = []
    plain = tokenizers.Tokenizer.from_str(json.dumps(bare))
    expected, at = [], 0
    for start, end in golden["special_ranges"]:
        expected += plain.encode(golden["prompt"][at:start]).ids
        expected.append(special[golden["prompt"][start:end]])
        at = end
    expected += plain.encode(golden["prompt"][at:]).ids
    ids = own.encode(conversation_of(CONVERSATIONS[name]["input"]))
    assert list(ids) == expected
    in_ranges = [token for token in ids if token in special.values()]
    assert in_ranges == [special[text] for text in golden["specials"]]


def test_image_token_is_spelled_as_the_checkpoint_spells_its_id():
    image = GOLDEN["special_tokens"]["Image"]
    renamed = tokenizers.Tokenizer.from_str(
        TOKENIZER.read_text(encoding="utf-8").replace(image, OTHER_IMAGE)
    )
    own = encoder("v41", renamed)
    entry = CONVERSATIONS["09_image_user"]
    rendered = own.render(conversation_of(entry["input"], OTHER_IMAGE))
    assert rendered.text == entry["v41"]["prompt"].replace(image, OTHER_IMAGE)
    specials = [rendered.text[a:b] for a, b in rendered.special_ranges]
    assert specials == [text.replace(image, OTHER_IMAGE) for text in entry["v41"]["specials"]]
    assert OTHER_IMAGE in specials


def test_special_tokens_are_spelled_as_in_the_file(both):
    _, own = both
    kinds = {name: getattr(recipe.SpecialToken, name) for name in GOLDEN["special_tokens"]}
    found = {name: own.special_tokens.token(kind) for name, kind in kinds.items()}
    assert found == GOLDEN["special_tokens"]


def test_image_token_id_is_that_of_the_released_config():
    assert preset("deepseek-v4.1-flash").image_token_id == GOLDEN["image_special_token_id"]


def test_every_key_of_the_file_is_used_above():
    assert GOLDEN.keys() == {"special_tokens", "image_special_token_id", "conversations"}
    assert len(CONVERSATIONS) == 16
    fields = {"messages", "thinking_mode", "tools", "tool_choice", "reasoning_effort"}
    fields |= {"response_format", "response_schema", "response_regex"}
    for entry in CONVERSATIONS.values():
        assert entry.keys() == {"input", "v41", "v4"}
        assert entry["input"].keys() == fields
        for encoding in ("v41", "v4"):
            assert entry[encoding].keys() == {"prompt", "special_ranges", "specials"}
