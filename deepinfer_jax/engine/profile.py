"""Measures what steps cost by rows and context, on the engine's own programs (engine.md 3.7)."""

import os
import platform
from collections.abc import Sequence as Items
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.layout import (
    ADMIT_INTS,
    ANY_DRAFTS,
    HEADER,
    KEEP_DRAFTS,
    MAKE_DRAFTS,
    PlanLayout,
    blank,
)
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.speculative.cost import Corrections, StepCost, at_sizes, cached_cost, profile

#: Sizes that are measured; those between them follow.
_POINTS = 5


def measured_corrections(
    device: Device,
    layouts: Items[PlanLayout],
    *,
    source: str,
    max_len: int,
    folder: Path | None,
) -> tuple[Corrections, str]:
    """Returns the curve of this device, from a file if there is one, and a note on its origin.

    source: of the model. folder: of the file, see `cached_cost`. Other arguments: `measure_cost`.
    """

    def measure() -> StepCost:
        return measure_cost(device, layouts, max_len=max_len)

    cost, note = cached_cost(cost_identity(device.config, layouts, source), measure, folder=folder)
    return Corrections(cost), note


def measure_cost(device: Device, layouts: Items[PlanLayout], *, max_len: int) -> StepCost:
    """Returns the measured curve. No request may run: all slots are used, no block is."""
    largest, row_step = layouts[-1], device.config.execution.row_step
    slots, drafts = largest.slots, largest.drafts
    sizes = [layout.rows for layout in layouts]
    if len(sizes) == 1:
        most = slots * (drafts + 1)
        sizes = [row_step * k for k in range(1, -(-most // row_step) + 1)]
    points = sorted({sizes[i] for i in np.linspace(0, len(sizes) - 1, _POINTS).astype(int)})
    bench = _Bench(device, layouts)
    cost = profile(
        bench.step,
        bench.draft,
        device.wait,
        rows=points,
        contexts=(max_len // 8, max_len // 2),
        sequences=sorted({1, max(1, slots // 4), slots}),
    )
    bench.start(0)
    return at_sizes(cost, sizes)


def cost_identity(config: ModelConfig, layouts: Items[PlanLayout], weights: str) -> dict[str, Any]:
    """Returns everything that a measured time belongs to."""
    device = jax.devices()[0]
    return {
        "config": repr(config),
        "weights": weights,
        "layouts": repr(tuple(layouts)),
        "device": device.device_kind,
        "host": [platform.processor(), platform.machine(), os.cpu_count()],
        "versions": [version("jax"), version("jaxlib")],
    }


class _Bench:
    """Dispatches steps of slots that look like sequences of some length."""

    def __init__(self, device: Device, layouts: Items[PlanLayout]) -> None:
        self.device, self.layouts = device, layouts
        self.context: int | None = None

    def start(self, context: int) -> None:
        """Opens all slots at a length, whose blocks are the null block, and gives them drafts."""
        self.context = context
        vector, parts = blank(self.layouts[-1])
        most = np.iinfo(np.int32).max
        values = {"length": context, "first": context, "most": most, "top_k": -1}
        values["most_drafts"] = self.layouts[-1].drafts
        for place, name in enumerate(ADMIT_INTS):
            parts.admits[:, place] = values.get(name, 0)
        parts.admits[:, ADMIT_INTS.index("slot")] = np.arange(1, self.layouts[-1].slots + 1)
        parts.admits[:, -self.layouts[-1].stop_ids :] = -1
        self.device.dispatch(StepPlan(layout=self.layouts[-1], vector=vector))
        self._rounds(self.layouts[-1].slots, 0, MAKE_DRAFTS)

    def step(self, rows: int, context: int) -> None:
        """Dispatches a step of so many rows; the drafts stay those of `start`."""
        if self.context != context:
            self.start(context)
        drafts = self.layouts[-1].drafts
        self._rounds(-(-rows // (drafts + 1)), rows, KEEP_DRAFTS)

    def draft(self, sequences: int, is_drafting: bool) -> None:
        """Dispatches a step of one row for each sequence, with or without drafting."""
        self._rounds(sequences, 0, MAKE_DRAFTS if is_drafting else KEEP_DRAFTS)

    def _rounds(self, sequences: int, rows: int, drafting: int) -> None:
        sequences = min(sequences, self.layouts[-1].slots)
        layout = next(one for one in self.layouts if one.rows >= max(rows, sequences))
        vector, parts = blank(layout)
        if drafting != MAKE_DRAFTS:
            layout = layout.without_drafting
        words = {"rounds": sequences, "drafting": drafting, "verify_rows": rows}
        words |= {"most_drafts": layout.drafts if rows else 0, "threshold": ANY_DRAFTS}
        parts.header[:] = [words.get(name, 0) for name in HEADER]
        parts.rounds[:sequences] = np.arange(1, sequences + 1)
        self.device.dispatch(StepPlan(layout=layout, vector=vector))
