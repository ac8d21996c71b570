"""Placement from the load of every step, greedy on the busiest ranks' sum (parallelism.md 4.4).

Bursts of different experts at different steps may share a rank, which totals cannot see.
"""

import numpy as np


def trace_layout(trace: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """Returns the placement of E experts in `slots` slots of `ranks` ranks, int32 [slots].

    trace: rows by step and expert, [S, E].
    """
    trace = np.asarray(trace, np.float64)
    held = _replicate(trace, slots)
    count = np.bincount(held, minlength=trace.shape[1])
    return _place(trace[:, held] / count[held], held, ranks)


def _replicate(trace: np.ndarray, slots: int) -> np.ndarray:
    """Returns which expert each slot holds: all in order, then extras one by one.

    An extra goes where it lowers the sum over steps of the heaviest replica most.
    """
    steps, experts = trace.shape
    order = np.arange(steps)
    tie_break = np.arange(experts) * 1e-4
    held, count = list(range(experts)), np.ones(experts)
    for _ in range(slots - experts):
        share = trace / count
        heaviest = ((trace + tie_break) / count).argmax(axis=1)
        peak = share[order, heaviest]
        share[order, heaviest] = -np.inf
        after = np.maximum(share.max(axis=1), trace[order, heaviest] / (count[heaviest] + 1))
        gain = np.bincount(heaviest, weights=peak - after, minlength=experts)
        chosen = int(np.argmax(gain))
        held.append(chosen)
        count[chosen] += 1
    return np.asarray(held)


def _place(share: np.ndarray, held: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the experts by rank; share: rows of every slot at every step, [S, slots].

    The heaviest slot first, to the rank where it raises the sum of the busiest rank least.
    """
    steps, slots = share.shape
    load, peak = np.zeros((steps, ranks)), np.zeros(steps)
    placed: list[list[int]] = [[] for _ in range(ranks)]
    room = np.full(ranks, slots // ranks)
    for slot in np.argsort(-share.sum(axis=0), kind="stable"):
        after = np.maximum(peak[:, None], load + share[:, slot, None]).sum(axis=0)
        chosen = int(np.argmin(np.where(room > 0, after, np.inf)))
        load[:, chosen] += share[:, slot]
        np.maximum(peak, load[:, chosen], out=peak)
        placed[chosen].append(int(held[slot]))
        room[chosen] -= 1
    return np.concatenate(placed).astype(np.int32)
