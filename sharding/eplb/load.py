"""The recorded load: a window of steps, by layer and expert (parallelism.md 4.3)."""

import numpy as np

from sharding.errors import ShardingError


class LoadWindow:
    """The last S steps' rows by layer and slot; integers, so that sums over devices are exact."""

    def __init__(self, steps: int, layers: int, slots: int) -> None:
        """Makes an empty window of `steps` steps."""
        self._rows = np.zeros((steps, layers, slots), np.int32)
        self._seen = 0

    def __len__(self) -> int:
        """Returns how many recorded steps the window holds."""
        return min(self._seen, len(self._rows))

    def add(self, rows: np.ndarray) -> None:
        """Records a step's rows by layer and slot, int [layers, slots]; a step without any is none.

        Padding, idle and warm-up steps have no rows, and would pull a plan towards nothing.

        Raises:
            ShardingError: another shape.
        """
        if rows.shape != self._rows.shape[1:]:
            raise ShardingError(
                f"a step's load has the shape (layers, slots) = {self._rows.shape[1:]}",
                str(rows.shape),
                "record the counts of the layout that the window was made for",
            )
        if not rows.any():
            return
        self._rows[self._seen % len(self._rows)] = rows
        self._seen += 1

    def by_expert(self, layouts: np.ndarray, experts: int) -> np.ndarray:
        """Returns rows by step, layer and expert, int64 [steps, layers, E], oldest step first.

        layouts: the expert of every slot, [layers, slots], in force while these steps ran.
        """
        count = len(self)
        first = self._seen - count
        order = (first + np.arange(count)) % len(self._rows)
        steps = self._rows[order].astype(np.int64)
        found = np.zeros((*steps.shape[:2], experts), np.int64)
        for layer, layout in enumerate(layouts):
            for slot, expert in enumerate(layout):
                found[:, layer, expert] += steps[:, layer, slot]
        return found

    def clear(self) -> None:
        """Forgets all steps: after experts moved, counts by slot mean other experts."""
        self._rows[:] = 0
        self._seen = 0


def balance(rows: np.ndarray, ranks: int) -> float:
    """Returns how evenly the ranks were loaded: sum of means over sum of maxima, at most 1.

    rows: by step and slot, [S, slots]. 1 without load.
    """
    if not rows.any():
        return 1.0
    loads = rows.reshape(len(rows), ranks, -1).sum(axis=2)
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())
