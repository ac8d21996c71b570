"""How many rows a step verifies: most expected tokens per second, or a fixed rule.

Totals are fixed before a step is dispatched, from survivals two rounds old, so no draft that they
choose between has been drawn when they are known (engine.md 2.8, 3.5, 3.6). On the device,
`schedule.verify_lengths` shares a total out by the newest survivals. Host NumPy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from deepinfer_jax.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Rows of a step and what is expected of them.

    total: rows of all decoding sequences together. tokens: expected of the step. seconds: of the
    step, drafting included. drafting_pays: tokens per second are more than one row per sequence
    gives without drafting.
    """

    total: int
    tokens: float
    seconds: float
    drafting_pays: bool


def complete_survival(
    survival: Float[np.ndarray, "r n"],
    is_known: Bool[np.ndarray, " r"],
    drafts: Int[np.ndarray, " r"],
    usual: Float[np.ndarray, " n"],
) -> Float[np.ndarray, "r n"]:
    """Returns survivals in which nothing is missing (engine.md 3.6).

    A draft whose survival is not known yet has the usual one of its place; a place without a draft,
    and a NaN, count 0.

    Args:
        survival: of the drafts of each sequence, from two rounds ago.
        is_known: the sequence had a round then.
        drafts: how many drafts each sequence has to verify in this step, 0 to n.
        usual: survivals of rounds before these.
    """
    filled = np.where(is_known[:, None], np.where(np.isnan(survival), 0, survival), usual)
    exists = np.arange(survival.shape[1]) < drafts[:, None]
    return np.where(exists, filled, 0).astype(survival.dtype)


def best_total(
    survival: Float[np.ndarray, "r n"],
    cost: Callable[[np.ndarray], np.ndarray],
    *,
    capacity: int,
    extra_rows: int = 0,
    draft_seconds: float = 0.0,
) -> Budget:
    """Returns the total with the most expected tokens per second, the smallest of equal ones.

    With survivals a in descending order, tokens(b) = r + a_1 + ... + a_{b-r}, and the best b in
    r..r * (1 + n) maximises tokens(b) / (cost(b + extra_rows) + draft_seconds). All of them are
    compared: the curve is a staircase, and the first fall is not the end.

    A curve times a factor that grows with the rows never raises the total. Seconds that all sizes
    share (drafting, a fixed part) never lower it: more rows share them.

    Args:
        survival: of running sequences, see `complete_survival`; a NaN counts 0.
        cost: seconds of steps of so many rows [b] -> [b], all above 0, without drafting.
        capacity: most rows of a step, prompt rows too; each sequence has one row whatever it is.
            Where a curve falls, only this keeps the total from places without a draft.
        extra_rows: prompt rows of the same step.
        draft_seconds: what drafting adds to a step, whatever its rows.
    """
    sequences, drafts = survival.shape
    if not sequences:
        return Budget(total=0, tokens=0.0, seconds=0.0, drafting_pays=False)
    most = _most_rows(sequences, drafts, capacity - extra_rows)
    rates = np.where(np.isnan(survival), 0, survival).reshape(-1)
    rates = np.sort(rates)[::-1][: most - sequences]
    tokens = np.cumsum(np.concatenate([[np.float64(sequences)], rates]))
    plain = cost(np.arange(sequences, most + 1) + extra_rows)
    seconds = plain + draft_seconds
    throughput = tokens / seconds
    best = int(np.argmax(throughput))  # the first of equal ones
    return Budget(
        total=sequences + best,
        tokens=float(tokens[best]),
        seconds=float(seconds[best]),
        drafting_pays=bool(throughput[best] > tokens[0] / plain[0]),
    )


def fixed_total(sequences: int, length: int, *, capacity: int, extra_rows: int = 0) -> int:
    """Returns the total if every sequence verifies `length` drafts, as far as the capacity goes.

    Args:
        sequences: running ones; each has one row whatever the capacity is.
        length: drafts of each.
        capacity: most rows of a step.
        extra_rows: prompt rows of the same step.
    """
    return _most_rows(sequences, length, capacity - extra_rows)


def threshold_lengths(
    survival: Float[np.ndarray, "r n"], threshold: float
) -> Int[np.ndarray, " r"]:
    """Returns 1 + the leading drafts of each sequence that survive with at least `threshold`.

    Args:
        survival: of the drafts; a NaN counts 0.
        threshold: above 0 and at most 1; at 0 a place without a draft would count.

    Raises:
        InputError: the threshold is outside its range.
    """
    if not 0 < threshold <= 1:
        raise InputError(f"threshold must be above 0 and at most 1, got {threshold}")
    return 1 + np.logical_and.accumulate(survival >= threshold, axis=1).sum(axis=1)


def _most_rows(sequences: int, drafts: int, room: int) -> int:
    return max(sequences, min(sequences * (1 + drafts), room))
