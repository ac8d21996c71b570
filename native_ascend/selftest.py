"""Small cases that tell how an operator library packs, rounds and orders (ascend.md 10, U3 to U5).

Each case is exact and fails under one other convention, which a failure names. To be run on a
device before anything else is believed; on the double it proves the cases notice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from native_ascend import attention, ops
from native_ascend.errors import AscendError
from native_ascend.runtime import AscendRuntime


def _e8m0(scale: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.lax.bitcast_convert_type(jnp.asarray(scale, jnp.uint8), jnp.float8_e8m0fnu)


def _nibbles() -> tuple[Any, Any]:
    """E2M1 codes 1.0 and 2.0 alternate; the activations see the even ones only."""
    import jax.numpy as jnp

    x = np.zeros((1, 64), np.float32)
    x[0, ::2] = 1
    with _x64():
        found = ops.grouped_matmul(
            jnp.asarray(x).astype(jnp.float8_e4m3fn),
            _e8m0(np.full((1, 1, 2), 127)),
            jnp.full((1, 16, 32), 0x42, jnp.uint8),
            _e8m0(np.full((1, 16, 1, 2), 127)),
            jnp.asarray([1], jnp.int64),
        )
    return found, np.full((1, 16), 32.0)


def _scales() -> tuple[Any, Any]:
    """449 needs the scale 2 where it is rounded up, and 1 where it is rounded down."""
    import jax.numpy as jnp

    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 32] = 456, 448
    _, scales = ops.mx_quant(jnp.asarray(x, jnp.bfloat16))
    return scales, np.asarray([[[2.0, 1.0]]])


def _halves() -> tuple[Any, Any]:
    """The gate comes first: a gate of 0 gives 0 whatever `up` is, and not the reverse."""
    import jax.numpy as jnp

    x = np.zeros((1, 128), np.float32)
    x[0, :64] = -100  # silu(-100) * 1 = 0; silu(1) * -10 is not
    x[0, 64:] = 1
    codes, _ = ops.swiglu_quant(jnp.asarray(x, jnp.bfloat16), None, 10.0)
    return jnp.abs(codes.astype(jnp.float32)) > 1, np.zeros((1, 64), bool)


def _attend(sink: float) -> Any:
    """Attention of one zero query over a window of 2 of 4 rows that hold 1, 2, 4, 8."""
    import jax.numpy as jnp

    rows = np.zeros((1, 4, 1, 512), np.float32)
    rows[0, :, 0, :] = np.asarray([1, 2, 4, 8])[:, None]
    return attention.sparse_attention(
        jnp.zeros((1, 1, 512), jnp.bfloat16),
        jnp.asarray(rows, jnp.bfloat16),
        jnp.asarray([0, 1], jnp.int32),
        jnp.asarray([4], jnp.int32),
        jnp.zeros((1, 1), jnp.int32),
        jnp.full((1,), sink, jnp.float32),
        2,
    )[0, 0, :1]


def _window() -> tuple[Any, Any]:
    """A negligible sink: the mean of the two last rows."""
    return _attend(-1e4), np.asarray([6.0])


def _sink() -> tuple[Any, Any]:
    """A sink of log 2 counts as two rows of zeros."""
    return _attend(float(np.log(2))), np.asarray([3.0])


def _ties() -> tuple[Any, Any]:
    """Equal logits: the lowest experts."""
    import jax.numpy as jnp

    _, ids = ops.gating_topk(jnp.zeros((1, 8)), jnp.zeros(8), 2, 1.0)
    return ids, np.asarray([[0, 1]])


def _x64() -> Any:
    import jax

    return jax.enable_x64(True)


_CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "nibble order of E2M1": _nibbles,
    "scales are rounded up": _scales,
    "gate before up": _halves,
    "window of the query": _window,
    "sink counts once": _sink,
    "ties go to the lower id": _ties,
}


def self_test(names: Sequence[str] = tuple(_CASES)) -> None:
    """Runs the cases on the loaded runtime.

    Raises:
        AscendError: names every case that failed, with what was expected and found.
    """
    failures = []
    for name in names:
        found, expected = _CASES[name]()
        found = np.asarray(found).astype(expected.dtype)
        if not np.allclose(found, expected, rtol=1e-2):
            failures.append(f"{name}: expected {expected.ravel()[:4]}, found {found.ravel()[:4]}")
    if failures:
        raise AscendError(
            "the operators of this runtime follow other conventions, so no result of a model may "
            f"be believed: {'; '.join(failures)}",
            status="INTERNAL",
        )


def before_first_use(loaded: AscendRuntime) -> None:
    """Runs the cases once on a runtime that is no double, before a model runs on it.

    Raises:
        AscendError: a convention differs; nothing is to run.
    """
    if loaded.is_double or loaded.is_tested:
        return
    self_test()
    loaded.is_tested = True
