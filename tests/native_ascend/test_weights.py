"""Weights and cache rows in CANN's layouts keep every value (ascend.md 11.3, 22 and 24)."""

import jax.numpy as jnp
import numpy as np
import pytest

from native_ascend import AscendUnsupported
from native_ascend.weights import Prepared, row_scales
from pallas_kernels import core

pytestmark = pytest.mark.accept(13)


def test_scales_of_rows_give_the_values_of_scales_of_blocks():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (70, 96), np.uint8)
    blocks = rng.integers(100, 150, (3, 3), np.uint8)
    values = np.asarray(core.decode_e4m3(jnp.asarray(codes)))
    of_blocks = np.exp2(blocks.astype(np.float32) - 127)
    expected = values * np.repeat(np.repeat(of_blocks, 32, 0)[:70], 32, 1)
    rows = row_scales(blocks, 70)
    assert rows.shape == (70, 3)
    prepared = Prepared()
    prepared.codes("w", codes, rows)
    pairs = prepared.arrays["w.scale"]
    assert pairs.shape == (70, 2, 2)
    scale = np.exp2(pairs.reshape(70, 4)[:, :3].astype(np.float32) - 127)
    found = np.asarray(core.decode_e4m3(jnp.asarray(prepared.arrays["w"]))) * np.repeat(
        scale, 32, 1
    )
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    with pytest.raises(AscendUnsupported, match="32 x 32"):
        row_scales(blocks, 70, 128)


def all_products(codes, scales):
    values = np.outer(codes, scales).astype(np.float64)
    return values[np.isfinite(values) & (values != 0)]


@pytest.mark.parametrize("row", ["Q8", "Q4n"])
def test_dequantised_cache_rows_are_bf16_exactly(row):
    """Every code times every scale that keeps the product a normal number."""
    every = jnp.arange(256, dtype=jnp.uint8)
    e4m3 = np.asarray(core.decode_e4m3(every), np.float64)
    if row == "Q8":
        products = all_products(e4m3, np.exp2(np.arange(-100.0, 100.0)))
    else:
        e2m1 = np.asarray(core.decode_e2m1(every[:16]), np.float64)
        products = all_products(e2m1, e4m3)
    assert len(products) > 3000
    assert np.array_equal(products.astype(jnp.bfloat16).astype(np.float64), products)
