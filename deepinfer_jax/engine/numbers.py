"""The numbers of sequences that change every step, by slot.

A step advances every running sequence. With an object each that takes microseconds a sequence;
here their numbers lie in one array, and a step of all is a few operations on its columns. A
sequence reads and writes its own row as attributes.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_jax.engine.sequence import Sequence

#: Columns; `sequence.Sequence` says what they count.
NAMES = ("count", "computed", "planned", "capacity", "written", "published", "generation", "quiet")
COUNT, COMPUTED, PLANNED, CAPACITY, WRITTEN, PUBLISHED, GENERATION, QUIET = range(len(NAMES))


class Number:
    """An attribute of a sequence that lies in its row."""

    def __init__(self, place: int) -> None:
        """Reads and writes one column."""
        self._place = place

    def __get__(self, one: "Sequence", owner: object = None) -> int:
        """Returns the number."""
        return one.numbers.item(self._place)

    def __set__(self, one: "Sequence", value: int) -> None:
        """Writes it."""
        one.numbers[self._place] = value


def empty_numbers() -> np.ndarray:
    """Returns the row [columns] of a sequence without a slot."""
    return np.zeros(len(NAMES), np.int64)


class SlotNumbers:
    """The rows of all slots, [slots + 1, columns]; those of free ones are zeros."""

    def __init__(self, slots: int) -> None:
        """All slots are free. slots: beside slot 0, which nobody has."""
        self.table = np.zeros((slots + 1, len(NAMES)), np.int64)

    def move_in(self, sequence: "Sequence", slot: int) -> None:
        """Gives a sequence a slot."""
        self.table[slot] = sequence.numbers
        sequence.slot, sequence.numbers = slot, self.table[slot]

    def move_out(self, sequence: "Sequence") -> int:
        """Frees the slot of a sequence, which keeps its numbers; returns the slot."""
        slot = sequence.slot
        sequence.slot, sequence.numbers = 0, self.table[slot].copy()
        self.table[slot] = 0
        return slot
