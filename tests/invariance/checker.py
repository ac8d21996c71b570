"""Bitwise comparison of rows, and the prompt the invariance tests share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden.ledger import Fixture

ROWS = (1, 2, 3, 7, 8, 9, 16, 63, 64, 65, 200)
#: 300 tokens of prompt C.
PROMPT: np.ndarray = Fixture("tiny_v41/golden_f32").arrays["C.ids"]


def bits(array: Any) -> np.ndarray:
    """Returns float32 values as their bit patterns."""
    array = np.ascontiguousarray(array)
    assert array.dtype == np.float32
    return array.view(np.uint32)


def differing(label: str, got: Any, want: Any) -> list[str]:
    """Returns one line if any bit differs: how many, where first, both values."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{label}: shape {got.shape}, want {want.shape}"
    wrong = np.argwhere(bits(got) != bits(want))
    if not len(wrong):
        return []
    at = tuple(map(int, wrong[0]))
    steps = int(bits(got)[at]) - int(bits(want)[at])
    rows = len(np.unique(wrong[:, 0]))
    return [
        f"{label}: {len(wrong)} of {got.size} values in {rows} of {len(got)} rows; first at "
        f"{at}: {got[at]!r} != {want[at]!r} ({steps} ulps)"
    ]


def differing_prefixes(
    score: Callable[[np.ndarray], Any], counts: tuple[int, ...], of: int = 200
) -> list[str]:
    """Returns a line for every M whose score(ids[:M]) is not score(ids[:of])[:M] bit for bit."""
    whole = np.asarray(score(PROMPT[:of]))
    report = []
    for count in counts:
        report += differing(f"M={count}", score(PROMPT[:count]), whole[:count])
    return report
