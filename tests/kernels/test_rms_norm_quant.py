"""rms_norm_quant: the Triton body under the interpreter has core's bits; edges and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.rms_norm_quant.api import rms_norm_quant
from pallas_kernels.rms_norm_quant.arg_specs import CASES
from pallas_kernels.rms_norm_quant.q8 import q8_codes, q8_scale


def bits(x):
    return np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint8)


def rows(m, d, seed=0, spread=3.0):
    first, second = jax.random.split(jax.random.key(seed))
    x = spread * jax.random.normal(first, (m, d))
    return x.astype(jnp.bfloat16), jax.random.uniform(second, (d,), jnp.float32, 0.5, 1.5)


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_interpreter_has_the_bits_of_core(spec):
    x, weight = rows(*spec.shapes[0])
    found = rms_norm_quant(x, weight, **spec.kwargs, implementation="pallas_interpret")
    expected = rms_norm_quant(x, weight, **spec.kwargs)
    assert [a.dtype for a in found] == [jnp.bfloat16, jnp.uint8, jnp.uint8]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_reference_is_core_and_close_to_float64():
    x, weight = rows(9, 192)
    row, codes, scale = rms_norm_quant(x, weight, 1e-6)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * np.asarray(weight)
    np.testing.assert_allclose(np.asarray(row, np.float64), exact, rtol=2.0**-8)
    back = np.asarray(core.dequantize_q8(codes, scale), np.float64)
    largest = np.abs(exact).reshape(9, -1, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(back - exact) <= 2.0**-4 * largest).all()


def test_edges_zero_rows_outliers_and_neighbours():
    x, weight = rows(8, 64)
    x = x.at[1].set(0).at[2, 5].set(3e4).at[3].multiply(1e-30)
    x = x.at[4, 3].set(jnp.inf).at[5, 40].set(jnp.nan)
    found = rms_norm_quant(x, weight, 1e-20, implementation="pallas_interpret")
    expected = rms_norm_quant(x, weight, 1e-20)
    finite = np.array([0, 1, 2, 3, 6, 7])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(a)[finite], bits(b)[finite])
    # a broken row stays visible in its scales
    assert (np.asarray(found[2])[[4, 5]] == 255).any(axis=1).all()
    alone = rms_norm_quant(x[2:3], weight, 1e-20, implementation="pallas_interpret")
    for a, b in zip(alone, found, strict=True):
        np.testing.assert_array_equal(bits(a)[0], bits(b)[2])


def test_q8_inside_kernels_has_the_bits_of_core():
    magnitudes = np.float32(2.0) ** np.arange(-30, 30)
    groups = jax.random.normal(jax.random.key(1), (60, 32)) * magnitudes[:, None]
    edges = jnp.asarray([448.0, 447.9, 448.1, 224.0, 1e-4, 0.0, 896.0, 0.5])
    groups = groups.at[:8, 0].set(edges).at[:8, 1:].multiply(1e-3)
    power, inverse = q8_scale(jnp.max(jnp.abs(groups), axis=1))
    codes, scale = core.quantize_q8(groups)
    np.testing.assert_array_equal(np.asarray(power), np.asarray(core.decode_e8m0(scale[:, 0])))
    np.testing.assert_array_equal(bits(q8_codes(groups, inverse[:, None])), np.asarray(codes))


def test_refusals():
    x, weight = rows(2, 64)
    with pytest.raises(KernelUnsupported, match="bfloat16"):
        rms_norm_quant(x.astype(jnp.float32), weight, 1e-6, implementation="triton")
    with pytest.raises(KernelUnsupported, match="name one of them"):
        rms_norm_quant(x, weight, 1e-6, implementation="mosaic_sm90")
    with pytest.raises(KernelError, match="multiple of 32"):
        rms_norm_quant(x[:, :40], weight[:40], 1e-6)
