"""Contractions: values, chunk order, gradients, empty inputs, errors; row tiles themselves."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core
from tests.pallas_kernels.core.invariance import assert_same_bits

SPECS = {
    "contract": ("mk,nk->mn", {"m": 5, "n": 7}),
    "contract_grouped": ("mgk,gnk->mgn", {"m": 5, "g": 3, "n": 4}),
    "contract_pairs": ("mhk,mjk->mhj", {"m": 5, "h": 3, "j": 6}),
    "contract_values": ("mhj,mjk->mhk", {"m": 5, "h": 3, "j": 6}),
}


def _operands(name: str, k: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    spec, sizes = SPECS[name]
    rng = np.random.default_rng(k)
    shapes = [[{**sizes, "k": k}[a] for a in part] for part in spec.split("->")[0].split(",")]
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return x, w


@pytest.mark.parametrize("module", [core, core.stock], ids=["core", "stock"])
@pytest.mark.parametrize("k", [1, 33, 512, 513, 1536])
@pytest.mark.parametrize("name", SPECS)
def test_values_agree_with_float64(name: str, k: int, module: Any) -> None:
    for dtype in (np.float32, jnp.bfloat16):
        x, w = _operands(name, k, dtype)
        want = np.einsum(SPECS[name][0], x.astype(np.float64), w.astype(np.float64))
        got = jax.jit(getattr(module, name))(x, w)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=2e-6 * np.sqrt(k) * np.abs(want).max())


def test_chunks_are_added_in_ascending_order() -> None:
    x, w = _operands("contract", 1300)
    part = [core.contract(x[:, a:b], w[:, a:b]) for a, b in ((0, 512), (512, 1024), (1024, 1300))]
    assert_same_bits(jax.jit(core.contract)(x, w), np.asarray((part[0] + part[1]) + part[2]))


def test_quantised_weights_equal_dequantised_ones() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 1200)).astype(np.float32)
    codes = rng.integers(0, 127, (2, 40, 1200)).astype(np.uint8)
    scale = rng.integers(120, 130, (2, 2, 38)).astype(np.uint8)
    w = core.QuantArray(codes, scale, "fp8_block32")
    assert_same_bits(core.contract(x, w[1]), np.asarray(core.contract(x, w.dequantize()[1])))
    groups = np.stack([x, x], axis=1)
    want = np.asarray(core.contract_grouped(groups, w.dequantize()))
    assert_same_bits(core.contract_grouped(groups, w), want)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    # a sum of products is linear in each operand, so a central difference is exact but for rounding
    x, w = _operands(name, 1100 if name != "contract_values" else 9)
    op = getattr(core, name)
    mix = np.random.default_rng(1).standard_normal(op(x, w).shape).astype(np.float32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(op(x, w) * mix)

    spec = SPECS[name][0]
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    exact = (np.einsum(f"{out},{b}->{a}", mix, w), np.einsum(f"{out},{a}->{b}", mix, x))
    for got, want in zip(grads, exact, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    direction = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    difference = (loss(x + direction, w) - loss(x - direction, w)) / 2
    slope = np.vdot(grads[0], direction)
    np.testing.assert_allclose(difference, slope, atol=1e-4 * np.linalg.norm(mix) * 50)


@pytest.mark.parametrize("name", SPECS)
def test_no_rows(name: str) -> None:
    x, w = _operands(name, 16)
    per_row = name in ("contract_pairs", "contract_values")
    got = getattr(core, name)(x[:0], w[:0] if per_row else w)
    assert (got.shape, got.dtype) == ((0, *getattr(core, name)(x, w).shape[1:]), jnp.float32)


@pytest.mark.parametrize("name", SPECS)
def test_shapes_that_do_not_fit_are_named(name: str) -> None:
    x, w = _operands(name, 16)
    with pytest.raises(core.KernelError, match=name):
        getattr(core, name)(x[..., :-1], w)
    with pytest.raises(core.KernelError, match=name):
        getattr(core, name)(x[None], w)


def test_row_tiles_pad_with_zeros_and_cut_back() -> None:
    seen = []

    def body(block: jax.Array, ids: jax.Array) -> dict[str, jax.Array]:
        seen.append(block.shape)
        return {"double": block * 2, "ids": ids}

    for rows in (0, 1, 8, 9, 17):
        x, ids = np.ones((rows, 3), np.float32), np.arange(rows)
        out = core.map_row_tiles(body, x, ids)
        assert np.array_equal(out["double"], x * 2)
        assert np.array_equal(out["ids"], ids)
    assert set(seen) == {(8, 3)}
    assert core.map_row_tiles(lambda b: b, np.ones((5, 2)), tile=4).shape == (5, 2)
    with pytest.raises(core.KernelError, match="number of rows"):
        core.map_row_tiles(body, np.ones((3, 3)), np.ones(4))


def test_one_tile_runs_without_a_loop() -> None:
    w = np.ones((4, 16), np.float32)
    trace = lambda m: str(jax.make_jaxpr(core.contract)(np.ones((m, 16), np.float32), w))  # noqa: E731
    assert "scan" not in trace(8)
    # never a loop of one trip: XLA would inline it (determinism.md 12, trap 1)
    assert all("length=2" in trace(m) for m in (1, 7, 9, 16))


def test_import_starts_no_backend() -> None:
    code = (
        "import pallas_kernels.core, sys\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "assert 'flax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=core.__path__[0] + "/../..")
