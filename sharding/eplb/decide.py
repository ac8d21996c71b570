"""Whether to place the experts again, and where each then lies (parallelism.md 4.5).

A plan always fits the steps it was made from, so the gain that decides is measured on steps that it
has not seen: planned on the even steps of the window, scored on the odd ones.
"""

from dataclasses import dataclass

import numpy as np

from sharding.eplb.maps import check_layout
from sharding.eplb.score import busiest, imbalance
from sharding.eplb.steps import trace_layout
from sharding.eplb.totals import global_layout

#: Gain on held-out steps below which nothing moves.
THRESHOLD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do with one layer's experts.

    layout: int32 [slots]; the present one if nothing moves. gain: share of the busiest rank's rows
    that a new plan saves on held-out steps. moved: slots whose content changes. before, after:
    busiest over mean rank on the whole window, with the present layout and with `layout`.
    """

    layout: np.ndarray
    gain: float
    moved: int
    before: float
    after: float


def plan_placement(trace: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """Returns the better of the two placements on this window, int32 [slots].

    That from the load of every step, unless that from the totals has the smaller sum of the busiest
    rank: the result is never above the published algorithm's. trace: rows by step and expert, [S,
    E]. Every process that has the same trace gets the same plan.
    """
    by_step = trace_layout(trace, slots, ranks)
    by_total = global_layout(trace.sum(axis=0), slots, ranks)
    if busiest(trace, by_total, ranks) < busiest(trace, by_step, ranks):
        return by_total
    return by_step


def decide(
    trace: np.ndarray, present: np.ndarray, ranks: int, *, threshold: float = THRESHOLD
) -> Decision:
    """Returns whether and how to place one layer's experts again.

    Args:
        trace: rows by step and expert, [S, E], of real steps: no padding, no warm-up.
        present: the layout in force, int32 [slots].
        ranks: devices that share the experts.
        threshold: least gain for which anything moves.

    Raises:
        ShardingError: `present` is no placement of these experts.
    """
    experts, slots = trace.shape[1], len(present)
    check_layout(present, experts, ranks)
    before = imbalance(trace, present, ranks)
    gain = _held_out_gain(trace, present, ranks)
    if not gain > threshold:
        return Decision(layout=present, gain=gain, moved=0, before=before, after=before)
    layout = keep_in_place(present, plan_placement(trace, slots, ranks), ranks)
    return Decision(
        layout=layout,
        gain=gain,
        moved=int((layout != present).sum()),
        before=before,
        after=imbalance(trace, layout, ranks),
    )


def decide_all(
    trace: np.ndarray, layouts: np.ndarray, ranks: int, *, threshold: float = THRESHOLD
) -> list[Decision]:
    """Returns `decide` for every layer. trace: [S, L, E]. layouts: those in force, [L, slots]."""
    return [
        decide(trace[:, layer], layout, ranks, threshold=threshold)
        for layer, layout in enumerate(layouts)
    ]


def _held_out_gain(trace: np.ndarray, present: np.ndarray, ranks: int) -> float:
    """Returns the share of J on odd steps that a plan made from even steps saves; 0 if idle."""
    planned, scored = trace[::2], trace[1::2]
    now = busiest(scored, present, ranks) if len(scored) else 0.0
    if not now:
        return 0.0
    return 1.0 - busiest(scored, plan_placement(planned, len(present), ranks), ranks) / now


def keep_in_place(present: np.ndarray, wanted: np.ndarray, ranks: int) -> np.ndarray:
    """Returns `wanted` with ranks and slots renamed so that as much as possible lies where it is.

    Ranks are interchangeable, and so are the slots of a rank. Pairs of ranks with the most experts
    in common are matched first.
    """
    old, new = present.reshape(ranks, -1), wanted.reshape(ranks, -1)
    experts = int(max(present.max(), wanted.max())) + 1
    held = [np.stack([np.bincount(row, minlength=experts) for row in rows]) for rows in (old, new)]
    common = np.minimum(held[0][:, None], held[1][None]).sum(axis=2)
    layout = np.empty_like(old)
    free_old, free_new = np.ones(ranks, bool), np.ones(ranks, bool)
    for flat in np.argsort(-common.reshape(-1), kind="stable"):
        rank, other = divmod(int(flat), ranks)
        if free_old[rank] and free_new[other]:
            free_old[rank] = free_new[other] = False
            layout[rank] = _same_slots(old[rank], new[other])
    return layout.reshape(-1)


def _same_slots(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the experts of `new` ordered so that those of `old` keep their slots."""
    left, row = list(new), np.full(len(old), -1, old.dtype)
    for slot, expert in enumerate(old):
        if expert in left:
            left.remove(expert)
            row[slot] = expert
    row[row < 0] = left
    return row
