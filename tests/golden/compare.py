"""Comparisons at the tolerances of tests/fixtures/README.md; no other tolerance exists here.

A failure prints the worst position, both values and their distance in units of the last place.
`measuring` collects the largest error per tolerance, for the reports of the coverage tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_worst: dict[str, float] = {}


@contextmanager
def measuring(into: dict[str, float]) -> Iterator[None]:
    """Adds the largest errors of the comparisons inside to `into`."""
    _worst.clear()
    yield
    for label, value in _worst.items():
        into[label] = max(into.get(label, 0.0), value)


def _host(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.kind in "fV" else array


def _order(array: np.ndarray) -> np.ndarray:
    """Returns integers in which neighbouring float32 values differ by one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -0x80000000 - bits, bits)


def _report(label: str, got: np.ndarray, want: np.ndarray, at: tuple, why: str) -> AssertionError:
    distance = ""
    if got.dtype == np.float32:
        steps = abs(int(_order(got[at]).item()) - int(_order(want[at]).item()))
        distance = f", {steps} float32 ulps ({steps / 65536:.4g} BF16 steps) apart"
    return AssertionError(
        f"{label}: {why}; worst at {tuple(map(int, at))}: got {got[at]!r}, want {want[at]!r}"
        + distance
    )


def _pair(label: str, got: Any, want: Any) -> tuple[np.ndarray, np.ndarray]:
    got, want = _host(got), _host(want)
    if got.shape != want.shape:
        raise AssertionError(f"{label}: got shape {got.shape}, want {want.shape}")
    return got, want


def _finite(label: str, got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns |got - want| with equal infinities at 0, and the largest finite |want|."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    error = np.where((got == want) & np.isinf(want), 0.0, error)
    error = np.where(np.isnan(error), np.inf, error)
    finite = np.abs(want[np.isfinite(want)])
    return error, float(finite.max()) if finite.size else 0.0


def note(label: str, value: float) -> None:
    """Records an error for `measuring`."""
    _worst[label] = max(_worst.get(label, 0.0), value)


def exact(label: str, got: Any, want: Any) -> None:
    """Asserts equal bits (integers: equal values)."""
    got, want = _pair(label, got, want)
    if want.dtype == np.float32:
        got_bits, want_bits = (
            np.ascontiguousarray(a, np.float32).view(np.uint32) for a in (got, want)
        )
        wrong = got_bits != want_bits
    else:
        wrong = got != want
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise _report(label, got, want, at, f"{int(wrong.sum())} of {wrong.size} differ")


def relative(label: str, got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Asserts |got - want| <= tolerance * max |want|; infinities must be equal."""
    got, want = _pair(label, got, want)
    error, largest = _finite(label, got, want)
    if error.size == 0:
        return
    figure = float(error.max()) / largest if largest else float(error.max())
    note(f"relative, at most {tolerance}", figure)
    if not figure <= tolerance:
        at = np.unravel_index(int(error.argmax()), error.shape)
        raise _report(label, got, want, at, f"relative error {figure:.3g} > {tolerance}")


def absolute(label: str, got: Any, want: Any, tolerance: float) -> None:
    """Asserts |got - want| <= tolerance."""
    got, want = _pair(label, got, want)
    error, _ = _finite(label, got, want)
    if error.size:
        note(f"absolute, at most {tolerance}", float(error.max()))
    if error.size and not float(error.max()) <= tolerance:
        at = np.unravel_index(int(error.argmax()), error.shape)
        raise _report(label, got, want, at, f"error {error.max():.3g} > {tolerance}")


def one_step(label: str, got: Any, want: Any) -> None:
    """Asserts at most one BF16 step on at most 0.5 % of elements, else equal."""
    got, want = _pair(label, got, want)
    if (got.view(np.uint32) & 0xFFFF).any():
        at = tuple(np.argwhere(got.view(np.uint32) & 0xFFFF)[0])
        raise _report(label, got, want, at, "not representable in BF16")
    steps = np.abs(_order(got) - _order(want)) >> 16
    share = float((steps > 0).mean()) if steps.size else 0.0
    note("1ulp share", share)
    if steps.size and (steps.max() > 1 or share > 0.005):
        at = np.unravel_index(int(steps.argmax()), steps.shape)
        why = f"{int((steps > 0).sum())} of {steps.size} differ, by up to {steps.max()} BF16 steps"
        raise _report(label, got, want, at, why)


def rounded(label: str, got: Any, want: Any) -> None:
    """Asserts relative Frobenius error < 1e-2 and no element off by > 5 % of the largest value."""
    got, want = _pair(label, got, want)
    error, largest = _finite(label, got, want)
    if error.size == 0:
        return
    norm = float(np.sqrt(np.square(want[np.isfinite(want)], dtype=np.float64).sum()))
    frobenius = float(np.sqrt(np.square(error).sum()))
    share = frobenius / norm if norm else frobenius
    element = float(error.max()) / largest if largest else float(error.max())
    note("bf16 frobenius", share)
    note("bf16 element", element)
    if not (share < 1e-2 and element <= 0.05):
        at = np.unravel_index(int(error.argmax()), error.shape)
        why = f"relative Frobenius {share:.3g} (< 0.01), worst element {element:.3g} (<= 0.05)"
        raise _report(label, got, want, at, why)


def same_sets(label: str, got: Any, want: Any) -> None:
    """Asserts equal sets of non-negative entries in every row; -1 is absent."""
    got, want = np.asarray(got), np.asarray(want)
    for row, (g, w) in enumerate(zip(got, want, strict=True)):
        have, need = sorted(g[g >= 0].tolist()), sorted(w[w >= 0].tolist())
        if have != need:
            raise AssertionError(f"{label}: row {row}: got {have}, want {need}")


def close_sets(label: str, got: Any, want: Any, scores: Any, tolerance: float) -> None:
    """As `same_sets`, but entries may differ whose scores are closer than `tolerance`."""
    got, want, scores = np.asarray(got), np.asarray(want), np.asarray(scores, np.float64)
    for row, (g, w) in enumerate(zip(got, want, strict=True)):
        have, need = set(g[g >= 0].tolist()), set(w[w >= 0].tolist())
        swapped = [scores[row, i] for i in have ^ need]
        spread = max(swapped) - min(swapped) if swapped else 0.0
        if len(have) != len(need) or not spread <= tolerance:
            raise AssertionError(
                f"{label}: row {row}: got {sorted(have)}, want {sorted(need)}, scores of the "
                f"difference {swapped} (tolerance {tolerance:.3g})"
            )


def by_id(values: Any, ids: Any) -> np.ndarray:
    """Returns `values` of every row ordered by ascending id."""
    return np.take_along_axis(np.asarray(values), np.asarray(ids).argsort(axis=1), axis=1)
