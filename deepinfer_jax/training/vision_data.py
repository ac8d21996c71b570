"""Drawings and their questions as tables, from which every training step picks a batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.vision.patches import patch_rows
from deepinfer_jax.training.corpus.records import Item, Message
from deepinfer_jax.training.corpus.template import expected_text, prompt_text
from deepinfer_jax.training.drawings import DRAWING_TASKS, QUESTIONS, SIDE, draw_stream
from deepinfer_jax.vision.plan import plan_image

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: How often each question is asked of a drawing that it fits, relative to the others.
SHARES = {"vision_colour": 0.5, "vision_shape": 4.0, "vision_count": 2.0, "vision_digit": 3.0}

# ids int32 [b, t], weights float32 [b, t], places in the table int32 [b], tasks int32 [b], answers
# int32 [b, tasks] and whether they fit bool [b, tasks].
VisionBatch = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionData:
    """Drawings as patches, and what each answers to every question that fits it.

    patches: uint8 [n, p, v]. fits: bool [n, tasks], which questions have an answer. answers: int32
    [n, tasks], rows of the tables of conversations. ids, weights: int32 and float32 [answers, t];
    a weight is 1 at a token of the answer. of_task: bool [tasks, answers].
    """

    __no_type_check__: ClassVar[bool] = True

    patches: np.ndarray = field(repr=False)
    fits: np.ndarray = field(repr=False)
    answers: np.ndarray = field(repr=False)
    ids: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    of_task: np.ndarray = field(repr=False)


def make_vision_data(
    config: ModelConfig, tokenizer: "Tokenizer", *, drawings: int, seed: int, workers: int
) -> VisionData:
    """Returns drawings of the training split with their conversations.

    Args:
        config: of a model with an image encoder whose canvas of a drawing is the drawing.
        tokenizer: of the model.
        drawings: how many.
        seed: names the stream.
        workers: processes that draw.
    """
    vision, token = config.vision, config.image_token_id
    if vision is None or token is None:
        raise ValueError("drawings need a model with an image encoder.")
    plan = plan_image(SIDE, SIDE, vision)
    if (plan.width, plan.height) != (SIDE, SIDE):
        raise ValueError(f"the canvas must be {SIDE} x {SIDE}, got {plan.width} x {plan.height}.")
    spelling = tokenizer.id_to_token(token)
    if spelling is None:
        raise ValueError(f"the tokenizer has no token {token}, the image token.")
    patches = np.empty(
        (drawings, plan.patch_rows * plan.patch_columns, 3 * vision.patch_size**2), np.uint8
    )
    fits = np.zeros((drawings, len(DRAWING_TASKS)), bool)
    answers = np.zeros((drawings, len(DRAWING_TASKS)), np.int32)
    texts: dict[tuple[str, str], int] = {}
    place = 0
    for group in draw_stream(drawings, split="train", seed=seed, workers=workers):
        for drawing in group:
            patches[place] = patch_rows(config, drawing.pixels)
            for task, answer in drawing.answers.items():
                number = DRAWING_TASKS.index(task)
                fits[place, number] = True
                answers[place, number] = texts.setdefault((task, answer), len(texts))
            place += 1
    parts = [_encoded(tokenizer, spelling, *text, token, plan.num_tokens) for text in texts]
    length = max(len(prompt) + len(answer) for prompt, answer in parts)
    ids = np.full((len(parts), length), config.pad_token_id, np.int32)
    weights = np.zeros((len(parts), length), np.float32)
    for row, (prompt, answer) in enumerate(parts):
        ids[row, : len(prompt) + len(answer)] = prompt + answer
        weights[row, len(prompt) : len(prompt) + len(answer)] = 1.0
    asked = [task for task, _ in texts]
    return VisionData(
        patches=patches,
        fits=fits,
        answers=answers,
        ids=ids,
        weights=weights,
        of_task=np.array([[one == task for one in asked] for task in DRAWING_TASKS]),
    )


def vision_batches(
    data: VisionData, *, batch: int, seed: int, answers: int | None = None
) -> Callable[[int], VisionBatch]:
    """Returns the batch of every step, a function of (seed, step): drawings and one question each.

    answers: conversations of a batch, for its first drawings; None: one for each.
    """
    shares = np.asarray([SHARES[task] for task in DRAWING_TASKS]) * data.fits
    upper = np.cumsum(shares / shares.sum(axis=1, keepdims=True), axis=1)

    def at(step: int) -> VisionBatch:
        draw = np.random.default_rng([seed, step])
        place = draw.integers(len(data.patches), size=batch, dtype=np.int32)
        task = (draw.random((batch, 1)) >= upper[place]).sum(axis=1).astype(np.int32)
        task = np.minimum(task, len(DRAWING_TASKS) - 1)
        text = data.answers[place, task][:answers]
        asked = (data.answers[place], data.fits[place])
        return data.ids[text], data.weights[text], place, task, *asked

    return at


def _encoded(
    tokenizer: "Tokenizer", spelling: str, task: str, answer: str, token: int, rows: int
) -> tuple[list[int], list[int]]:
    """Returns the ids of prompt and answer of a question, the image token once a row."""
    item = Item(
        task=task,
        key="",
        answer=answer,
        messages=(
            Message(role="user", content=f"{spelling}\n\n{QUESTIONS[task]}"),
            Message(role="assistant", content=answer),
        ),
    )
    prompt, expected = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (prompt_text(item), expected_text(item))
    )
    spread = [[one] * rows if one == token else [one] for one in prompt]
    return [one for part in spread for one in part], expected
