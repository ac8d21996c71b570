"""Golden files quant and weights_gemm: the assertions of the primitives' own tests, counted."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.golden.ledger import Fixture, Left, Suite
from tests.pallas_kernels.core import test_golden_quant as primitives

JIT = primitives.MODES["jit"]
RECIPROCAL = Left(
    2,
    "variant not implemented: amax times 1/6",
    tuple(f"{case}.q4n.deq_mulrecip" for case in primitives.CASES),
)


class Taken:
    """What the primitives' checks call a fixture: `take` returns stored dtypes."""

    def __init__(self, fixture: Fixture, outputs: tuple[str, ...]) -> None:
        self.fixture, self.outputs = fixture, outputs

    def take(self, key: str) -> np.ndarray:
        """Returns one tensor as stored; the last part of its key says what it is."""
        if key.rsplit(".", 1)[-1] in self.outputs or key in self.outputs:
            self.fixture.take(key)
            return self.fixture.arrays[key]
        return self.fixture.input(key)


def _case(check: Callable[..., None], outputs: tuple[str, ...], *args: object) -> Callable:
    return lambda fixture: check(Taken(fixture, outputs), *args)


def e2m1_and_pow2ceil(fixture: Fixture) -> None:
    taken = Taken(fixture, ("y", "e2m1.codes_u8"))
    primitives.check_tables(taken, JIT)


QUANT = {
    f"{case}.{name}": _case(
        primitives.check_quantiser, ("codes_u8", "packed_u8", "scale_u8", "deq"), case, name, JIT
    )
    for case in primitives.CASES
    for name in ("q8", "q4m", "q4n")
} | {"tables": e2m1_and_pow2ceil}
WEIGHTS = {
    "decode tables": _case(primitives.check_decode_tables, ("value",), JIT),
    "dequantised": _case(primitives.check_dequantised, ("deq_f32", "out"), JIT),
} | {
    f"gemm {kind} {case}": _case(primitives.check_gemm, ("y",), kind, case)
    for kind in ("fp8", "fp4")
    for case in "abc"
}
SUITES = {
    "quant": Suite("modules/quant", QUANT, [RECIPROCAL]),
    "weights_gemm": Suite("modules/weights_gemm", WEIGHTS),
}
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize(("file", "case"), [(f, c) for f, s in SUITES.items() for c in s.cases])
def test_golden(file, case):
    SUITES[file].run(case)


@pytest.mark.parametrize("file", SUITES)
def test_every_key_is_compared_once_or_left_to_a_named_issue(file, record_property):
    SUITES[file].report(record_property)
