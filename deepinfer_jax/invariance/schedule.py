"""How a sequence's rows are run: in which calls, beside whom, on which cache.

A schedule is data, so that it can be run twice: for logits, and again with every layer observed.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.config.model import Replay

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence in a call: `ids` from position `start` on.

    kept: leading rows whose logits are compared. 0 for neighbours; those beyond it are rejected
    drafts, or rows that only rebuild windows.
    """

    slot: int
    start: int
    ids: Ids
    kept: int = 0
    skipped: int = 0  # rows before the kept ones


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the network. order: which part each row is of; None is one after the other."""

    parts: tuple[Part, ...]
    order: Ids | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Makes a slot ready for rows from `first` on, of which `length` hit the cache."""

    slot: int
    ids: Ids
    length: int = 0
    first: int = 0
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Saves the windows of a slot that has run exactly `length` tokens."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Puts the windows that were saved at `length` into a slot."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Share:
    """Lets a slot use the first blocks of another."""

    source: int
    target: int
    blocks: int


Action = Call | Open | Save | Restore | Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a cache and of the plans that run on it; each is one compiled program.

    rows: of a plan. slots: without the null slot. tokens: of a slot.
    """

    rows: int
    slots: int
    tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is done with the sequence `ids`.

    detail: in words. poisoned: the cache starts full of NaN and other garbage. floor: with replay,
    the first position whose logits mean anything.
    """

    ids: Ids
    actions: tuple[Action, ...]
    detail: str
    shape: Shape
    poisoned: bool = True
    replay: Replay = "off"
    floor: int = 0


def chunks(slot: int, ids: Ids, sizes: Items[int], *, start: int = 0) -> list[Call]:
    """Returns calls that run `ids` from `start` on in chunks of these sizes, the last repeated."""
    calls, sizes = [], list(sizes)
    while start < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = ids[start : start + size]
        calls.append(Call((Part(slot, start, part, len(part)),)))
        start += size
    return calls


def with_drafts(
    slot: int, ids: Ids, wrong: Ids, counts: Items[tuple[int, int]], *, start: int
) -> list[Call]:
    """Returns rounds of an anchor and drafts: counts are (drafts, how many of them are right).

    A right draft is the sequence's own token. wrong: a token at each position that is not.
    """
    calls, counts = [], list(counts)
    while start < len(ids):
        drafts, right = counts.pop(0) if len(counts) > 1 else counts[0]
        stop = min(start + 1 + drafts, len(ids))
        kept = min(1 + right, stop - start)
        rows = ids[start : start + kept] + wrong[start + kept : stop]
        calls.append(Call((Part(slot, start, rows, kept),)))
        start += kept
    return calls


def merged(rng: np.random.Generator, streams: Items[Items[Action]], most: int) -> list[Action]:
    """Returns the streams of several sequences run together, rows mixed.

    Calls of different streams join in one call, at random, while it has at most `most` rows; what
    is no call goes before the call in which its stream continues.
    """
    todo, found = [list(stream) for stream in streams], []
    while any(todo):
        parts: list[Part] = []
        for place in rng.permutation(len(todo)):
            stream = todo[place]
            if not stream or (parts and rng.random() < 0.3):
                continue
            while stream and not isinstance(stream[0], Call):
                found.append(stream.pop(0))
            rows = sum(len(part.ids) for part in parts)
            if stream and rows + sum(len(one.ids) for one in stream[0].parts) <= most:
                parts += stream.pop(0).parts
        if parts:
            owner = np.repeat(np.arange(len(parts)), [len(part.ids) for part in parts])
            if rng.random() < 0.7:
                owner = rng.permutation(owner)
            found.append(Call(tuple(parts), tuple(owner.tolist())))
    return found
