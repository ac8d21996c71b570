"""The recorded load: a window of steps, by layer and expert (parallelism.md 4.3)."""

import numpy as np

from sharding.errors import ShardingError


class LoadWindow:
    """The last S steps' rows by layer and expert; integers, so that sums over devices are exact.

    By expert and not by slot: what is recorded stays true when experts move, also for a step that
    was in flight then.
    """

    def __init__(self, steps: int, layers: int, experts: int) -> None:
        """Makes an empty window of `steps` steps."""
        self._rows = np.zeros((steps, layers, experts), np.int32)
        self._seen = 0

    def __len__(self) -> int:
        """Returns how many recorded steps the window holds."""
        return min(self._seen, len(self._rows))

    @property
    def is_full(self) -> bool:
        """Whether as many steps were recorded as it has room for."""
        return self._seen >= len(self._rows)

    def add(self, rows: np.ndarray) -> bool:
        """Records a step's rows by layer and expert, int [layers, experts]; returns whether it did.

        A step without any is none: idle and warm-up steps would pull a plan towards nothing.

        Raises:
            ShardingError: another shape.
        """
        if rows.shape != self._rows.shape[1:]:
            raise ShardingError(
                f"a step's load has the shape (layers, experts) = {self._rows.shape[1:]}",
                str(rows.shape),
                "record the counts of the model that the window was made for",
            )
        if not rows.any():
            return False
        self._rows[self._seen % len(self._rows)] = rows
        self._seen += 1
        return True

    def trace(self) -> np.ndarray:
        """Returns rows by step, layer and expert, int64 [steps, layers, E], oldest step first."""
        count = len(self)
        order = (self._seen - count + np.arange(count)) % len(self._rows)
        return self._rows[order].astype(np.int64)

    def clear(self) -> None:
        """Forgets all steps."""
        self._seen = 0
