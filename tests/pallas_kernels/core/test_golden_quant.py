"""Golden files quant and weights_gemm: quantisers, decode tables, weights and quantised GEMMs.

The functions take their keys from a Fixture; the last test of each file asserts that all keys
were taken or are excused in EXCUSED.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import core
from tests.pallas_kernels.core.fixture import Fixture, load_fixture
from tests.pallas_kernels.core.invariance import assert_same_bits, bits

CASES = (
    "amax_edges",
    "e2m1_ties",
    "e4m3_ties",
    "huge",
    "negzero",
    "rand0",
    "rand1",
    "rand2",
    "tiny",
    "zeros",
)
EXCUSED = {
    f"{case}.q4n.deq_mulrecip": "a named variant (amax times the reciprocal of 6) we do not have"
    for case in CASES
}
MODES = {"eager": lambda f: f, "jit": jax.jit}


@pytest.fixture(scope="module")
def quant() -> Fixture:
    """The file ``quant``, shared so that taken keys add up."""
    return load_fixture("quant")


@pytest.fixture(scope="module")
def weights() -> Fixture:
    """The file ``weights_gemm``, shared so that taken keys add up."""
    return load_fixture("weights_gemm")


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def check_quantiser(fixture: Fixture, case: str, name: str, wrap: Callable[..., Any]) -> None:
    """Codes, scales and the round trip of one quantiser on one case; exact."""
    x = fixture.take(f"{case}.x")
    codes, scale = wrap(getattr(core, f"quantize_{name}"))(x)
    stored = "codes_u8" if name == "q8" else "packed_u8"
    assert_same_bits(codes, fixture.take(f"{case}.{name}.{stored}"))
    assert_same_bits(scale, fixture.take(f"{case}.{name}.scale_u8"))
    want = _f32(fixture.take(f"{case}.{name}.deq"))
    assert_same_bits(wrap(getattr(core, f"dequantize_{name}"))(codes, scale), want)
    assert_same_bits(wrap(getattr(core, f"fake_{name}"))(x), want)


def check_tables(fixture: Fixture, wrap: Callable[..., Any]) -> None:
    """The scalar tables pow2ceil and e2m1; exact."""
    want = fixture.take("pow2ceil.y")
    assert_same_bits(wrap(core.pow2ceil)(fixture.take("pow2ceil.x")), want)
    codes = fixture.take("e2m1.codes_u8")
    assert_same_bits(wrap(core.encode_e2m1)(fixture.take("e2m1.x")), codes)
    assert_same_bits(wrap(core.decode_e2m1)(codes), fixture.take("e2m1.y"))


def check_decode_tables(fixture: Fixture, wrap: Callable[..., Any]) -> None:
    """E4M3 and E8M0 bytes to float32 and back; exact."""
    for name in ("e4m3", "e8m0"):
        byte, value = fixture.take(f"{name}.byte"), fixture.take(f"{name}.value")
        assert_same_bits(wrap(getattr(core, f"decode_{name}"))(byte), value)
        assert_same_bits(wrap(getattr(core, f"encode_{name}"))(value), byte)


def check_dequantised(fixture: Fixture, wrap: Callable[..., Any]) -> None:
    """FP8 blocks, MXFP4 rows and Engram rows to float32; exact."""
    for case in "abc":
        payload = fixture.take(f"fp8.{case}.w_u8")
        w = core.QuantArray(payload, fixture.take(f"fp8.{case}.scale_u8"), "fp8_block32")
        assert_same_bits(wrap(core.dequantize)(w), fixture.take(f"fp8.{case}.deq_f32"))
    w = core.QuantArray(fixture.take("mxfp4.w_u8"), fixture.take("mxfp4.scale_u8"), "fp4_row32")
    assert_same_bits(wrap(core.dequantize)(w), fixture.take("mxfp4.deq_f32"))
    payload = fixture.take("engram_rows.w_u8")
    table = core.QuantArray(payload, fixture.take("engram_rows.scale_u8"), "fp8_row32")
    rows = wrap(core.dequantize)(table[fixture.take("engram_rows.ids")])
    assert_same_bits(rows, _f32(fixture.take("engram_rows.out")))


def check_gemm(fixture: Fixture, kind: str, case: str) -> None:
    """A quantised GEMM: at most one BF16 step on at most 0.5 % of elements, else equal."""
    # the FP4 cases share the activations of the FP8 cases
    x = fixture.take(f"gemm_fp8.{case}.x")
    payload, scale = (fixture.take(f"gemm_{kind}.{case}.{key}") for key in ("w_u8", "scale_u8"))
    w = core.QuantArray(payload, scale, "fp8_block32" if kind == "fp8" else "fp4_row32")
    got = jax.jit(lambda x, w: core.round_bf16(core.contract(core.fake_q8(x), w)))(x, w)
    want = _f32(fixture.take(f"gemm_{kind}.{case}.y"))
    steps = np.abs(_bf16_order(np.asarray(got)) - _bf16_order(want))
    assert steps.max() <= 1
    assert (steps > 0).mean() <= 0.005


def _bf16_order(x: np.ndarray) -> np.ndarray:
    """Returns the rank of BF16-representable float32 values, so that neighbours differ by one."""
    high = (bits(x) >> 16).astype(np.int64)
    return np.where(high >= 0x8000, 0x8000 - high, high)


def check_consumed(fixture: Fixture, excused: dict[str, str]) -> None:
    """Every key was taken or is excused, and nothing is excused that was taken."""
    left = set(fixture.keys()) - fixture.taken
    assert left == set(excused) & set(fixture.keys())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["q8", "q4m", "q4n"])
def test_quantisers_are_golden(quant: Fixture, name: str, mode: str) -> None:
    for case in CASES:
        check_quantiser(quant, case, name, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_scalar_tables_are_golden(quant: Fixture, mode: str) -> None:
    check_tables(quant, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_decode_tables_are_golden(weights: Fixture, mode: str) -> None:
    check_decode_tables(weights, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_dequantised_weights_are_golden(weights: Fixture, mode: str) -> None:
    check_dequantised(weights, MODES[mode])


@pytest.mark.parametrize("case", ["a", "b", "c"])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_gemms_are_golden(weights: Fixture, kind: str, case: str) -> None:
    check_gemm(weights, kind, case)


def test_every_key_is_taken_or_excused() -> None:
    # own Fixture objects: the test must not depend on which others ran before it
    quant, weights = load_fixture("quant"), load_fixture("weights_gemm")
    for case in CASES:
        for name in ("q8", "q4m", "q4n"):
            check_quantiser(quant, case, name, MODES["jit"])
    check_tables(quant, MODES["jit"])
    check_decode_tables(weights, MODES["jit"])
    check_dequantised(weights, MODES["jit"])
    for kind in ("fp8", "fp4"):
        for case in "abc":
            check_gemm(weights, kind, case)
    check_consumed(quant, EXCUSED)
    check_consumed(weights, {})
