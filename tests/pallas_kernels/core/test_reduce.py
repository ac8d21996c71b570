"""Ordered sums, norms, softmax and combine: values, order, edge rows, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core
from pallas_kernels.core.pin import pin
from tests.pallas_kernels.core.invariance import adversarial, assert_same_bits, bits


def _halving(x: np.ndarray) -> np.ndarray:
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = np.concatenate([x, np.zeros((*x.shape[:-1], width - x.shape[-1]), x.dtype)], -1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


@pytest.mark.parametrize("size", [1, 2, 3, 24, 64, 640])
def test_tree_sum_is_the_halving_tree(size: int) -> None:
    x = adversarial(size, (5, size))
    assert_same_bits(jax.jit(core.tree_sum)(x), _halving(x))
    assert_same_bits(core.tree_sum(x.T, axis=0), _halving(x))
    assert core.tree_sum(x[:, :0]).tolist() == [0] * 5


def test_products_are_rounded_before_they_are_summed() -> None:
    # in one fusion LLVM would contract a * b + c * d to a fused multiply-add
    a, b = adversarial(1, (64, 96)), adversarial(2, (64, 96))
    assert_same_bits(jax.jit(lambda a, b: core.tree_sum(a * b))(a, b), _halving(a * b))
    folded = jax.jit(lambda a, b: core.fold_sum(a * b, 0))(a, b)
    want = a[0] * b[0]
    for row in range(1, 64):
        want = want + a[row] * b[row]
    assert_same_bits(folded, want)


def test_fold_sum_limits() -> None:
    assert core.fold_sum(np.ones((0, 3), np.float32), 0).tolist() == [0, 0, 0]
    with pytest.raises(core.KernelError, match="64"):
        core.fold_sum(np.ones((65, 3), np.float32), 0)


def test_pin_changes_nothing_but_nan() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    got = np.asarray(jax.jit(pin)(x))
    number = ~np.isnan(x)
    assert np.array_equal(bits(got)[number], bits(x)[number])
    assert np.isnan(got[~number]).all()
    assert jax.grad(lambda v: 3 * pin(v))(2.0) == 3


@pytest.mark.parametrize("module", [core, core.stock], ids=["core", "stock"])
@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 40), (0, 16)])
def test_values_agree_with_float64(shape: tuple[int, ...], module: object) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[-1])
    wide = x.astype(np.float64)
    square = (wide**2).mean(-1)
    total = np.log(np.exp(wide).sum(-1))
    want = {
        "mean_square": square,
        "rms_scale": 1 / np.sqrt(square + 1e-6),
        "rms_norm": w * wide / np.sqrt(square + 1e-6)[..., None],
        "softmax": np.exp(wide - total[..., None]),
        "log_softmax": wide - total[..., None],
        "logsumexp": total,
    }
    extra = {"rms_scale": (1e-6,), "rms_norm": (w.astype(np.float32), 1e-6)}
    for name, value in want.items():
        got = getattr(module, name)(jnp.asarray(x), *extra.get(name, ()))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, value, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("module", [core, core.stock], ids=["core", "stock"])
def test_rows_of_minus_infinity_give_no_nan(module: object) -> None:
    x = np.full((3, 6), -np.inf, np.float32)
    x[1, 2] = 4
    x[2] = 3e38
    assert np.asarray(module.softmax(jnp.asarray(x))).tolist()[:2] == [[0] * 6, [0, 0, 1, 0, 0, 0]]
    assert np.asarray(module.logsumexp(jnp.asarray(x)))[:2].tolist() == [-np.inf, 4]
    logs = np.asarray(module.log_softmax(jnp.asarray(x)))
    assert (logs[0] == -np.inf).all()
    assert not np.isnan(logs).any()


def test_norms_of_extreme_rows() -> None:
    x = np.float32([[0.0] * 8, [1e-12] * 8, [1e15] * 8])
    got = np.asarray(core.rms_norm(x, np.ones(8, np.float32), 1e-20))
    np.testing.assert_allclose(got[:, 0], [0, 1e-2 / np.sqrt(1e-4 + 1), 1], rtol=1e-5)


def test_gradients_are_finite_and_right() -> None:
    x = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)
    w = np.linspace(0.5, 2, 10, dtype=np.float32)
    mix = np.random.default_rng(1).standard_normal((3, 10)).astype(np.float32)
    for name, extra in (("rms_norm", (w, 1e-6)), ("softmax", ()), ("log_softmax", ())):
        grads = [
            jax.grad(
                lambda x, m=m, name=name, extra=extra: (getattr(m, name)(x, *extra) * mix).sum()
            )(x)
            for m in (core, core.stock)
        ]
        np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [core, core.stock], ids=["core", "stock"])
def test_combine(module: object) -> None:
    y = adversarial(3, (4, 6, 8), decades=1)
    shared = adversarial(4, (4, 8), decades=1)
    want = y[:, 0]
    for slot in range(1, 6):
        want = want + y[:, slot]
    for s, expected in ((None, want), (shared, want + shared)):
        got = jax.jit(module.combine)(y, s)
        if module is core:
            assert_same_bits(got, expected)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_combine_refuses_other_shapes() -> None:
    with pytest.raises(core.KernelError, match="combine"):
        core.combine(np.ones((4, 6, 8), np.float32), np.ones((4, 7), np.float32))
