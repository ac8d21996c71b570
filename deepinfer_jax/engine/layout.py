"""The packed plan: everything the host tells the device about one step, in one int32 vector.

One transfer a step (engine.md 2.6). The host writes into views of a NumPy vector; the device slices
the same places.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

#: Words of the plan's header. rounds: sequences that decode; ends: prompts whose last row is in the
#: plan. most_drafts, threshold (float32 bits), verify_rows: how many drafts are verified
#: (`rows.round_rows`). drafting: whether new ones are made.
HEADER = (
    *("prompt_rows", "rounds", "ends", "wants_logprobs", "scores_prompt"),
    *("most_drafts", "threshold", "verify_rows", "drafting"),
)
#: Values of the word "drafting". KEEP_DRAFTS only repeats a step, to measure it.
NO_DRAFTS, MAKE_DRAFTS, KEEP_DRAFTS = range(3)
#: The threshold that every draft meets, as bits.
ANY_DRAFTS = 0
#: Words of a result row before the tokens and the drafts' survivals (float32 bits). first: its
#: place among the emitting rows. count: tokens it emits. verified, accepted: drafts.
RESULT = ("slot", "generation", "first", "count", "code", "status", "verified", "accepted")

#: One admitted sequence: integers, then float32 bits. Unused entries have slot 0.
ADMIT_INTS = (
    *("slot", "generation", "length", "first", "floor", "produced", "most", "least"),
    *("key_high", "key_low", "top_k", "edited", "processed", "before_0", "before_1", "before_2"),
    *("most_drafts", "rule"),
)
ADMIT_FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True)
class PlanLayout:
    """Capacities of a packed plan.

    rows: a multiple of the row tile, at least two tiles. slots: sequences that run together.
    deltas: block-table entries a step. stop_ids: of one sequence, EOS included. drafts: of one
    round; 0 without drafting. image_rows: of encoded images held on the device; 0 for a model that
    sees none, whose plans have no part for them. makes_drafts: whether its program ends with new
    ones; None leaves it to the header's word. counts_experts: whether its steps return the rows of
    every expert.
    """

    rows: int
    slots: int
    deltas: int
    stop_ids: int
    drafts: int = 0
    image_rows: int = 0
    makes_drafts: bool | None = None
    counts_experts: bool = False

    @cached_property
    def without_drafting(self) -> "PlanLayout":
        """Returns the layout of steps that make no drafts: itself where the header says so."""
        return self if self.makes_drafts is None else replace(self, makes_drafts=False)

    @property
    def admit_width(self) -> int:
        """Words of one admission."""
        return len(ADMIT_INTS) + len(ADMIT_FLOATS) + self.stop_ids

    @property
    def result_width(self) -> int:
        """Words of one result row."""
        return len(RESULT) + 1 + 2 * self.drafts

    @cached_property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Returns where each part lies, and its shape."""
        shapes = {
            "header": (len(HEADER),),
            "ids": (self.rows,),
            "position": (self.rows,),
            "slot": (self.rows,),
            "target": (self.rows,),
            **({"image": (self.rows,)} if self.image_rows else {}),
            "rounds": (self.slots,),
            "ends": (self.slots,),
            "deltas": (self.deltas, 3),
            "admits": (self.slots, self.admit_width),
        }
        found, start = {}, 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            found[name] = (slice(start, stop), shape)
            start = stop
        return found

    @property
    def size(self) -> int:
        """Words of the vector."""
        return self.places["admits"][0].stop


@dataclass(frozen=True, slots=True)
class PlanParts:
    """The parts of a packed plan, as NumPy views on the host or arrays on the device.

    header: `HEADER`. ids, position, slot, target [T]: of prompt rows; target is the next id of a
    scored row, -1 elsewhere. image [T]: the encoded row that an image's prompt row takes; None
    without images. rounds [S]: slots that decode. ends [S]: rows of the plan that end a
    prompt. deltas [D, 3]: slot, place, block; slot 0 where unused. admits [S, width]: `ADMIT_INTS`,
    bits of `ADMIT_FLOATS`, stop ids (-1 unused).
    """

    header: Any
    ids: Any
    position: Any
    slot: Any
    target: Any
    rounds: Any
    ends: Any
    deltas: Any
    admits: Any
    image: Any = None


def unpack(layout: PlanLayout, vector: Any) -> PlanParts:
    """Returns the parts of a packed plan; views of a NumPy vector, slices of a JAX array."""
    places = layout.places.items()
    return PlanParts(**{name: vector[where].reshape(shape) for name, (where, shape) in places})


def header_word(parts: PlanParts, name: str) -> Any:
    """Returns a word of the header."""
    return parts.header[HEADER.index(name)]


def blank(layout: PlanLayout) -> tuple[np.ndarray, PlanParts]:
    """Returns an empty plan vector and the views to fill it through."""
    vector = np.zeros(layout.size, np.int32)
    return vector, unpack(layout, vector)


class PlanVectors:
    """Vectors to write plans into, each used again after `turns` others of its layout.

    A new vector for every plan costs more than all that is written into it: the host has to map
    its memory. Not at once again: on CPU the device may alias what it was given, so the step must
    be over.
    """

    def __init__(self, turns: int) -> None:
        """Starts without any; turns: steps that can be planned or in flight, and one."""
        self._turns = turns
        self._used: dict[PlanLayout, deque[tuple[np.ndarray, PlanParts]]] = {}

    def blank(self, layout: PlanLayout) -> tuple[np.ndarray, PlanParts]:
        """Returns an empty plan vector and the views to fill it through."""
        used = self._used.setdefault(layout, deque())
        if len(used) < self._turns:
            found = blank(layout)
        else:
            found = used.popleft()
            found[0].fill(0)
        used.append(found)
        return found
