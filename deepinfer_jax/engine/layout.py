"""The packed plan: everything the host tells the device about one step, in one int32 vector.

One transfer a step (engine.md 2.6). The host writes into views of a fresh NumPy vector; the device
slices the same places. A fresh vector each time: on CPU the device may alias what it was given.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

ANCHOR = -1  # instead of a token id: the newest token of the row's slot, which the device knows

#: One admitted sequence: integers, then float32 bits. Unused entries have slot 0.
ADMIT_INTS = (
    *("slot", "generation", "length", "first", "floor", "produced", "most", "least"),
    *("key_high", "key_low", "top_k", "edited", "processed", "before_0", "before_1", "before_2"),
)
ADMIT_FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True)
class PlanLayout:
    """Capacities of a packed plan.

    rows: a multiple of the row tile, at least two tiles. slots: sequences that run together.
    deltas: block-table entries a step. stop_ids: of one sequence, EOS included.
    """

    rows: int
    slots: int
    deltas: int
    stop_ids: int

    @property
    def admit_width(self) -> int:
        """Words of one admission."""
        return len(ADMIT_INTS) + len(ADMIT_FLOATS) + self.stop_ids

    @cached_property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Returns where each part lies, and its shape."""
        shapes = {
            "header": (4,),
            "ids": (self.rows,),
            "position": (self.rows,),
            "slot": (self.rows,),
            "target": (self.rows,),
            "emit": (self.slots,),
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

    header [4]: rows, rows that choose a token, whether log-probabilities are wanted, whether
    prompt rows are scored. ids [T]: token ids, or ANCHOR. position [T]: of prompt rows. slot [T].
    target [T]: next prompt id of a scored row, -1 elsewhere. emit [S]: rows that choose a token.
    deltas [D, 3]: slot, place, block; slot 0 where unused. admits [S, width]: `ADMIT_INTS`, bits of
    `ADMIT_FLOATS`, stop ids (-1 unused).
    """

    header: Any
    ids: Any
    position: Any
    slot: Any
    target: Any
    emit: Any
    deltas: Any
    admits: Any


def unpack(layout: PlanLayout, vector: Any) -> PlanParts:
    """Returns the parts of a packed plan; views of a NumPy vector, slices of a JAX array."""
    places = layout.places.items()
    return PlanParts(**{name: vector[where].reshape(shape) for name, (where, shape) in places})


def blank(layout: PlanLayout) -> tuple[np.ndarray, PlanParts]:
    """Returns an empty plan vector and the views to fill it through."""
    vector = np.zeros(layout.size, np.int32)
    return vector, unpack(layout, vector)
