"""Drawings with one question each, by seed: the data with which nano learns to see.

Two kinds: one to five equal shapes of one colour, and one digit. Like the text corpus, a drawing is
a function of (task, split, seed, index), and no split repeats another's.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, ClassVar

import numpy as np

from deepinfer_jax.training.corpus.draw import SPLITS, Draw
from deepinfer_jax.training.corpus.records import Item, Message
from deepinfer_jax.vision.image import import_pillow

#: Sides of a drawing in pixels: nano's own canvas, so nothing is resized.
SIDE = 126
#: Drawn larger and reduced, for smooth edges.
_SCALE = 2
_GROUP = 1000  # drawings a process makes at a time

COLOURS = {
    "red": (214, 40, 40),
    "blue": (40, 70, 220),
    "green": (30, 160, 60),
    "yellow": (245, 215, 40),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
#: Disc, square, ring and triangle, by words that are one token of nano: it was never taught to
#: spell "triangle", and an image encoder cannot teach it that.
SHAPES = ("ball", "card", "ring", "hat")
#: Cards and hats stand, give or take so many radians.
TILT = 0.2
MOST = 5
QUESTIONS = {
    "vision_colour": "What color is this?",
    "vision_shape": "What shape is this?",
    "vision_count": "How many are there?",
    "vision_digit": "Which digit is this?",
}
DRAWING_TASKS = tuple(QUESTIONS)

Point = tuple[float, float]

# Strokes of the digits on a field 4 wide and 6 high, y downwards; two hands a digit.
_STROKES: dict[str, tuple[str, ...]] = {
    "0": ("10 30 41 45 36 16 05 01 10", "00 40 46 06 00"),
    "1": ("01 20 26", "20 26", "12 20 26 16 36"),
    "2": ("01 10 30 41 42 06 46", "00 40 43 03 06 46"),
    "3": ("00 40 23 33 44 45 36 16 05", "00 40 46 06|13 43"),
    "4": ("36 30 04 44", "00 03 43|40 46"),
    "5": ("40 00 03 33 44 45 36 06", "40 00 03 43 46 06"),
    "6": ("40 20 02 05 16 36 45 44 33 13 04", "40 00 06 46 43 03"),
    "7": ("00 40 16", "00 40 46", "00 40 16|13 33"),
    "8": ("10 30 41 42 33 13 02 01 10|13 33 44 45 36 16 05 04 13", "00 40 46 06 00|03 43"),
    "9": ("42 33 13 02 01 10 30 41 42 26", "43 03 00 40 46 06"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing and all that may be asked about it.

    pixels: uint8 [SIDE, SIDE, 3]. answers: task -> answer; a digit has no shape and no count.
    """

    __no_type_check__: ClassVar[bool] = True

    pixels: np.ndarray = field(repr=False)
    answers: dict[str, str]


def make_drawing(task: str, *, split: str, seed: int, index: int) -> Drawing:
    """Returns a drawing of which `task` can be asked, a function of the arguments only."""
    if task not in QUESTIONS:
        raise ValueError(f"task must be one of {DRAWING_TASKS}, got {task!r}.")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}.")
    draw = Draw("drawing", task, split, seed, index)
    colour = draw.pick(tuple(COLOURS))
    canvas, ink = _canvas(draw, colour), _shade(draw, COLOURS[colour])
    answers = {"vision_colour": colour}
    if task == "vision_digit":
        digit = str(draw.below(10))
        answers["vision_digit"] = digit
        _draw_digit(canvas, draw, digit, ink)
    else:
        shape, count = draw.pick(SHAPES), draw.between(1, MOST)
        answers |= {"vision_shape": shape, "vision_count": str(count)}
        for centre, radius in _places(draw, count):
            _FORMS[shape](canvas, centre, radius, TILT * (2 * draw.uniform() - 1), ink)
    picture = canvas.image.reduce(_SCALE)
    return Drawing(pixels=np.asarray(picture, dtype=np.uint8), answers=answers)


def make_drawing_item(
    task: str, *, split: str, seed: int, index: int, image_token: str
) -> tuple[Item, np.ndarray]:
    """Returns the question of a task as an item of the corpus, and the pixels it is about.

    image_token: spelling of the tokenizer's image token, which stands before the question.
    """
    drawing = make_drawing(task, split=split, seed=seed, index=index)
    answer = drawing.answers[task]
    item = Item(
        task=task,
        key=f"{split}/{task}/{seed}/{index}/0",
        answer=answer,
        messages=(
            Message(role="user", content=f"{image_token}\n\n{QUESTIONS[task]}"),
            Message(role="assistant", content=answer),
        ),
    )
    return item, drawing.pixels


def training_task(index: int) -> str:
    """Returns the task of the drawing at a place of the training stream: one in four is a digit."""
    return "vision_digit" if index % 4 == 1 else "vision_count"


def draw_stream(count: int, *, split: str, seed: int, workers: int) -> Iterator[list[Drawing]]:
    """Yields the first `count` drawings of the training stream in groups, made by processes."""
    starts = range(0, count, _GROUP)
    jobs = [(start, min(start + _GROUP, count), split, seed) for start in starts]
    if workers == 1:
        yield from map(_draw_group, jobs)
        return
    # "spawn": a fork of a process with JAX's threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_draw_group, jobs)


def _draw_group(job: tuple[int, int, str, int]) -> list[Drawing]:
    start, stop, split, seed = job
    return [
        make_drawing(training_task(index), split=split, seed=seed, index=index)
        for index in range(start, stop)
    ]


class _Canvas:
    """A picture that is drawn in units of the finished drawing."""

    def __init__(self, background: tuple[int, int, int]) -> None:
        from PIL import ImageDraw

        side = SIDE * _SCALE
        self.image: Any = import_pillow().new("RGB", (side, side), background)
        self._pen = ImageDraw.Draw(self.image)
        self.background = background

    def polygon(self, points: list[Point], ink: tuple[int, int, int]) -> None:
        self._pen.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill=ink)

    def disc(self, centre: Point, radius: float, ink: tuple[int, int, int]) -> None:
        box = [(c + sign * radius) * _SCALE for sign in (-1, 1) for c in centre]
        self._pen.ellipse(box, fill=ink)

    def stroke(self, points: list[Point], width: float, ink: tuple[int, int, int]) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._pen.line(scaled, fill=ink, width=round(width * _SCALE), joint="curve")
        for end in points:
            self.disc(end, width / 2, ink)


def _canvas(draw: Draw, colour: str) -> _Canvas:
    """Returns an empty canvas in a grey that is neither near white nor near black."""
    light = {"white": (60, 150), "black": (110, 210), "yellow": (60, 150)}
    low, high = light.get(colour, (100, 200))
    grey = draw.between(low, high)
    tint = [draw.between(-12, 12) for _ in range(3)]
    return _Canvas((grey + tint[0], grey + tint[1], grey + tint[2]))


def _shade(draw: Draw, colour: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, c + draw.between(-18, 18))) for c in colour)
    return red, green, blue


def _places(draw: Draw, count: int) -> list[tuple[Point, float]]:
    """Returns centres and radii of shapes that keep clear of each other and of the edge."""
    radius = draw.between(15, 36 if count == 1 else 27 if count == 2 else 20)
    while True:
        found: list[tuple[Point, float]] = []
        for _ in range(60):
            size = radius * (0.85 + 0.15 * draw.uniform())
            room = SIDE - 2 * size - 4
            centre = (size + 2 + draw.uniform() * room, size + 2 + draw.uniform() * room)
            if all(math.dist(centre, other) > size + r + 4 for other, r in found):
                found.append((centre, size))
            if len(found) == count:
                return found
        radius = max(12, radius - 1)


def _corners(centre: Point, radius: float, count: int, turn: float) -> list[Point]:
    """Returns the corners of a regular polygon; the first one lies at the angle `turn`."""
    angles = [turn + 2 * math.pi * k / count for k in range(count)]
    return [
        (centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle))
        for angle in angles
    ]


def _ball(canvas: _Canvas, centre: Point, radius: float, turn: float, ink: Any) -> None:
    canvas.disc(centre, 0.9 * radius, ink)


def _ring(canvas: _Canvas, centre: Point, radius: float, turn: float, ink: Any) -> None:
    canvas.disc(centre, 0.95 * radius, ink)
    canvas.disc(centre, 0.5 * radius, canvas.background)


def _card(canvas: _Canvas, centre: Point, radius: float, turn: float, ink: Any) -> None:
    canvas.polygon(_corners(centre, radius, 4, turn + math.pi / 4), ink)


def _hat(canvas: _Canvas, centre: Point, radius: float, turn: float, ink: Any) -> None:
    canvas.polygon(_corners(centre, radius, 3, turn - math.pi / 2), ink)


_FORMS: dict[str, Callable[[_Canvas, Point, float, float, Any], None]] = {
    "ball": _ball,
    "card": _card,
    "ring": _ring,
    "hat": _hat,
}


def _draw_digit(canvas: _Canvas, draw: Draw, digit: str, ink: tuple[int, int, int]) -> None:
    """Draws a digit in one of its hands, at some size, place, slant and width."""
    hand = draw.pick(_STROKES[digit])
    height = draw.between(50, 100)
    width = height * (0.5 + 0.2 * draw.uniform())
    slant = 0.3 * draw.uniform() - 0.1
    thick = height * (0.09 + 0.08 * draw.uniform())
    free = (SIDE - width - abs(slant) * height - thick - 4, SIDE - height - thick - 4)
    left = 2 + thick / 2 + draw.uniform() * max(free[0], 0)
    top = 2 + thick / 2 + draw.uniform() * max(free[1], 0)
    shift = max(-slant, 0) * height
    for line in hand.split("|"):
        points = []
        for point in line.split():
            x, y = int(point[0]) / 4, int(point[1]) / 6
            points.append((left + shift + x * width + slant * (1 - y) * height, top + y * height))
        canvas.stroke(points, thick, ink)
