"""Rounds of greedy drafting on prompts of the corpus, and temperatures fitted on them."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from deepinfer_jax.errors import TokenizerError
from deepinfer_jax.loading import Model
from deepinfer_jax.model.params import Params
from deepinfer_jax.pictures import new_picture, save_picture
from deepinfer_jax.speculative.calibration import (
    Temperatures,
    calibration_errors,
    draft_identity,
    fit_temperatures,
    prefix_labels,
    prefix_survival,
    reliability,
)
from deepinfer_jax.speculative.rounds import GreedyRounds, greedy_rounds
from deepinfer_jax.training.corpus import TASKS, THINKING_TASKS, make_item, prompt_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Prompts of each task: about 6,000 rounds in all. Tasks with long prompts and short answers get
#: fewer, a story has ten times the rounds of an answer.
PROMPTS: Mapping[str, int] = dict.fromkeys(TASKS, 96) | {
    "story": 72,
    "question": 64,
    "needle": 16,
    "tool_call": 24,
    "tool_answer": 24,
}
#: Longest needle prompt and longest completion, in tokens.
NEEDLE_TOKENS, MAX_TOKENS = 512, 160
#: Runs side by side: a program of eight-row tiles keeps one core busy.
_WORKERS = 2


def corpus_prompts(
    tokenizer: "Tokenizer", task: str, *, split: str, seed: int, count: int
) -> list[list[int]]:
    """Returns the ids of `count` prompts of a task; every third one thinks where the task can."""
    items = [
        make_item(
            task,
            split=split,
            seed=seed,
            index=index,
            thinking=task in THINKING_TASKS and index % 3 == 2,
            tokens=NEEDLE_TOKENS if task == "needle" else None,
        )
        for index in range(count)
    ]
    texts = [prompt_text(item) for item in items]
    return [list(e.ids) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRounds:
    """Greedy rounds on prompts of all tasks.

    prompts, completions: token ids. prompt_task: of each prompt, an index into `TASKS`. task [n],
    confidence_logit [n, k], accepted [n], observed [n]: of each round, as in `GreedyRounds`.
    """

    prompts: list[list[int]]
    completions: list[tuple[int, ...]]
    prompt_task: np.ndarray
    task: np.ndarray
    confidence_logit: np.ndarray
    accepted: np.ndarray
    observed: np.ndarray


def corpus_rounds(
    model: Model,
    *,
    split: str,
    seed: int,
    scale: float = 1.0,
    report: Callable[[int], None] | None = None,
) -> CorpusRounds:
    """Returns the greedy rounds of `scale` times `PROMPTS` prompts of every task.

    report: called with the number of rounds so far.

    Raises:
        TokenizerError: The model has no tokenizer.
        InputError: The model has no draft stages.
    """
    if model.tokenizer is None:
        raise TokenizerError(
            f"prompts of the corpus need tokenizer.json, {model.source} has none: copy the one "
            "that the model was trained with"
        )
    prompts, tasks = [], []
    for number, task in enumerate(TASKS):
        count = max(1, round(scale * PROMPTS[task]))
        prompts += corpus_prompts(model.tokenizer, task, split=split, seed=seed, count=count)
        tasks += [number] * count
    done = [0] * _WORKERS

    def run(worker: int) -> GreedyRounds:
        def tick(rounds: int) -> None:
            done[worker] = rounds
            if report is not None:
                report(sum(done))

        mine, params = prompts[worker::_WORKERS], cast(Params, model.params)
        return greedy_rounds(params, model.config, mine, max_tokens=MAX_TOKENS, report=tick)

    with ThreadPoolExecutor(_WORKERS) as pool:
        parts = list(pool.map(run, range(_WORKERS)))
    completions: list[tuple[int, ...]] = [()] * len(prompts)
    for worker, part in enumerate(parts):
        completions[worker::_WORKERS] = part.token_ids
    prompt_task = np.asarray(tasks)
    sequence = [worker + _WORKERS * part.sequence for worker, part in enumerate(parts)]
    return CorpusRounds(
        prompts=prompts,
        completions=completions,
        prompt_task=prompt_task,
        task=prompt_task[np.concatenate(sequence)],
        confidence_logit=np.concatenate([part.confidence_logit for part in parts]),
        accepted=np.concatenate([part.accepted for part in parts]),
        observed=np.concatenate([part.observed for part in parts]),
    )


def fit_on_rounds(model: Model, rounds: CorpusRounds) -> Temperatures:
    """Returns temperatures fitted on rounds of `corpus_rounds` of this model."""
    labels = rounds.confidence_logit, rounds.accepted, rounds.observed
    values = fit_temperatures(*labels)
    return Temperatures(
        values=tuple(values.tolist()),
        identity=draft_identity(model.params, model.config),
        verification="greedy",
        rounds=len(rounds.accepted),
        error_before=calibration_errors(*labels, np.ones_like(values))[0],
        error_after=calibration_errors(*labels, values)[0],
    )


def plot_reliability(path: Path, rounds: CorpusRounds, fitted: Temperatures) -> None:
    """Writes a PNG: how often prefixes of drafts are accepted, over how often they should be.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    size = len(fitted.values)
    outcome, counts = prefix_labels(rounds.accepted, rounds.observed, size)
    figure, axis = new_picture((5.0, 5.0))
    axis.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    curves = (
        ("as trained", np.ones(size), fitted.error_before),
        ("scaled", np.asarray(fitted.values), fitted.error_after),
    )
    for name, temperature, error in curves:
        survival = prefix_survival(rounds.confidence_logit, temperature)
        expected, found, _ = reliability(survival[counts], outcome[counts])
        axis.plot(expected, found, marker="o", label=f"{name}, error {error:.3f}")
    axis.set(xlabel="estimated survival", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    axis.legend()
    save_picture(figure, path)
