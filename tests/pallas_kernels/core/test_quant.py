"""Quantisers and codes: eager against jit, edges of the formats, ties, NaN, packing, QuantArray."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import core
from tests.pallas_kernels.core.invariance import adversarial, assert_same_bits

TINY = np.float32(2.0**-126)


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def _patterns(count: int) -> np.ndarray:
    """Random float32 bit patterns: every exponent, subnormals included; no NaN."""
    bits = np.random.default_rng(3).integers(0, 2**32, count, dtype=np.uint32)
    x = bits.view(np.float32)
    return np.where(np.isnan(x), np.float32(1), x)


@pytest.mark.parametrize("name", ["round_bf16", "fake_q8", "fake_q4m", "fake_q4n"])
def test_eager_and_jit_agree(name: str) -> None:
    for x in (_patterns(4096).reshape(16, 256), adversarial(1, (16, 256))):
        f = getattr(core, name)
        eager = f(jnp.asarray(x))
        assert_same_bits(jax.jit(f)(x), eager)
        # as a part of a larger program, between operations it could fuse with
        fused = jax.jit(lambda x, f=f: f(x * 2 * 0.5) * 1 + 0 * x.sum())(
            np.nan_to_num(x, posinf=1, neginf=1) / 4
        )
        alone = f(jnp.asarray(np.nan_to_num(x, posinf=1, neginf=1) / 4))
        usable = np.abs(np.asarray(alone)) >= TINY
        assert np.array_equal(np.asarray(fused)[usable], np.asarray(alone)[usable])


def test_round_bf16_is_round_to_nearest_even() -> None:
    x = _patterns(100_000)
    assert_same_bits(jax.jit(core.round_bf16)(x), _bf16(x))
    assert np.isnan(core.round_bf16(jnp.float32(np.nan)))


@pytest.mark.parametrize("name", ["q8", "q4m", "q4n"])
def test_fake_is_the_round_trip(name: str) -> None:
    x = _patterns(4096).reshape(128, 32)
    codes, scale = getattr(core, f"quantize_{name}")(x)
    want = getattr(core, f"dequantize_{name}")(codes, scale)
    assert_same_bits(jax.jit(getattr(core, f"fake_{name}"))(x), want)
    if name != "q4n":  # a round trip with power-of-two scales changes nothing the second time
        finite = np.isfinite(np.asarray(want)).all(axis=-1)
        again = getattr(core, f"fake_{name}")(want)
        assert np.array_equal(np.asarray(again)[finite], np.asarray(want)[finite])


def test_scales_are_the_stated_formulas() -> None:
    # amax at, one ulp below and one ulp above c * 2^e, where pow2ceil of the quotient steps
    for name, c, floor in (("q8", 448, 1e-4), ("q4m", 6, 6 * TINY)):
        edge = np.float32(c) * 2.0 ** np.arange(-20, 100, 7, dtype=np.float32)
        amax = np.concatenate([np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.inf)])
        x = np.zeros((len(amax), 32), np.float32)
        x[:, 5] = -amax
        quotient = np.maximum(amax, np.float32(floor)) / np.float32(c)
        _, scale = jax.jit(getattr(core, f"quantize_{name}"))(x)
        assert_same_bits(core.decode_e8m0(scale)[:, 0], np.asarray(core.pow2ceil(quotient)))


def test_q4n_divides_under_jit() -> None:
    # XLA rewrites x / constant and x / broadcast(scale) to products with a rounded reciprocal
    rng = np.random.default_rng(0)
    x = _bf16(rng.standard_normal((4096, 16)).astype(np.float32) * 4)
    midpoints = np.float32(6) * np.float32([1.0625, 1.1875, 1.3125, 1.4375, 1.5625, 1.6875, 1.8125])
    x[: len(midpoints), 0] = 4 * midpoints  # ties of the E4M3 scale
    amax = np.maximum(np.abs(x).max(-1), np.float32(6 * 2.0**-9))
    scale = np.minimum(amax / np.float32(6), 448).astype(ml_dtypes.float8_e4m3fn)
    quotient = np.clip(x / scale.astype(np.float32)[:, None], -6, 6)
    want = np.asarray(core.encode_e2m1(quotient))
    packed, got = jax.jit(core.quantize_q4n)(x)
    assert np.array_equal(np.asarray(got)[:, 0], scale.view(np.uint8))
    assert np.array_equal(core.unpack_nibbles(packed), want)


def test_subnormals_survive() -> None:
    # XLA:CPU flushes subnormals in arithmetic; 2^-127 is code 0.5 at the smallest Q4m scale
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = [TINY / 2, -TINY, TINY / 4, -TINY / 1024]
    for f in (core.fake_q4m, jax.jit(core.fake_q4m)):
        assert_same_bits(f(x)[0, :4], np.float32([TINY / 2, -TINY, 0, -0.0]))
    payload, scale = np.full((1, 32), 0x01, np.uint8), np.zeros((1, 1), np.uint8)
    w = core.QuantArray(payload, scale, "fp8_row32")
    assert_same_bits(jax.jit(core.dequantize)(w), np.full((1, 32), 2.0**-136, np.float32))


def test_broken_values_stay_visible() -> None:
    x = np.ones((3, 64), np.float32)
    x[0, 1], x[1, 40] = np.nan, np.inf
    for f in (core.fake_q8, core.fake_q4m):
        got = np.asarray(f(x))
        assert np.isnan(got[0, :32]).all()
        assert np.isnan(got[1, 32:]).all()
        assert np.isfinite(got[2]).all()
    assert np.isnan(np.asarray(core.fake_q4n(x))[0, :16]).all()


def test_e4m3_encodes_as_the_reference_cast() -> None:
    x = np.clip(_patterns(100_000), -448, 448)
    dense = np.random.default_rng(1).uniform(-0.05, 0.05, 10_000).astype(np.float32)
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = values[np.isfinite(values)]
    ties = (finite[1:] + finite[:-1]) / 2
    for part in (x, dense, finite, ties[np.abs(ties) < 448]):
        want = part.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert_same_bits(jax.jit(core.encode_e4m3)(part), want)
    assert np.array_equal(core.decode_e4m3(codes), values, equal_nan=True)
    assert np.array_equal(
        core.decode_e4m3(codes.view(ml_dtypes.float8_e4m3fn)), values, equal_nan=True
    )


def test_e2m1_ties_go_to_even_codes_and_keep_signs() -> None:
    x = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 100, 0])
    want = [0, 2, 2, 4, 4, 6, 6, 7, 0]
    assert core.encode_e2m1(x).tolist() == want
    assert core.encode_e2m1(-x).tolist() == [8 + code for code in want]
    codes = np.arange(16, dtype=np.uint8)
    assert np.array_equal(core.encode_e2m1(core.decode_e2m1(codes)), codes)


def test_nibbles_pack_low_first() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (3, 8)).astype(np.uint8)
    packed = core.pack_nibbles(codes)
    assert int(packed[0, 0]) == codes[0, 0] + 16 * codes[0, 1]
    assert np.array_equal(core.unpack_nibbles(packed), codes)
    assert np.array_equal(core.unpack_nibbles(np.asarray(packed).view(np.int8)), codes)


@pytest.mark.parametrize("name", ["q8", "q4m", "q4n"])
def test_group_must_divide_the_channels(name: str) -> None:
    with pytest.raises(core.KernelError, match="multiple of"):
        getattr(core, f"quantize_{name}")(np.zeros((2, 40), np.float32))


def _stack(layout: str, payload: tuple[int, ...], scale: tuple[int, ...]) -> core.QuantArray:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 127, payload).astype(np.uint8)
    return core.QuantArray(codes, rng.integers(110, 140, scale).astype(np.uint8), layout)


def test_quant_array_blocks_and_edges() -> None:
    w = _stack("fp8_block128", (3, 200, 160), (3, 2, 2))
    dense = np.asarray(w.dequantize())
    assert (w.shape, w.ndim, w.dtype) == ((3, 200, 160), 3, jnp.float32)
    scale = 2.0 ** (w.scale[2, 1, 1].astype(np.float32) - 127)
    assert dense[2, 199, 159] == core.decode_e4m3(w.payload[2, 199, 159]) * scale
    assert_same_bits(w[1].dequantize(), dense[1])
    assert_same_bits(jax.jit(lambda w, i: w[i].dequantize())(w, 2), dense[2])
    small = _stack("fp8_block32", (40, 33), (2, 2))
    assert small.dequantize().shape == (40, 33)


def test_quant_array_is_a_pytree() -> None:
    w = _stack("fp4_row32", (2, 5, 48), (2, 5, 3))
    assert w.shape == (2, 5, 96)
    assert len(jax.tree.leaves(w)) == 2
    assert jax.tree.map(lambda leaf: leaf[0], w).shape == (5, 96)
    assert jax.tree.map(lambda leaf: leaf.shape, w).format == "fp4_row32"
    _, dense = jax.lax.scan(lambda c, layer: (c, layer.dequantize()), 0, w)
    assert_same_bits(dense, np.asarray(w.dequantize()))


def test_quant_array_refuses_what_it_cannot_do() -> None:
    w = _stack("fp4_row32", (2, 5, 48), (2, 5, 3))
    for index in ((0, 0), (..., 0), (slice(None), slice(None), 0)):
        with pytest.raises(core.KernelError, match="leading 1 axes"):
            w[index]
    with pytest.raises(core.KernelError, match="scales of shape"):
        core.QuantArray(w.payload, w.scale[..., :2], "fp4_row32").dequantize()
    with pytest.raises(core.KernelError, match="format"):
        _ = core.QuantArray(w.payload, w.scale, "int4").shape
    rows = _stack("fp8_row32", (6, 64), (6, 2))
    picked = rows[np.array([[0, 5], [1, 1]])]
    assert_same_bits(picked.dequantize(), np.asarray(rows.dequantize())[[[0, 5], [1, 1]]])
