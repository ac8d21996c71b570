"""Storage quantisers against a slow reference, and the straight-through derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.spec import ParamSpec
from deepinfer_jax.numerics.formats import BLOCKS, E2M1, E4M3, dequantize_host
from deepinfer_jax.training.quantise import quantise, stored_value, trained_value

FORMATS = ("fp8_block32", "fp8_row32", "fp4_row32")


def spec(format, shape, dtype="F8_E4M3"):
    return ParamSpec(
        names=("w.weight",), shape=shape, dtype=dtype, axes=(None, None), format=format
    )


def weights(shape=(40, 96)):
    """Values over many binades, with a zero block and ties of both formats."""
    draw = np.random.default_rng(0)
    w = draw.standard_normal(shape) * np.exp2(draw.integers(-12, 4, (shape[0], 1)))
    w[:32, :32] = 0
    w[33, :8] = [6, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5]
    w[34, :3] = [448, 17, 19]
    w[35, 32:34] = [448.1, -6.01]
    return w.astype(np.float32)


def nearest(values, codes):
    """Returns the nearest code value; ties go to the even code."""
    grid = np.unique(np.abs(codes[np.isfinite(codes)]))
    size = np.abs(values).astype(np.float64)
    upper = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = grid[upper - 1], grid[upper]
    above = (size - low > high - size) | ((size - low == high - size) & (upper % 2 == 0))
    return np.where(above, high, low) * np.sign(values)


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_the_nearest_of_the_format(format):
    w = weights()
    rows, channels = BLOCKS[format]
    largest, codes = (6, E2M1) if format == "fp4_row32" else (448, E4M3)
    expected = np.empty_like(w)
    for top in range(0, w.shape[0], rows):
        for left in range(0, w.shape[1], channels):
            block = w[top : top + rows, left : left + channels].astype(np.float64)
            size = max(np.abs(block).max(), 2.0**-100)
            scale = 2.0 ** np.ceil(np.log2(size / largest))
            part = nearest(block / scale, codes) * scale
            expected[top : top + rows, left : left + channels] = part
    stored = quantise(jnp.asarray(w), format)
    found = dequantize_host(np.asarray(stored.payload), np.asarray(stored.scale), format)
    np.testing.assert_array_equal(found, expected)
    used = np.asarray(jax.jit(stored_value, static_argnums=1)(w, spec(format, w.shape)))
    assert used.tobytes() == found.tobytes()


def test_bfloat16_leaves_are_rounded_and_float32_leaves_kept():
    w = jnp.asarray(weights())
    plain = spec("plain", w.shape, "BF16")
    assert (stored_value(w, plain) == w.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert (stored_value(w, spec("plain", w.shape, "F32")) == w).all()


@pytest.mark.parametrize("format", FORMATS)
def test_derivative_is_that_of_the_identity(format):
    w, factor = jnp.asarray(weights()), jnp.asarray(weights()[::-1].copy())
    value, gradient = jax.value_and_grad(
        lambda w: (factor * trained_value(w, spec(format, w.shape))).sum()
    )(w)
    np.testing.assert_array_equal(gradient, factor)
    assert value == (factor * stored_value(w, spec(format, w.shape))).sum()
