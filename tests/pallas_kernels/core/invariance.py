"""Row-invariance checker: a row's bits must not depend on the number of rows or on its place.

    report = differing_rows(lambda x: core.contract(x, w), [x])
    assert not report, report

The callable must look the operation up through its module when it is called, so that a positive
control can replace the attribute; it is traced anew for every number of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

ROWS = (1, 2, 3, 7, 8, 9, 16, 63, 64, 65, 200)


def bits(x: Any) -> np.ndarray:
    """Returns the bit patterns of an array as unsigned integers (bool as uint8)."""
    x = np.asarray(x)
    return np.ascontiguousarray(x).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.itemsize])


def assert_same_bits(got: Any, want: Any) -> None:
    """Asserts equal dtype, shape and bits; a failure prints the first place and both values."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (got.dtype, got.shape, want.shape)
    wrong = np.argwhere(bits(got) != bits(want))
    if len(wrong):
        where = tuple(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {got.size} differ; {where}: {got[where]!r} != {want[where]!r}"
        )


def adversarial(seed: int, shape: Sequence[int], decades: int = 4) -> np.ndarray:
    """Returns float32 values of mixed magnitude, half of them nearly cancelling in pairs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-decades, decades + 1, shape)
    half = shape[-1] // 2
    cancel = rng.random((*shape[:-1], half)) < 0.5
    x[..., half : 2 * half] = np.where(
        cancel,
        -x[..., :half] * (1 + 1e-6 * rng.standard_normal(cancel.shape)),
        x[..., half : 2 * half],
    )
    return x.astype(np.float32)


def differing_rows(
    call: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    rows: Sequence[int] = ROWS,
    jit: bool = True,
) -> list[str]:
    """Returns one line for every slice of rows whose bits differ from the largest call's.

    Args:
        call: function of arrays [m, ...]; returns a pytree of arrays [m, ...].
        arrays: inputs with max(rows) rows.
        rows: row counts; each is taken from the first, a middle and the last possible offset.
        jit: compile each call (False: eager).
    """
    total = max(rows)
    arrays = [np.asarray(a)[:total] for a in arrays]

    def run(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(o) for o in jax.tree.leaves(compiled(*parts))]

    # a new function object: nothing traced before a monkeypatch may be reused
    def fresh(*parts: Any) -> Any:
        return call(*parts)

    compiled = jax.jit(fresh) if jit else fresh
    whole = run(arrays)
    report = []
    for count in rows:
        for start in sorted({0, (total - count) // 2 | 1 if count < total else 0, total - count}):
            part = run([a[start : start + count] for a in arrays])
            for index, (got, want) in enumerate(zip(part, whole, strict=True)):
                want = want[start : start + count]
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                wrong = int((bits(got) != bits(want)).sum())
                if wrong:
                    report.append(f"m={count} at {start}, output {index}: {wrong} of {got.size}")
    return report
