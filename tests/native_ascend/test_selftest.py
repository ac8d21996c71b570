"""Six mutated doubles, six named failures (ascend.md 11.3, 26)."""

import pytest

from native_ascend import AscendError
from native_ascend.selftest import _CASES, before_first_use, self_test

pytestmark = pytest.mark.accept(13)

MUTATIONS = {
    "swap_nibbles": "nibble order of E2M1",
    "floor_scales": "scales are rounded up",
    "swap_gate_up": "gate before up",
    "shift_window": "window of the query",
    "sink_twice": "sink counts once",
    "reverse_ties": "ties go to the lower id",
}


def test_the_double_passes(double):
    self_test()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutated_double_fails_by_name(double, mutation):
    name = MUTATIONS[mutation]
    assert set(MUTATIONS.values()) == set(_CASES)
    double.set(mutation, 1)
    try:
        with pytest.raises(AscendError, match=name):
            self_test([name])
        if mutation == "shift_window":  # the sink's case looks through the same window
            return
        self_test([other for other in _CASES if other != name])
    finally:
        double.set(mutation, 0)


def test_hardware_is_tested_once_before_a_model_runs(double, runtime, monkeypatch):
    monkeypatch.setattr(runtime, "is_double", False)
    monkeypatch.setattr(runtime, "_warned", set(runtime.operators))
    monkeypatch.setenv("DEEPINFER_ASCEND_ALLOW_UNVERIFIED", "1")
    double.set("floor_scales", 1)
    try:
        with pytest.raises(AscendError, match="scales are rounded up"):
            before_first_use(runtime)
        assert not runtime.is_tested
    finally:
        double.set("floor_scales", 0)
    monkeypatch.setattr(runtime, "is_tested", False)
    before_first_use(runtime)
    assert runtime.is_tested
    calls = double.calls("aclnnRmsNorm"), double.calls("aclnnDynamicMxQuantV2")
    before_first_use(runtime)
    assert calls == (double.calls("aclnnRmsNorm"), double.calls("aclnnDynamicMxQuantV2"))
