"""Every primitive gives a row the same bits for any number of rows, and the checker can tell.

Operations are looked up as attributes of ``core`` when they run, so the positive controls replace
what is shipped. Shapes are such that stock XLA:CPU varies (determinism.md 5.1): for the per-row
products only where a product degenerates to a sum (one query and one key, or one column).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import core
from tests.pallas_kernels.core.invariance import (
    adversarial,
    assert_same_bits,
    bits,
    differing_rows,
)

pytestmark = pytest.mark.accept(2)

TOTAL = 200


def _rows(seed: int, *shape: int) -> np.ndarray:
    return adversarial(seed, (TOTAL, *shape))


def _logits(width: int) -> np.ndarray:
    return (5 * np.random.default_rng(7).standard_normal((TOTAL, width))).astype(np.float32)


def _weight(*shape: int) -> np.ndarray:
    return adversarial(8, shape, decades=1)


def _quantised(layout: str, payload: tuple[int, ...], scale: tuple[int, ...]) -> core.QuantArray:
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 120, payload).astype(np.uint8)
    return core.QuantArray(codes, rng.integers(118, 130, scale).astype(np.uint8), layout)


def _contract(n: int, k: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    w = _weight(n, k)
    return lambda x: core.contract(x, w), [_rows(1, k)]


def _contract_quantised(w: core.QuantArray) -> tuple[Callable[..., Any], list[np.ndarray]]:
    return lambda x: core.contract(x, w), [_rows(1, w.shape[-1])]


def _grouped(n: int, k: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    w = _weight(4, n, k)
    return lambda x: core.contract_grouped(x, w), [_rows(2, 4, k)]


def _pairs(h: int, j: int, k: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    return lambda x, y: core.contract_pairs(x, y), [_rows(3, h, k), _rows(4, j, k)]


def _values(h: int, j: int, k: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    return lambda p, y: core.contract_values(p, y), [_rows(3, h, j), _rows(4, j, k)]


def _rms_norm(width: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    w = _weight(width)
    return lambda x: core.rms_norm(x, w, 1e-20), [_rows(5, width)]


CASES: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "contract-64x64": _contract(64, 64),
    "contract-512x512": _contract(512, 512),
    "contract-64x1024": _contract(64, 1024),
    "contract-24x1300": _contract(24, 1300),
    "contract-fp8": _contract_quantised(_quantised("fp8_block32", (96, 1200), (3, 38))),
    "contract-fp4": _contract_quantised(_quantised("fp4_row32", (96, 608), (96, 38))),
    "grouped-64x512": _grouped(64, 512),
    "grouped-64x1024": _grouped(64, 1024),
    "pairs-4x64x64": _pairs(4, 64, 64),
    "pairs-1x1x64": _pairs(1, 1, 64),
    "pairs-1x24x576": _pairs(1, 24, 576),
    "values-4x64x64": _values(4, 64, 64),
    "values-1x64x1": _values(1, 64, 1),
    "rms_norm-64": _rms_norm(64),
    "rms_norm-512": _rms_norm(512),
    "rms_scale": (lambda x: core.rms_scale(x, 1e-6), [_rows(5, 512)]),
    "mean_square": (lambda x: core.mean_square(x), [_rows(5, 640)]),
    "softmax-64": (lambda x: core.softmax(x), [_logits(64)]),
    "softmax-512": (lambda x: core.softmax(x), [_logits(512)]),
    "log_softmax": (lambda x: core.log_softmax(x), [_logits(512)]),
    "logsumexp": (lambda x: core.logsumexp(x), [_logits(64)]),
    "tree_sum-64": (lambda x: core.tree_sum(x), [_rows(5, 64)]),
    "tree_sum-640": (lambda x: core.tree_sum(x), [_rows(5, 640)]),
    "fold_sum": (lambda x: core.fold_sum(x, 1), [_rows(5, 6, 64)]),
    "combine": (lambda x, s: core.combine(x, s), [_rows(5, 6, 64), _rows(6, 64)]),
    "fake_q8": (lambda x: core.fake_q8(x), [_rows(5, 64)]),
    "fake_q4m": (lambda x: core.fake_q4m(x), [_rows(5, 64)]),
    "fake_q4n": (lambda x: core.fake_q4n(x), [_rows(5, 64)]),
    "select_topk": (lambda x: core.select_topk(x, 16), [np.round(_logits(100))]),
}
CONTROLS = {
    "contract": "contract-64x1024",
    "contract_grouped": "grouped-64x512",
    "contract_pairs": "pairs-1x1x64",
    "contract_values": "values-1x64x1",
    "rms_norm": "rms_norm-512",
    "rms_scale": "rms_scale",
    "mean_square": "mean_square",
    "softmax": "softmax-512",
    "log_softmax": "log_softmax",
    "logsumexp": "logsumexp",
    "tree_sum": "tree_sum-640",
    "fold_sum": "fold_sum",
    "combine": "combine",
}
#: One shape of every primitive, and numbers of rows around one tile and several.
FAST = [*CONTROLS.values(), "contract-fp8", "fake_q8", "fake_q4m", "fake_q4n", "select_topk"]
FAST_ROWS = (1, 7, 8, 9, 65, 200)


@functools.cache
def _whole(name: str) -> np.ndarray:
    call, arrays = CASES[name]
    return np.asarray(jax.jit(lambda *a: call(*a))(*arrays))


@pytest.mark.parametrize("name", FAST)
def test_rows_do_not_depend_on_other_rows(name: str) -> None:
    call, arrays = CASES[name]
    assert differing_rows(call, arrays, FAST_ROWS) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_of_every_shape_and_number(name: str) -> None:
    call, arrays = CASES[name]
    assert differing_rows(call, arrays) == []


@pytest.mark.parametrize("name", CONTROLS)
def test_checker_notices_the_stock_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, arrays = CASES[CONTROLS[name]]
    monkeypatch.setattr(core, name, getattr(core.stock, name))
    assert differing_rows(call, arrays, FAST_ROWS) != []


@pytest.mark.parametrize("name", FAST)
def test_eight_rows_alone_have_the_bits_of_a_larger_call(name: str) -> None:
    # eager and jitted: with exactly one tile the body runs without a loop
    call, arrays = CASES[name]
    block = [jnp.asarray(a[40:48]) for a in arrays]
    want = _whole(name)[40:48]
    assert_same_bits(jax.jit(lambda *a: call(*a))(*block), want)
    assert_same_bits(call(*block), want)


def _inside_a_step(call: Callable[..., Any], arrays: list[np.ndarray]) -> Any:
    """Runs ``call`` on 8-row slices in a loop of dynamic length, between other operations."""

    def step(count: jax.Array, *arrays: jax.Array) -> jax.Array:
        block = [jax.ShapeDtypeStruct((8, *a.shape[1:]), a.dtype) for a in arrays]
        shape = jax.eval_shape(call, *block)

        def tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rows = [lax.dynamic_slice_in_dim(a, i * 8, 8, 0) for a in arrays]
            # a producer that fusion may pull in, exact because it only scales by two
            rows = [jnp.where(r > 1e30, jnp.exp(r) * r, r) * 2 for r in rows]
            out = call(*[r * 0.5 for r in rows])
            used = jax.nn.silu(out.astype(jnp.float32)) * out + out
            kept, other = carry
            return (
                lax.dynamic_update_slice_in_dim(kept, out, i * 8, 0),
                lax.dynamic_update_slice_in_dim(other, used, i * 8, 0),
            )

        empty = jnp.zeros((TOTAL, *shape.shape[1:]), shape.dtype)
        return lax.fori_loop(0, count, tile, (empty, empty.astype(jnp.float32)))

    return jax.jit(step)(TOTAL // 8, *arrays)[0]


@pytest.mark.parametrize("name", FAST)
def test_tile_inside_a_larger_program_has_the_same_bits(name: str) -> None:
    call, arrays = CASES[name]
    assert_same_bits(_inside_a_step(call, arrays), _whole(name))


def test_neighbours_with_nan_do_not_matter() -> None:
    w = _weight(64, 512)
    x = _rows(1, 512)[:24]
    dirty = x.copy()
    dirty[::2] = np.nan
    run = jax.jit(lambda x: core.softmax(core.rms_norm(core.contract(x, w), w[:, 0], 1e-6)))
    assert np.array_equal(bits(run(x))[1::2], bits(run(dirty))[1::2])
