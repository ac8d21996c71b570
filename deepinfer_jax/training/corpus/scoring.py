"""Exact scorers: whether a written text is the expected answer of an item."""

import json
import re
from collections.abc import Callable

from deepinfer_jax.training.corpus.records import Item
from deepinfer_jax.training.corpus.story import check_story
from deepinfer_jax.training.corpus.template import DSML, EOS, THINK_END, parse_calls

_INTEGER = re.compile(r"-?\d+")
_KINDS = {"string": str, "integer": int}


def final_answer(text: str) -> str:
    """Returns a text without reasoning and end of sentence."""
    return text.rpartition(THINK_END)[2].removesuffix(EOS).strip()


def _same(item: Item, answer: str) -> bool:
    return answer == item.answer.strip()


def _same_list(item: Item, answer: str) -> bool:
    return [p.strip() for p in answer.split(",")] == [p.strip() for p in item.answer.split(",")]


def _last_integer(item: Item, answer: str) -> bool:
    found = _INTEGER.findall(answer.rstrip("."))
    return bool(found) and int(found[-1]) == item.meta["result"]


def _same_json(item: Item, answer: str) -> bool:
    """Same keys in the same order and the same values, with nothing around them."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    expected = json.loads(item.meta["value"])
    # The text form also compares the order of keys and tells 1 from true and 1.0.
    return json.dumps(value) == json.dumps(expected)


def _consistent_story(item: Item, answer: str) -> bool:
    alone = check_story(answer)
    return alone.sentences > 0 and check_story(f"{item.prompt} {answer}").consistent


def calls_are_valid(item: Item, text: str) -> bool:
    """Says whether the calls of a text name declared tools with exactly their typed parameters."""
    answer = text.rpartition(THINK_END)[2].removesuffix(EOS)
    try:
        _, calls = parse_calls(answer)
    except ValueError:
        return False
    declared = {tool.name: json.loads(tool.parameters) for tool in item.tools}
    for call in calls:
        if call.name not in declared:
            return False
        properties = declared[call.name]["properties"]
        arguments = json.loads(call.arguments)
        if list(arguments) != list(properties):
            return False
        if any(type(v) is not _KINDS[properties[k]["type"]] for k, v in arguments.items()):
            return False
    return bool(calls)


def _same_calls(item: Item, text: str) -> bool:
    expected = item.messages[-1]
    if not expected.calls:
        return DSML not in text and final_answer(text) == item.answer
    if not calls_are_valid(item, text):
        return False
    content, calls = parse_calls(text.rpartition(THINK_END)[2].removesuffix(EOS))
    return content.strip() == expected.content and calls == expected.calls


_SCORERS: dict[str, Callable[[Item, str], bool]] = {
    "story": _consistent_story,
    "question": _same,
    "extraction": _same_json,
    "arithmetic": _last_integer,
    "list": _same_list,
    "trace": _same,
    "needle": _same,
    "tool_answer": _same,
    "talk": _same,
}
#: Tasks about drawings, which are made elsewhere (`training.drawings`).
_DRAWINGS = "vision_"


def check(item: Item, answer_text: str) -> bool:
    """Says whether a text answers an item: exact values, after reasoning is taken off.

    A story passes if prompt and text together hold no contradiction (`check_story`).
    """
    if item.task == "tool_call":
        return _same_calls(item, answer_text)
    if item.task.startswith(_DRAWINGS):
        return _same(item, final_answer(answer_text))
    return _SCORERS[item.task](item, final_answer(answer_text))
