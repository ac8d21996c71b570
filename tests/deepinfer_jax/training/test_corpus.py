"""Items: determinism, splits, the V4.1 text against recipe, labels."""

import hashlib
import re
from itertools import combinations

import pytest

from deepinfer_jax.training.corpus import (
    MIXTURE,
    TASKS,
    THINKING_TASKS,
    expected_text,
    full_text,
    items,
    make_item,
    prompt_text,
    render,
    render_batch,
)
from deepinfer_jax.training.corpus.draw import SPLITS, Draw
from deepinfer_jax.training.corpus.encode import COMPLETION, PROMPT, TEXT
from deepinfer_jax.training.corpus.lexicon import names, places
from deepinfer_jax.training.corpus.reference import (
    recipe_conversation,
    recipe_prompt,
    recipe_text,
)
from deepinfer_jax.training.tokenizer import load

MODES = [(t, False) for t in TASKS] + [(t, True) for t in TASKS if t in THINKING_TASKS]
# Text of the first 300 items of the train split, seed 0.
CORPUS_SHA256 = "a33824b81d7d3ffee723c1a4a5f7737bb392f3a75dd31823431bb4ef58e31e7f"
PAIR = re.compile(r"(?=(?<!\d)(\d+ [+-] \d+)(?!\d))")


def few(task, thinking, split="train", count=25):
    tokens = 260 if task == "needle" else None
    return [
        make_item(task, split=split, seed=3, index=i, thinking=thinking, tokens=tokens)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return load()


@pytest.fixture(scope="module")
def by_split():
    return {split: list(items(split, seed=1, count=2000)) for split in SPLITS}


def test_the_same_seed_gives_the_same_bytes_everywhere():
    text = "\0".join(full_text(item) for item in items("train", seed=0, count=300))
    assert hashlib.sha256(text.encode()).hexdigest() == CORPUS_SHA256


def test_any_place_of_a_stream_can_be_computed_alone():
    whole = list(items("train", seed=5, count=40))
    assert list(items("train", seed=5, count=10, start=30)) == whole[30:]
    assert list(items("train", seed=6, count=40)) != whole


def test_draws_cover_their_range_and_sample_without_repetition():
    draw = Draw("range")
    assert {draw.between(2, 4) for _ in range(200)} == {2, 3, 4}
    for size in (3, 5, 50):
        assert len(set(draw.sample(range(size), 3))) == 3
    assert sorted(draw.shuffled(range(9))) == list(range(9))


@pytest.mark.parametrize(("task", "thinking"), MODES)
def test_text_is_what_recipe_renders(task, thinking):
    for item in few(task, thinking):
        assert prompt_text(item) + expected_text(item) == full_text(item)
        if item.is_raw:
            continue
        assert prompt_text(item) == recipe_prompt(item)
        assert full_text(item) == recipe_text(item)


@pytest.mark.parametrize(("task", "thinking"), MODES)
def test_ids_are_what_recipe_encodes(task, thinking, tokenizer):
    from pathlib import Path

    import deepseek_recipe as recipe

    import deepinfer_jax

    path = Path(deepinfer_jax.__file__).parent / "data" / "nano" / "tokenizer.json"
    own = recipe.Tokenizer.from_file(str(path))
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(own)
    for item in few(task, thinking, count=8):
        if not item.is_raw:
            prompt = encoding.encode(recipe_conversation(item, whole=False))
            assert render(item, tokenizer).ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize(("task", "thinking"), MODES)
def test_labels_mark_exactly_what_the_model_writes(task, thinking, tokenizer):
    for rendered in render_batch(few(task, thinking), tokenizer):
        item, ids, labels = rendered.item, rendered.ids, rendered.labels
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == rendered.text
        if task == "story":
            assert labels[0] == PROMPT
            assert set(labels[1:]) == {TEXT}
            continue
        learned = tokenizer.decode(ids[labels == COMPLETION].tolist(), skip_special_tokens=False)
        written = [expected_text(item)]
        if task in ("tool_answer", "talk", "needle"):
            earlier = [m for m in item.messages[:-1] if m.role == "assistant"]
            assert learned.count("<｜end▁of▁sentence｜>") == len(earlier) + 1  # noqa: RUF001
            assert learned.endswith(written[0])
        else:
            assert learned == written[0]


def test_default_mixture_covers_every_task_and_mode(by_split):
    assert set(MIXTURE) == set(TASKS) == {item.task for item in by_split["train"]}
    assert any(item.thinking for item in by_split["train"])
    assert any(item.schema for item in by_split["train"])
    assert {item.effort for item in by_split["train"]} == {"low", "high", "max"}


def test_evaluation_entities_never_occur_in_training_text(by_split):
    words, pairs = set(), set()
    for item in by_split["train"]:
        text = full_text(item)
        words.update(re.findall(r"\w+", text))
        pairs.update(PAIR.findall(text))
    for split in ("validation", "test"):
        entities = {entity for item in by_split[split] for entity in item.entities}
        assert len(entities) > 500
        assert not entities & (words | pairs)
        assert not words & {*names(split), *places(split)}


def test_entities_and_problems_of_splits_are_disjoint(by_split):
    for one, two in combinations(SPLITS, 2):
        assert not set(names(one)) & set(names(two))
        assert not set(places(one)) & set(places(two))
        for kind in (
            lambda item: item.entities,
            lambda item: (item.meta["problem"],) if "problem" in item.meta else (),
        ):
            first, second = (
                {entity for item in by_split[split] for entity in kind(item)}
                for split in (one, two)
            )
            assert first
            assert not first & second


def test_names_are_no_other_words_of_the_corpus(by_split):
    lower = {
        word for item in by_split["train"] for word in re.findall(r"\b[a-z]+\b", full_text(item))
    }
    assert not {n.lower() for s in SPLITS for n in (*names(s), *places(s))} & lower


@pytest.mark.parametrize("tokens", [200, 256, 1000, 4000])
def test_needle_fits_its_length(tokens, tokenizer):
    for index in range(4):
        item = make_item("needle", split="test", seed=0, index=index, tokens=tokens)
        assert 0.8 * tokens <= len(render(item, tokenizer).ids) <= tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "poem"}, "task must be one of"),
        ({"split": "dev"}, "split must be one of"),
        ({"task": "needle", "thinking": True}, "no thinking form"),
        ({"task": "list", "tokens": 400}, "needs task 'needle'"),
        ({"task": "needle", "tokens": 10}, "at least 64"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_item(**({"task": "story", "split": "train", "seed": 0, "index": 0} | arguments))
