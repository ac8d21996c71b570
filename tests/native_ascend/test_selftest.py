"""Six mutated doubles, six named failures (ascend.md 11.3, 26)."""

import pytest

from native_ascend import AscendError
from native_ascend.selftest import _CASES, self_test

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
