"""Expansion to float32 against float64 over ml_dtypes, the golden file and the device."""

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from deepinfer_jax.checkpoint.expand import _dequantize, expand_float32
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.numerics.formats import BLOCKS, dequantize_host, lookup_fp8
from pallas_kernels.core.quant_array import QuantArray


def is_quantised(leaf):
    return isinstance(leaf, QuantArray)


def reference(payload, scale, format):
    """The same values in float64, one block index at a time."""
    if format == "fp4_row32":
        codes = np.stack([payload & 15, payload >> 4], axis=-1).astype(np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        values = values.reshape(*payload.shape[:-1], -1)
    else:
        values = payload.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    rows, channels = BLOCKS[format]
    row, column = np.arange(values.shape[-2]) // rows, np.arange(values.shape[-1]) // channels
    exponents = scale.astype(np.float64)[..., row, :][..., column] - 127
    return values * 2.0**exponents


@pytest.mark.parametrize("name", ["tiny_v41", "tiny_v4"])
def test_expanded_tree_is_exact(fixtures_dir, name):
    folder = fixtures_dir / name
    params = load_params(folder, read_config(folder), engram="mapped")
    expanded = expand_float32(params)
    before = jax.tree.leaves(params, is_leaf=is_quantised)
    after = jax.tree.leaves(expanded)
    for stored, values in zip(before, after, strict=True):
        if is_quantised(stored):
            assert values.dtype == np.float32
            payload = np.asarray(stored.payload).view(np.uint8)
            wanted = reference(payload, np.asarray(stored.scale), stored.format)
            np.testing.assert_array_equal(np.asarray(values).astype(np.float64), wanted)
        elif stored.dtype == np.int32:
            assert values is stored
        else:
            assert values.dtype == np.float32
            np.testing.assert_array_equal(np.asarray(stored).astype(np.float32), values)


def test_host_tables_are_left_alone(fixtures_dir):
    folder = fixtures_dir / "tiny_v41"
    params = load_params(folder, read_config(folder), engram="mapped")
    table = params.engram.tables[0]
    assert isinstance(table, HostTable)
    assert expand_float32(params).engram.tables[0] is table


@pytest.mark.parametrize("format", BLOCKS)
def test_host_and_device_forms_agree_on_every_code(format):
    rng = np.random.default_rng(3)
    rows, channels = BLOCKS[format]
    payload = rng.permutation(np.tile(np.arange(256, dtype=np.uint8), 60)).reshape(2, 80, 96)
    width = payload.shape[-1] * (2 if format == "fp4_row32" else 1)
    scale = rng.integers(100, 150, (2, -(-80 // rows), -(-width // channels))).astype(np.uint8)
    host = dequantize_host(payload, scale, format)
    device = np.asarray(_dequantize(QuantArray(payload, scale, format)))
    np.testing.assert_array_equal(host, device)
    np.testing.assert_array_equal(np.signbit(host), np.signbit(device))


def test_golden_weights(fixtures_dir):
    golden = load_file(fixtures_dir / "modules" / "engram.safetensors")
    codes, scale = golden["mod.w.embed.weight_u8"], golden["mod.w.embed.scale_u8"]
    wanted = reference(codes, scale, "fp8_row32").astype(np.float32)
    np.testing.assert_array_equal(lookup_fp8(codes, scale), wanted)
    np.testing.assert_array_equal(dequantize_host(codes, scale, "fp8_row32"), wanted)


def test_lookup_is_exact_in_a_callback_thread():
    """XLA's threads flush subnormal numbers; the table form does no arithmetic."""
    codes = np.full((1, 32), 0x38, np.uint8)  # 1.0
    table = HostTable(codes, np.array([[0]], np.uint8), is_mapped=False)

    @jax.jit
    def rows(ids):
        return jax.pure_callback(table.lookup, jax.ShapeDtypeStruct((1, 32), np.float32), ids)

    result = np.asarray(rows(np.array([0])))
    np.testing.assert_array_equal(result, np.full((1, 32), np.float32(2.0**-127)))


def test_scale_byte_255_is_nan():
    assert np.isnan(
        dequantize_host(np.zeros((1, 32), np.uint8), np.full((1, 1), 255, np.uint8), "fp8_row32")
    ).all()
