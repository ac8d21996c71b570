"""How many rows a step verifies: those that give most expected tokens per second.

Totals are fixed before a step is dispatched, from survivals two rounds old, so no draft that they
choose between has been drawn when they are known (engine.md 2.8, 3.5, 3.6). On the device,
`schedule.verify_lengths` shares a total out by the newest survivals. Host NumPy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Rows of a step and what is expected of them.

    total: rows of all decoding sequences together. tokens: expected of them. seconds: of the
    step, drafting included. drafting_pays: tokens and prompt rows per second are more than one row
    per sequence gives without drafting.
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
    prompt_rows: int = 0,
    budget: int = 0,
    draft_seconds: float = 0.0,
) -> Budget:
    """Returns the total with the most expected tokens per second, the smallest of equal ones.

    With survivals a in descending order, tokens(b) = r + a_1 + ... + a_{b-r}. Prompts take the rows
    p(b) that a total leaves them, and a row of a prompt counts as a token: a request waits for both
    alike, and where prompts wait, what drafts gain in tokens they can lose in prompts. The best b
    in r..r * (1 + n) maximises (tokens(b) + p(b)) / (cost(b + p(b)) + draft_seconds). All of them
    are compared: the curve is a staircase, and the first fall is not the end.

    Without prompts, a curve times a factor that grows with the rows never raises the total, and
    seconds that all sizes share (drafting, a fixed part) never lower it: more rows share them.

    Args:
        survival: of running sequences, see `complete_survival`; a NaN counts 0.
        cost: seconds of steps of so many rows [b] -> [b], all above 0, without drafting.
        capacity: most rows of the sequences; each has one row whatever it is. Where a curve falls,
            only this keeps the total from places without a draft.
        prompt_rows: that prompts would like to have in the same step.
        budget: rows that both share; prompts get what the sequences leave of it.
        draft_seconds: what drafting adds to a step, whatever its rows.
    """
    sequences, drafts = survival.shape
    if not sequences:
        return Budget(total=0, tokens=0.0, seconds=0.0, drafting_pays=False)
    most = max(sequences, min(sequences * (1 + drafts), capacity))
    rates = np.where(np.isnan(survival), 0, survival).reshape(-1)
    rates = np.sort(rates)[::-1][: most - sequences]
    tokens = np.cumsum(np.concatenate([[np.float64(sequences)], rates]))
    totals = np.arange(sequences, most + 1)
    prompts = np.clip(budget - totals, 0, prompt_rows)
    plain = cost(totals + prompts)
    seconds = plain + draft_seconds
    throughput = (tokens + prompts) / seconds
    best = int(np.argmax(throughput))  # the first of equal ones
    return Budget(
        total=sequences + best,
        tokens=float(tokens[best]),
        seconds=float(seconds[best]),
        drafting_pays=bool(throughput[best] > (tokens[0] + prompts[0]) / plain[0]),
    )
