"""List operations on numbers of up to two digits, and on words."""

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw, in_split
from deepinfer_jax.training.corpus.records import Item, Message

_WORDS = (*lexicon.NOUNS, *lexicon.THINGS, *lexicon.COLORS, *lexicon.ANIMALS)


def join(values: list[str]) -> str:
    """Returns the list as text; an empty list is none."""
    return ", ".join(values) or "none"


@dataclass(frozen=True, slots=True)
class _Operation:
    """The request, the answer, and the scratchpad of one operation on numbers."""

    asks: tuple[str, ...]
    answer: Callable[[list[int], int], str]
    think: Callable[[list[int], int], str]


def _numbers(values: list[int]) -> str:
    return join([str(v) for v in values])


def _selection(values: list[int], *, largest: bool) -> str:
    """Selection sort in words: each step takes one value and names what is left."""
    left, steps = list(values), []
    while left:
        best = max(left) if largest else min(left)
        left.remove(best)
        steps.append(f"Take {best}, left {_numbers(left)}.")
    return " ".join(steps)


def _running(values: list[int], *, largest: bool) -> str:
    best, steps = values[0], [str(values[0])]
    for value in values[1:]:
        best = max(best, value) if largest else min(best, value)
        steps.append(str(best))
    return f"Best so far: {', '.join(steps)}."


def _verdicts(values: list[int], keep: Callable[[int], bool]) -> str:
    return " ".join(f"{v} {'yes' if keep(v) else 'no'}." for v in values)


def _counting(values: list[int], _: int) -> str:
    return " ".join(f"{v} is {i}." for i, v in enumerate(values, 1))


_OPERATIONS: dict[str, _Operation] = {
    "sort": _Operation(
        ("Sort these numbers: {list}", "Put these numbers in order from small to large: {list}"),
        lambda v, k: _numbers(sorted(v)),
        lambda v, k: _selection(v, largest=False),
    ),
    "sort_down": _Operation(
        ("Put these numbers in order from large to small: {list}",),
        lambda v, k: _numbers(sorted(v, reverse=True)),
        lambda v, k: _selection(v, largest=True),
    ),
    "reverse": _Operation(
        ("Reverse this list: {list}", "Write this list backwards: {list}"),
        lambda v, k: _numbers(v[::-1]),
        lambda v, k: f"The last is {v[-1]}, the first is {v[0]}.",
    ),
    "max": _Operation(
        ("What is the largest number of {list}?", "Find the maximum: {list}"),
        lambda v, k: str(max(v)),
        lambda v, k: _running(v, largest=True),
    ),
    "min": _Operation(
        ("What is the smallest number of {list}?", "Find the minimum: {list}"),
        lambda v, k: str(min(v)),
        lambda v, k: _running(v, largest=False),
    ),
    "count": _Operation(
        ("How many numbers are in this list? {list}", "Count these numbers: {list}"),
        lambda v, k: str(len(v)),
        _counting,
    ),
    "filter_above": _Operation(
        ("Keep the numbers greater than {k}: {list}",),
        lambda v, k: _numbers([x for x in v if x > k]),
        lambda v, k: _verdicts(v, lambda x: x > k),
    ),
    "filter_even": _Operation(
        ("Keep the even numbers: {list}",),
        lambda v, k: _numbers([x for x in v if x % 2 == 0]),
        lambda v, k: _verdicts(v, lambda x: x % 2 == 0),
    ),
}
_WORD_OPERATIONS: dict[str, tuple[str, Callable[[list[str]], str]]] = {
    "reverse": ("Reverse this list: {list}", lambda v: join(v[::-1])),
    "count": ("How many words are in this list? {list}", lambda v: str(len(v))),
    "first": ("What is the first word of this list? {list}", lambda v: v[0]),
    "last": ("What is the last word of this list? {list}", lambda v: v[-1]),
    "sort": ("Sort these words: {list}", lambda v: join(sorted(v))),
}


def _draw_list(draw: Draw, split: str, pool: tuple[str, ...]) -> list[str]:
    while True:
        values = draw.sample(pool, draw.between(3, 7))
        if in_split(split, "list", join(values)):
            return values


_DIGITS = tuple(str(n) for n in range(100))


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns one list operation; word lists are never in thinking mode."""
    if not thinking and draw.chance(0.25):
        words = _draw_list(draw, split, _WORDS)
        kind = draw.pick(tuple(_WORD_OPERATIONS))
        ask, solve = _WORD_OPERATIONS[kind]
        text, question, answer = join(words), ask, solve(words)
        reasoning, bound = "", 0
    else:
        values = [int(v) for v in _draw_list(draw, split, _DIGITS)]
        kind = draw.pick(tuple(_OPERATIONS))
        operation = _OPERATIONS[kind]
        bound = draw.between(5, 80)
        text, question = _numbers(values), draw.pick(operation.asks)
        answer = operation.answer(values, bound)
        reasoning = operation.think(values, bound) if thinking else ""
    return Item(
        task="list",
        key=key,
        answer=answer,
        messages=(
            Message(role="user", content=question.format(list=text, k=bound)),
            Message(role="assistant", content=answer, reasoning=reasoning),
        ),
        thinking=thinking,
        meta={"kind": kind, "problem": text},
    )
