"""Evaluation of a checkpoint on corpus items of a held-out split, with exact scorers.

Answers are greedy, stories are sampled. Everything is a function of (checkpoint, numerics, level,
rows, seed): at level "batch" the grouping below is without effect on any token.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count as counting
from typing import ClassVar

import numpy as np

from deepinfer_jax.config.model import Replay
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.output import RequestOutput
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.llm import LLM
from deepinfer_jax.loading import Model
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.training.corpus import (
    Item,
    calls_are_valid,
    check,
    check_story,
    expected_text,
    full_text,
    make_item,
    prompt_text,
)
from deepinfer_jax.training.drawings import DRAWING_TASKS, make_drawing_item
from deepinfer_jax.vision.image import ImageInput, read_image

SPLIT = "test"
# A judged story continuation: about nine sentences, sampled: a story has no likeliest next event,
# and greedy text repeats one.
STORY_TOKENS, STORY_TEMPERATURE = 64, 0.7
# Larger steps are no faster on a CPU and need more memory.
MAX_SEQS, STEP_ROWS = 32, 64
REPORT_EVERY = 64  # answers
# Sequences up to this length share a cache size; longer ones have the next powers of two.
SHORTEST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: which items of the corpus, and how they are answered.

    count: items by default. start: place in the stream of the first one. tokens: length of needle
    items. sign: keeps arithmetic items of this sign only. temperature, max_tokens: 0 and None (what
    the expected text needs and half as much again) unless given.
    """

    name: str
    task: str
    count: int
    start: int = 0
    thinking: bool = False
    tokens: int | None = None
    sign: str = ""
    temperature: float = 0.0
    max_tokens: int | None = None


ROWS = (
    Row(
        name="story",
        task="story",
        count=20,
        temperature=STORY_TEMPERATURE,
        max_tokens=STORY_TOKENS,
    ),
    Row(name="question", task="question", count=40),
    Row(name="extraction", task="extraction", count=60),
    Row(name="extraction-thinking", task="extraction", count=20, thinking=True),
    Row(name="arithmetic", task="arithmetic", count=40),
    Row(name="arithmetic-thinking", task="arithmetic", count=20, thinking=True),
    # Other items than those of "arithmetic".
    Row(name="addition", task="arithmetic", count=80, start=10_000, sign="+"),
    Row(name="list", task="list", count=30),
    Row(name="trace", task="trace", count=30),
    Row(name="needle-1k", task="needle", count=40, tokens=1000),
    Row(name="needle-4k", task="needle", count=5, tokens=4000),
    Row(name="needle-8k", task="needle", count=2, tokens=8000),
    Row(name="tool_call", task="tool_call", count=40),
    Row(name="tool_answer", task="tool_answer", count=20),
    Row(name="talk", task="talk", count=10),
)
#: Questions about drawings; asked of models that see.
VISION = tuple(Row(name=task, task=task, count=60) for task in DRAWING_TASKS)
LOOPS = Row(name="loops", task="story", count=20, start=20_000, temperature=0.7, max_tokens=200)
PERPLEXITY = Row(name="perplexity", task="story", count=16, start=30_000)
NAMES = (*(row.name for row in (*ROWS, *VISION)), LOOPS.name, PERPLEXITY.name)
TASK_NAMES = tuple(dict.fromkeys(row.task for row in (*ROWS, *VISION)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One item of a row as a request: prompt ids, images of their image tokens, and sampling."""

    __no_type_check__: ClassVar[bool] = True  # made here only

    row: Row
    item: Item
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    images: tuple[ImageInput, ...] = ()

    @property
    def length(self) -> int:
        """Most tokens of prompt and answer."""
        rows = sum(image.plan.num_tokens - 1 for image in self.images)
        return len(self.prompt_ids) + rows + self.params.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model wrote for an item. calls_valid: None where no tool call is expected."""

    row: str
    key: str
    text: str
    tokens: int
    finish_reason: str
    is_sampled: bool
    correct: bool
    calls_valid: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One line of the table. calls: items that expect a tool call; valid_calls: right in form."""

    name: str
    count: int
    correct: int
    mean_tokens: float
    calls: int = 0
    valid_calls: int = 0

    @property
    def rate(self) -> float:
        """Share of correct answers."""
        return self.correct / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Of whole stories after the begin-of-text token, end included; per token of this tokenizer."""

    stories: int
    tokens: int
    perplexity: float
    bits_per_character: float  # comparable between tokenizers


def choose_rows(names: Sequence[str] | None, count: int | None = None) -> tuple[Row, ...]:
    """Returns the rows of these names or tasks (None: all), each with `count` items if given.

    Raises:
        ConfigError: A name that is neither a row nor a task, or a count below 1.
    """
    rows = (*ROWS, *VISION, LOOPS, PERPLEXITY)
    unknown = [name for name in names or () if name not in NAMES + TASK_NAMES]
    if unknown or (names is not None and not names):
        raise ConfigError(
            f"tasks must be rows ({', '.join(NAMES)}) or tasks ({', '.join(TASK_NAMES)}), got "
            f"{unknown or 'none'}: correct the names"
        )
    if count is not None and count < 1:
        raise ConfigError(
            f"n must be at least 1 item a row, got {count}: leave it out, or raise it"
        )
    if names is not None:
        asked = (*ROWS, *VISION)
        rows = [r for r in rows if r.name in names or (r in asked and r.task in names)]
    return tuple(row if count is None else replace(row, count=count) for row in rows)


def demo_rows() -> tuple[Row, ...]:
    """Returns the rows of a demonstration: a story and an extraction, one item a seed."""
    shown = ("story", "extraction")
    return tuple(replace(row, count=1) for row in ROWS if row.name in shown)


def row_items(row: Row, seed: int) -> list[Item]:
    """Returns the items of a row, from the split that training never sees."""
    found: list[Item] = []
    for index in counting(row.start):
        if len(found) == row.count:
            return found
        item = make_item(
            row.task,
            split=SPLIT,
            seed=seed,
            index=index,
            thinking=row.thinking,
            tokens=row.tokens,
        )
        if item.meta.get("sign", "").startswith(row.sign):
            found.append(item)
    raise AssertionError("an endless stream has ended")


def make_trials(llm: LLM, row: Row, seed: int) -> list[Trial]:
    """Returns the items of a row as requests, each with a sampling seed of its own."""
    if row.task in DRAWING_TASKS:
        return _drawing_trials(llm, row, seed)
    items = row_items(row, seed)
    return [make_trial(llm, row, item, 1000 * seed + place) for place, item in enumerate(items)]


def _drawing_trials(llm: LLM, row: Row, seed: int) -> list[Trial]:
    config, tokenizer = llm.model.config, llm.model.tokenizer
    if config.vision is None or config.image_token_id is None or tokenizer is None:
        raise ConfigError(f"{row.name} asks about images: the model needs an image encoder")
    spelling = str(tokenizer.id_to_token(config.image_token_id))
    trials = []
    for place in range(row.start, row.start + row.count):
        item, pixels = make_drawing_item(
            row.task, split=SPLIT, seed=seed, index=place, image_token=spelling
        )
        image = read_image(pixels, config.vision)
        trials.append(replace(make_trial(llm, row, item), images=(image,)))
    return trials


def make_trial(llm: LLM, row: Row, item: Item, seed: int = 0) -> Trial:
    """Returns an item as a request; `seed` is of its sampling."""
    room = row.max_tokens
    if room is None:
        room = len(llm.encode(expected_text(item))) * 3 // 2 + 8
    params = SamplingParams(temperature=row.temperature, max_tokens=room, seed=seed)
    return Trial(row=row, item=item, prompt_ids=tuple(llm.encode(prompt_text(item))), params=params)


def run_trials(
    model: Model,
    trials: Sequence[Trial],
    *,
    workers: int = 1,
    replay: Replay = "off",
    report: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """Returns the judged answers in the order of the trials.

    Args:
        model: The checkpoint.
        trials: Of any rows; those of about one length share an engine.
        workers: Engines that run (and compile) at the same time, each in a thread.
        replay: What late layers see of a prompt (`RuntimeConfig.replay`).
        report: Called now and then with the number of new answers, from these threads.
    """
    answers: dict[int, Answer] = {}
    groups = length_groups([t.length for t in trials], model.config.max_position_embeddings)
    with ThreadPoolExecutor(workers) as pool:
        running = [
            pool.submit(
                _run_group,
                model,
                runtime_for(max_len, replay),
                [(p, trials[p]) for p in places],
                report,
            )
            for max_len, places in groups.items()
        ]
        for done in running:
            answers |= done.result()
    return [answers[place] for place in range(len(trials))]


def length_groups(lengths: Sequence[int], longest: int) -> dict[int, list[int]]:
    """Returns the places of sequences by the cache they need: a power of two, or `longest`.

    The longest come first, in the groups and in each of them.
    """
    groups: dict[int, list[int]] = {}
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        groups.setdefault(_cache_length(lengths[place], longest), []).append(place)
    return groups


def _cache_length(length: int, longest: int) -> int:
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def _run_group(
    model: Model,
    runtime: RuntimeConfig,
    group: list[tuple[int, Trial]],
    report: Callable[[int], None],
) -> dict[int, Answer]:
    """Returns the answers by place."""
    answers = {}
    with LLM(model, runtime=runtime) as llm:
        for start in range(0, len(group), REPORT_EVERY):
            part = group[start : start + REPORT_EVERY]
            images = [trial.images for _, trial in part]
            outputs = llm.generate(
                [list(trial.prompt_ids) for _, trial in part],
                [trial.params for _, trial in part],
                progress=False,
                **({"images": images} if any(images) else {}),
            )
            for (place, trial), output in zip(part, outputs, strict=True):
                answers[place] = judge(trial, output)
            report(len(part))
    return answers


def runtime_for(max_len: int, replay: Replay = "off") -> RuntimeConfig:
    """Returns capacities for sequences of `max_len`: many short ones, or few long ones."""
    seqs = max(1, MAX_SEQS * 1024 // max(max_len, 1024))
    return RuntimeConfig(
        max_seqs=seqs, max_tokens_per_step=STEP_ROWS, max_len=max_len, replay=replay
    )


def judge(trial: Trial, output: RequestOutput) -> Answer:
    """Returns the answer with its verdict; of a loop check, that no sentence came three times."""
    item, text = trial.item, output.text
    if trial.row.name == LOOPS.name:
        correct = check_story(f"{item.prompt}{text}").repeated < 3
    else:
        correct = check(item, text)
    expects_call = item.task == "tool_call" and bool(item.messages[-1].calls)
    return Answer(
        row=trial.row.name,
        key=item.key,
        text=text,
        tokens=len(output.token_ids),
        finish_reason=output.finish_reason,
        is_sampled=trial.params.temperature > 0,
        correct=correct,
        calls_valid=calls_are_valid(item, text) if expects_call else None,
    )


def summarise(answers: Iterable[Answer]) -> list[RowResult]:
    """Returns one result a row, rows in the order of their first answer."""
    by_row: dict[str, list[Answer]] = {}
    for answer in answers:
        by_row.setdefault(answer.row, []).append(answer)
    return [
        RowResult(
            name=name,
            count=len(own),
            correct=sum(a.correct for a in own),
            mean_tokens=sum(a.tokens for a in own) / len(own),
            calls=sum(a.calls_valid is not None for a in own),
            valid_calls=sum(a.calls_valid is True for a in own),
        )
        for name, own in by_row.items()
    ]


def flips(answers: Sequence[Answer], others: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Returns the pairs of answers to one item of which one is correct and the other is not.

    Sampled answers are left out: with other logits they are other draws.

    Raises:
        ValueError: The two are not answers to the same items in the same order.
    """
    pairs = list(zip(answers, others, strict=True))
    if any((a.row, a.key) != (b.row, b.key) for a, b in pairs):
        raise ValueError("flips compares answers to the same items in the same order")
    return [(a, b) for a, b in pairs if not a.is_sampled and a.correct != b.correct]


def story_perplexity(model: Model, row: Row, seed: int) -> Perplexity:
    """Returns the perplexity of the row's stories under teacher forcing.

    Raises:
        TokenizerError: The checkpoint has no tokenizer.
    """
    items = row_items(row, seed)
    encoded = [LLM(model).encode(full_text(item)) for item in items]
    most = _cache_length(max(map(len, encoded)) + 1, model.config.max_position_embeddings)
    with LLM(model, runtime=runtime_for(most)) as llm:
        scored = llm.score(encoded, progress=False)
    total = -sum(float(one.logprobs.sum(dtype=np.float64)) for one in scored)
    tokens = sum(len(one.logprobs) for one in scored)
    characters = sum(len(item.prompt) + len(item.answer) for item in items)
    return Perplexity(
        stories=len(items),
        tokens=tokens,
        perplexity=float(np.exp(total / tokens)),
        bits_per_character=total / float(np.log(2)) / characters,
    )
