"""Scorers: the expected text passes, near misses do not."""

import contextlib
import io
import json

import pytest

from deepinfer_jax.training.corpus import (
    TASKS,
    THINKING_TASKS,
    calls_are_valid,
    check,
    check_story,
    expected_text,
    make_item,
)

MODES = [(t, False) for t in TASKS] + [(t, True) for t in TASKS if t in THINKING_TASKS]


def few(task, thinking=False, count=40):
    tokens = 220 if task == "needle" else None
    return [
        make_item(task, split="test", seed=8, index=i, thinking=thinking, tokens=tokens)
        for i in range(count)
    ]


@pytest.mark.parametrize(("task", "thinking"), MODES)
def test_expected_text_passes_and_others_fail(task, thinking):
    for item in few(task, thinking):
        text = expected_text(item)
        assert check(item, text)
        assert check(item, item.answer or text)
        assert not check(item, "")
        assert not check(item, "I do not know.")


@pytest.mark.parametrize("task", ["question", "trace", "needle", "tool_answer", "talk"])
def test_answers_with_more_or_less_fail(task):
    for item in few(task):
        assert not check(item, item.answer + " And more.")
        assert not check(item, item.answer[:-1])


def test_the_last_number_decides_sums():
    item = next(i for i in few("arithmetic") if not i.is_raw)
    result = item.meta["result"]
    assert check(item, f"The result is {result}.")
    assert not check(item, f"{item.answer[: -len(str(result))]}{result + 1}")
    assert not check(item, f"{result}0")


def test_column_steps_are_correct():
    for item in few("arithmetic", thinking=True, count=300):
        steps = item.messages[-1].reasoning
        written = [s.split("write ")[1] for s in steps.split(". ") if "write " in s]
        digits = "".join(d.strip(".") for d in reversed(written))
        digits = "1" + digits if steps.endswith("Write 1.") else digits
        assert int(digits) == item.meta["result"]
        for step in steps.split(". "):
            if "=" in step:
                left, right = step.split(",")[0].split(" = ")
                assert eval(left) == int(right)


def test_lists_compare_values_in_order():
    item = next(i for i in few("list") if i.answer.count(",") > 1)
    parts = item.answer.split(", ")
    assert check(item, ",".join(parts))
    assert not check(item, ", ".join([*parts[1:], parts[0]]))
    assert not check(item, ", ".join(parts[1:]))


def test_json_needs_keys_values_types_and_order():
    item = few("extraction")[0]
    value = json.loads(item.meta["value"])
    assert check(item, json.dumps(value, indent=1))
    assert not check(item, json.dumps(dict(reversed(value.items()))))
    assert not check(item, json.dumps({k: str(v) + "x" for k, v in value.items()}))
    assert not check(item, json.dumps(value) + " Done.")
    assert not check(item, "```json\n" + json.dumps(value) + "\n```")
    numbers = next(i for i in few("extraction") if '"age": ' in i.answer)
    age = json.loads(numbers.meta["value"])["age"]
    assert not check(numbers, numbers.answer.replace(f'"age": {age}', f'"age": "{age}"'))


def test_printed_lines_are_what_python_prints():
    for item in few("trace", count=200):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(item.meta["problem"], {})
        assert out.getvalue().rstrip("\n") == item.answer


def test_calls_need_the_exact_form():
    item = next(
        i for i in few("tool_call") if i.messages[-1].calls and 'string="true"' in expected_text(i)
    )
    text = expected_text(item)
    name = item.messages[-1].calls[0].name
    assert calls_are_valid(item, text)
    for wrong in (
        text.replace(f'name="{name}"', 'name="other"'),
        text.replace('string="true"', 'string="false"'),
        text.replace(" parameter", "parameter"),
        text.replace(" invoke>\n", " invoke>", 1),
        text.replace(" calls>\n", " calls>", 1),
        text.partition("</")[0],
    ):
        assert wrong != text
        assert not calls_are_valid(item, wrong)
        assert not check(item, wrong)
    assert not check(item, "Let me see." + text)


def test_valid_calls_with_another_value_are_valid_but_wrong():
    item = next(i for i in few("tool_call") if "get_weather" in expected_text(i)[:120])
    city = json.loads(item.messages[-1].calls[0].arguments)["city"]
    text = expected_text(item).replace(city, "Elsewhere")
    assert calls_are_valid(item, text)
    assert not check(item, text)


STORY = "Mara lives in Oakford. Mara has 5 apples. Tolin has 2 apples. "


@pytest.mark.parametrize(
    "text",
    [
        "Mara gives 2 apples to Tolin. Tolin has 4 apples. Now Mara has 3 apples.",
        "Mara eats 1 apple. Mara has 4 apples. Mara buys 1 apple. Mara has 5 apples.",
        "Mara puts the key in the box. Tolin takes the key from the box.",
        'Mara goes to the park. Mara is at the park. Tolin says "Thank you!" to Mara. Mara',
    ],
)
def test_consistent_continuations_pass(text):
    assert check_story(STORY + text).consistent


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Mara lives in Millton.", "home Mara is Oakford"),
        ("Mara gives 6 apples to Tolin.", "cannot lose 6"),
        ("Mara gives 1 apple to Tolin. Tolin has 2 apples.", "count Tolin apple is 3, not 2"),
        ("Mara gives 1 apple to Mara.", "cannot give"),
        ("Mara goes to the park. Mara is at the river.", "at Mara is park, not river"),
        ("Mara puts the key in the box. The key is in the bag.", "in key is box"),
        ("It is a sunny day. It is a rainy day.", "weather is sunny"),
        ("Mara is a baker. Mara is a pilot.", "job Mara is baker"),
    ],
)
def test_contradictions_are_found(text, problem):
    report = check_story(STORY + text)
    assert not report.consistent
    assert problem in report.contradictions[0]


def test_unknown_sentences_and_loops_are_not_consistent():
    unknown = check_story(STORY + "Colourless ideas sleep.")
    assert not unknown.contradictions
    assert unknown.unknown == ("Colourless ideas sleep.",)
    assert not unknown.consistent
    assert check_story(STORY + "Mara is happy. " * 3).repeated == 3
    assert not check_story(STORY + "Mara is happy. " * 3).consistent
    assert not check_story("").consistent


@pytest.mark.parametrize("end", ['says "Thank you!', 'says "Thank you!"', 'says "Tha', "says"])
def test_a_sentence_cut_in_its_quotation_is_unfinished_not_unknown(end):
    report = check_story(f"Mara lives in Oakford. Bela {end}")
    assert report.sentences == report.known == 1
    whole = check_story('Mara lives in Oakford. Bela says "Thank you!" to Mara.')
    assert whole.sentences == whole.known == 2
