"""The tokenizer of nano: size, control tokens, bytes, digits, recipe, determinism."""

import hashlib
import json
from pathlib import Path

import pytest

import deepinfer_jax
from deepinfer_jax.model.engram.vocabulary import reduction_key
from deepinfer_jax.training.corpus.lexicon import names
from deepinfer_jax.training.tokenizer import (
    FIRST_TOKENS,
    LAST_TOKENS,
    VOCAB_SIZE,
    load,
    tokenizer_config,
    train,
)

FOLDER = Path(deepinfer_jax.__file__).parent / "data" / "nano"
SHA256 = "8eb944b1020aa78d55d3998269ac41c3f888fa69a4bb5eb1edf8d89df8385fad"


@pytest.fixture(scope="module")
def tokenizer():
    return load()


@pytest.fixture(scope="module")
def recipe_tokenizer():
    import deepseek_recipe as recipe

    return recipe.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_file_is_the_trained_one():
    assert hashlib.sha256((FOLDER / "tokenizer.json").read_bytes()).hexdigest() == SHA256
    config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config == tokenizer_config()


@pytest.mark.slow
def test_training_again_gives_the_file():
    content = json.dumps(train(), ensure_ascii=False) + "\n"
    assert hashlib.sha256(content.encode()).hexdigest() == SHA256


def test_training_is_deterministic():
    assert train(count=4) == train(count=4)


def test_size_and_order(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 2048
    spelled = [tokenizer.id_to_token(i) for i in range(VOCAB_SIZE)]
    assert None not in spelled
    assert len(set(spelled)) == VOCAB_SIZE
    assert tuple(spelled[:3]) == FIRST_TOKENS
    assert tuple(spelled[-len(LAST_TOKENS) :]) == LAST_TOKENS


def test_every_control_token_of_recipe_is_one_id(tokenizer):
    import deepseek_recipe as recipe

    kinds = [getattr(recipe.SpecialToken, k) for k in dir(recipe.SpecialToken) if k[0].isupper()]
    spellings = {kind.default_str() for kind in kinds}
    assert len(spellings) == 18
    assert spellings <= {*FIRST_TOKENS, *LAST_TOKENS}
    for text in spellings:
        assert ids(tokenizer, text) == [tokenizer.token_to_id(text)]


def test_all_bytes_round_trip(tokenizer):
    from tokenizers.pre_tokenizers import ByteLevel

    assert all(tokenizer.token_to_id(c) is not None for c in ByteLevel.alphabet())
    # Every byte that UTF-8 can hold.
    points = [*range(0x800), *range(0x800, 0x11000, 61), *range(0x10000, 0x110000, 4099)]
    text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
    assert len(set(text.encode())) == 256 - 13
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text
    for space in ("  a \n\n b\t c  ", "a  b", " a", "x\r\ny"):
        assert tokenizer.decode(ids(tokenizer, space)) == space


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.encode("12345", add_special_tokens=False).tokens == list("12345")
    for i in range(VOCAB_SIZE - len(LAST_TOKENS)):
        text = tokenizer.id_to_token(i)
        assert len(text) == 1 or "place▁holder" in text or not any(c.isdigit() for c in text)


def test_names_of_all_splits_have_alike_ids(tokenizer):
    for split in ("train", "validation", "test"):
        sizes = [len(ids(tokenizer, " " + name)) for name in names(split)]
        assert min(sizes) == 2
        assert sum(s == 2 for s in sizes) > 0.95 * len(sizes)


def test_engram_reduction_has_the_reported_size(tokenizer):
    keys = {
        reduction_key(tokenizer.decode([i], skip_special_tokens=False), tokenizer.id_to_token(i))
        for i in range(VOCAB_SIZE)
    }
    assert len(keys) == 1557


def test_recipe_encodes_every_kind_of_turn(tokenizer, recipe_tokenizer):
    import deepseek_recipe as recipe

    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe_tokenizer)
    tool = recipe.ToolDefinition("add", "Adds.", {"type": "object", "properties": {}})
    call = recipe.ToolCall("c", "add", '{"a": 1, "b": "x"}')
    conversation = recipe.Conversation(
        [
            recipe.SystemMessage("Be brief."),
            recipe.UserMessage("Add."),
            recipe.AssistantMessage("", "I add.", [call]),
            recipe.ToolMessage("1", "c"),
        ],
        tools=[tool],
    )
    text = encoding.render_conversation(conversation).prompt
    assert encoding.encode(conversation) == ids(tokenizer, text)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_user_text_cannot_spell_a_control_token(tokenizer, recipe_tokenizer):
    import deepseek_recipe as recipe

    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe_tokenizer)
    user = LAST_TOKENS[4]
    conversation = recipe.Conversation([recipe.UserMessage(user)], thinking_mode=False)
    assert encoding.encode(conversation).count(tokenizer.token_to_id(user)) == 1
