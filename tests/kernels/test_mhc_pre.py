"""mhc_pre: the Triton body under the interpreter against the reference; rows, edges, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.mhc_pre.api import mhc_pre
from pallas_kernels.mhc_pre.arg_specs import CASES, WIDTH

KEYWORDS = CASES[0].kwargs


def given(rows, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        2 * jax.random.normal(keys[0], (rows, WIDTH)),
        jax.random.uniform(keys[1], (3,), jnp.float32, 0.5, 1.5),
        jax.random.normal(keys[2], (WIDTH,)),
    )


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_interpreter_is_close_to_the_reference(spec):
    args = given(spec.shapes[0][0])
    found = mhc_pre(*args, **spec.kwargs, implementation="pallas_interpret")
    expected = mhc_pre(*args, **spec.kwargs)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_the_matrix_is_balanced_and_the_gates_are_gates():
    mixed, scale, base = given(40)
    pre, post, matrix = mhc_pre(mixed, scale, base, **KEYWORDS, implementation="pallas_interpret")
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(axis=2), 1, atol=0.05)
    wide = np.asarray(mixed, np.float64)
    gate = 1 / (1 + np.exp(-(wide[:, :4] * float(scale[0]) + np.asarray(base[:4], np.float64))))
    np.testing.assert_allclose(pre, gate + KEYWORDS["eps"], rtol=1e-5)
    assert (np.asarray(post) > 0).all()
    assert (np.asarray(post) < 2).all()


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 64, 65])
def test_bits_of_a_row_depend_on_nothing_else(rows):
    mixed, scale, base = given(70, seed=1)
    mixed = mixed.at[rows:].set(jnp.nan)  # neighbours
    whole = mhc_pre(mixed, scale, base, **KEYWORDS, implementation="pallas_interpret")
    part = mhc_pre(mixed[:rows], scale, base, **KEYWORDS, implementation="pallas_interpret")
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:rows].view(np.uint32), b.view(np.uint32))


def test_no_rows():
    mixed, scale, base = given(1)
    found = mhc_pre(mixed[:0], scale, base, **KEYWORDS, implementation="pallas_interpret")
    assert [a.shape for a in found] == [(0, 4), (0, 4), (0, 4, 4)]


def test_a_broken_row_stays_visible_and_alone():
    mixed, scale, base = given(5)
    mixed = mixed.at[1, 9].set(jnp.nan).at[2, 9].set(jnp.inf).at[3, 9].set(-jnp.inf)
    _, _, found = mhc_pre(mixed, scale, base, **KEYWORDS, implementation="pallas_interpret")
    _, _, expected = mhc_pre(mixed, scale, base, **KEYWORDS)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert np.isnan(found[1]).any()
    assert np.isfinite(found[jnp.array([0, 3, 4])]).all()


def test_refusals():
    mixed, scale, base = given(2)
    with pytest.raises(KernelError, match=r"needs mixed \[t, 24\]"):
        mhc_pre(mixed[:, :-1], scale, base, **KEYWORDS)
    with pytest.raises(KernelUnsupported, match="mhc_pre"):
        mhc_pre(mixed, scale, base, **KEYWORDS, implementation="cutlass")
