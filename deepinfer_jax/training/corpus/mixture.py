"""Items by task, split, seed and index, and endless mixtures of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from deepinfer_jax.training.corpus import (
    arithmetic,
    extraction,
    lists,
    needle,
    questions,
    smalltalk,
    story,
    tools,
    traces,
)
from deepinfer_jax.training.corpus.draw import SPLITS, Draw
from deepinfer_jax.training.corpus.records import Item, Message

_Make = Callable[[Draw, str, str, bool, int | None], Item]
_TASKS: dict[str, _Make] = {
    "story": story.make,
    "question": questions.make,
    "extraction": extraction.make,
    "arithmetic": arithmetic.make,
    "list": lists.make,
    "trace": traces.make,
    "needle": needle.make,
    "tool_call": tools.make_call,
    "tool_answer": tools.make_answer,
    "talk": smalltalk.make,
}
TASKS = tuple(_TASKS)
_EFFORTS = ("high",) * 8 + ("low", "max")
_SYSTEMS = ("Be brief.", "You are nano.", "You are a helpful assistant.", "Answer the question.")

THINKING_TASKS = frozenset(TASKS) - {"story", "needle"}

# Share of each task in the items. Tool and needle items are many times as long as the others.
MIXTURE: Mapping[str, float] = {
    "story": 0.13,
    "question": 0.14,
    "extraction": 0.19,
    "arithmetic": 0.25,
    "list": 0.07,
    "trace": 0.07,
    "needle": 0.08,
    "tool_call": 0.02,
    "tool_answer": 0.04,
    "talk": 0.02,
}
# Weight of a learned token. Most tokens of a story are free choices; answers are not.
TOKEN_WEIGHTS: Mapping[str, float] = dict.fromkeys(TASKS, 4.0) | {"story": 1.0, "needle": 8.0}
# Added for a token that copies a name or counts again: without it those are 1.6 % of the loss, and
# names get mixed up.
COPY_WEIGHT = 8.0


def make_item(
    task: str,
    *,
    split: str,
    seed: int,
    index: int,
    thinking: bool = False,
    tokens: int | None = None,
) -> Item:
    """Returns one item, a function of the arguments only.

    Args:
        task: one of `TASKS`.
        split: train, validation or test: different seeds and different entities.
        seed: names a stream of items.
        index: place in the stream.
        thinking: with reasoning; only for `THINKING_TASKS`.
        tokens: length of a needle item; only for needle.
    """
    if task not in _TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}.")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}.")
    if thinking and task not in THINKING_TASKS:
        raise ValueError(f"task {task!r} has no thinking form: use thinking=False.")
    if tokens is not None and (task != "needle" or tokens < needle.MIN_TOKENS):
        raise ValueError(f"tokens={tokens} needs task 'needle' and at least {needle.MIN_TOKENS}.")
    key = f"{split}/{task}/{seed}/{index}/{int(thinking)}"
    draw = Draw(key)
    return _vary(_TASKS[task](draw, split, key, thinking, tokens), draw)


def _vary(item: Item, draw: Draw) -> Item:
    """Draws the effort of a thinking item, and now and then a system turn."""
    if item.is_raw:
        return item
    messages = item.messages
    if messages[0].role != "system" and draw.chance(0.1):
        messages = (Message(role="system", content=draw.pick(_SYSTEMS)), *messages)
    effort = draw.pick(_EFFORTS) if item.thinking else item.effort
    return replace(item, messages=messages, effort=effort)


def items(
    split: str,
    *,
    seed: int,
    count: int,
    start: int = 0,
    max_tokens: int = 512,
    mixture: Mapping[str, float] = MIXTURE,
    thinking_rate: float = 0.3,
) -> Iterator[Item]:
    """Yields `count` items of a mixture from place `start`; any place can be computed alone.

    Needle contexts are drawn up to `max_tokens`; no other task depends on it.
    """
    names, total = tuple(mixture), sum(mixture.values())
    for index in range(start, start + count):
        draw = Draw("mixture", split, seed, index)
        point, task = draw.uniform() * total, names[-1]
        for name in names:
            point -= mixture[name]
            if point < 0:
                task = name
                break
        thinking = task in THINKING_TASKS and draw.chance(thinking_rate)
        tokens = None
        if task == "needle":
            longest = min(max(max_tokens, needle.MIN_TOKENS), needle.MAX_TOKENS)
            tokens = needle.draw_length(draw, longest)
        yield make_item(task, split=split, seed=seed, index=index, thinking=thinking, tokens=tokens)
