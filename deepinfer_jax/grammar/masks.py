"""The mask rows of one step, for the device (io.md 2.7)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_jax.grammar.matcher import ALL, BoundRows, Matcher

if TYPE_CHECKING:
    import llguidance


@dataclass(frozen=True, slots=True)
class MaskRows:
    """words int32 [n, w]: bit i % 32 of word i // 32 is set where id i is allowed. place int32 [n]:
    of each row in the table of all rows that choose a token. forced int32 [n, k]: what the grammar
    all but dictates after a row's token, -1 where it does not: the best drafts there are. dead:
    matchers that allow nothing.
    """

    words: np.ndarray
    place: np.ndarray
    forced: np.ndarray
    dead: tuple[Matcher, ...]


def blank_masks(rows: int, width: int, drafts: int) -> MaskRows:
    """Returns rows that allow everything, all of them at the first place of the table."""
    return MaskRows(
        words=np.full((rows, width), ALL, np.int32),
        place=np.zeros(rows, np.int32),
        forced=np.full((rows, drafts), -1, np.int32),
        dead=(),
    )


def fill_masks(
    executor: "llguidance.LLExecutor",
    width: int,
    wanted: Sequence[tuple[int, Matcher]],
    drafts: int = 0,
) -> MaskRows:
    """Returns one row for the next token of every matcher and one for each of its drafts.

    A row behind a draft that is not in the grammar, or behind the end, allows everything: the row
    before it never chooses that draft, so it is never reached. Drafts are walked along on a copy:
    llguidance 1.9.1 does not always come back to the same state once it has made a mask behind
    them, so what has taken a draft never takes a token again. The threads of `executor` share the
    work, and the interpreter is free meanwhile.

    Args:
        executor: of llguidance.
        width: w, the words of a row.
        wanted: pairs of (place of the first row in the table, matcher).
        drafts: k of `MaskRows.forced`.
    """
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    counts = [1 + len(matcher.drafts) for _, matcher in wanted]
    starts = np.cumsum([0, *counts])
    words = np.full((starts[-1], width), ALL, np.int32)
    place = np.zeros(len(words), np.int32)
    forced = np.full((len(words), drafts), -1, np.int32)
    bound: list[tuple[Matcher, int, int, BoundRows, llguidance.LLMatcher]] = []
    lone, drafted = [], []  # rows of a token alone, and rows along drafts
    for (first, matcher), start, stop in zip(wanted, starts[:-1], starts[1:], strict=True):
        place[start:stop] = first + np.arange(stop - start)
        rows = matcher.fill_free(words[start:stop])
        if rows is not None:
            row = int(start) + rows.first
            walker = rows.matcher.deep_copy() if rows.drafts else rows.matcher
            bound.append((matcher, row, int(stop), rows, walker))
            if rows.drafts:
                drafted.append((walker, row, list(rows.drafts)))
            else:
                lone.append((walker, row))
    if lone:
        fill_next_token_bitmask_par(executor, lone, words)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, words)
    for matcher, row, stop, rows, walker in bound:
        if walker.is_error():
            matcher.refill(rows, words[row:stop])
        words[row:stop] &= matcher.vocabulary.allowed
        if drafts:
            _force(matcher, rows, words[row:stop], forced[row:stop])
    dead = tuple(
        matcher
        for (_, matcher), start in zip(wanted, starts[:-1], strict=True)
        if not words[start].any()
    )
    return MaskRows(words=words, place=place, forced=forced, dead=dead)


def _force(matcher: Matcher, rows: BoundRows, words: np.ndarray, forced: np.ndarray) -> None:
    """Fills `MaskRows.forced` of the bound rows of one matcher."""
    if rows.matcher.is_error():
        return
    for place in np.flatnonzero(np.bitwise_count(words).sum(axis=1) == 1).tolist():
        ids = matcher.forced_after(rows, place)[: forced.shape[1]]
        forced[place, : len(ids)] = ids
