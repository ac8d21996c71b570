"""mhc_pre: the Triton bodies under the interpreter against float64; rows, edges, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import core
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.mhc_pre import pallas_triton, reference
from pallas_kernels.mhc_pre.api import mhc_pre
from pallas_kernels.mhc_pre.arg_specs import CASES, NANO, random_arguments
from pallas_kernels.mhc_pre.configs import FEW_ROWS, TABLE, config_for

KEYWORDS = dict(CASES[0].kwargs)


def interpreted(*args, **changes):
    return mhc_pre(*args, **(KEYWORDS | changes), implementation="pallas_interpret")


def expected(x, fn, scale, base, *, streams=4):
    """Returns the formula's outputs with the projection in float64."""
    wide = np.asarray(x, np.float64)
    mixed = wide @ np.asarray(fn, np.float64).T
    mixed /= np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + KEYWORDS["rms_eps"])
    eps, iterations = KEYWORDS["eps"], KEYWORDS["iterations"]
    return reference.coefficients(
        jnp.asarray(mixed, jnp.float32),
        scale,
        base,
        streams,
        eps,
        lambda m: reference.sinkhorn(m, iterations, eps, core.fold_sum),
    )


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=4e-6, atol=4e-7)


def assert_equal_bits(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_interpreter_is_close_to_float64(spec):
    rows, channels = spec.shapes[0]
    args = random_arguments(0, rows, channels)
    assert_close(interpreted(*args), expected(*args))


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_the_tile_for_a_number_of_rows_is_close_to_float64(rows):
    run = pallas_triton.build(config_for(rows), **KEYWORDS, interpret=True)
    args = random_arguments(7, rows, NANO)
    assert_close(run(*args), expected(*args))
    assert (config_for(rows) is TABLE["few rows"]) == (rows <= FEW_ROWS)


def test_xla_is_the_plain_formula():
    args = random_arguments(0, 5, NANO)
    assert_close(mhc_pre(*args, **KEYWORDS), expected(*args))


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
def test_other_numbers_of_streams(streams):
    x, fn, scale, base = random_arguments(2, 9, 96)
    width = streams * (streams + 2)
    fn, base = (jnp.resize(a, (width, *a.shape[1:])) for a in (fn, base))
    found = interpreted(x, fn, scale, base, streams=streams)
    assert_close(found, expected(x, fn, scale, base, streams=streams))


def test_products_are_those_of_float32_weights():
    """Of one channel a product is exact: a weight counts to its last bit."""
    weights = np.array([1 + 2**-23, -1 / 3, 1.1754944e-20, 2e38], np.float32)
    fn = jnp.zeros((24, 16)).at[:4, 3].set(weights).at[:, 4].set(7)
    columns = pallas_triton._Columns(4)
    [[sums]] = pl.pallas_call(
        pallas_triton._projection(TABLE["rows"], columns, 16),
        out_shape=jax.ShapeDtypeStruct((1, 1, columns.count), jnp.float32),
        grid=(1, 1),
        interpret=True,
    )(jnp.ones(1, jnp.int32), jnp.zeros((1, 16)).at[0, 3].set(1), fn)
    wanted = np.zeros(columns.count, np.float32)
    wanted[columns.gates : columns.gates + 4] = weights
    wanted[columns.square] = 1
    np.testing.assert_array_equal(sums, wanted)


def test_the_matrix_is_balanced_and_the_gates_are_gates():
    pre, post, matrix = interpreted(*random_arguments(3, 40, NANO))
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(axis=2), 1, atol=0.05)
    assert ((np.asarray(pre) > 0) & (np.asarray(pre) < 1 + 1e-5)).all()
    assert ((np.asarray(post) > 0) & (np.asarray(post) < 2)).all()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 63, 64, 65])
def test_bits_of_a_row_depend_on_nothing_else(rows):
    x, *shared = random_arguments(1, 70, NANO)
    whole = interpreted(x.at[rows:].set(jnp.nan), *shared)  # neighbours
    assert_equal_bits([a[:rows] for a in whole], interpreted(x[:rows], *shared))
    last = interpreted(x[-rows:], *shared)
    assert_equal_bits([a[-rows:] for a in interpreted(x, *shared)], last)


def test_bfloat16_streams_have_the_same_bits():
    x, *shared = random_arguments(4, 3, NANO)
    assert_equal_bits(interpreted(x.astype(jnp.bfloat16), *shared), interpreted(x, *shared))


def test_no_rows():
    x, *shared = random_arguments(0, 1, NANO)
    assert [a.shape for a in interpreted(x[:0], *shared)] == [(0, 4), (0, 4), (0, 4, 4)]


def test_a_broken_row_stays_visible_and_alone():
    x, *shared = random_arguments(5, 5, NANO)
    broken = x.at[1, 9].set(jnp.nan).at[2, 9].set(jnp.inf).at[3, 9].set(-jnp.inf)
    found = interpreted(broken, *shared)
    for a, b in zip(found, mhc_pre(broken, *shared, **KEYWORDS), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert np.isnan(a[1:4]).all()
    good = jnp.array([0, 4])
    assert_equal_bits([a[good] for a in found], [a[good] for a in interpreted(x, *shared)])


def test_a_row_of_zeros_takes_the_base():
    x, fn, scale, base = random_arguments(6, 2, NANO)
    pre, _, _ = interpreted(x.at[0].set(0), fn, scale, base)
    np.testing.assert_allclose(pre[0], jax.nn.sigmoid(base[:4]) + KEYWORDS["eps"], rtol=1e-6)


def test_refusals():
    x, fn, scale, base = random_arguments(0, 2, NANO)
    with pytest.raises(KernelError, match=r"needs x \[t, k\], fn \[24, k\]"):
        mhc_pre(x[:, :-1], fn, scale, base, **KEYWORDS)
    with pytest.raises(KernelError, match="float32 or bfloat16"):
        mhc_pre(x.astype(jnp.float16), fn, scale, base, **KEYWORDS)
    with pytest.raises(KernelUnsupported, match="mhc_pre"):
        mhc_pre(x, fn, scale, base, **KEYWORDS, implementation="cutlass")
