"""Golden file norm_rope: RMSNorm at two eps, frequencies, tables, rotation and its inverse."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.rope import apply_rope, inverse_frequencies, rope_frequencies, rope_tables
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import ops, tiny_config


def check_norm(fixture: Fixture, eps: float, key: str) -> None:
    """Rows of 1e-12, 0 and 1e15 among ordinary ones; one BF16 step."""
    prims = ops("checkpoint")
    x, weight = fixture.value("rms.x"), fixture.value("rms.w")
    got = jax.jit(lambda x, w: prims.norm(x, w, eps))(x, weight)
    compare.one_step(key, got, fixture.take(key))


def check_rope(fixture: Fixture, size: str, kind: str) -> None:
    """inv_freq and tables 1e-6 (0.05 beyond position 1000), rotation one BF16 step."""
    config = tiny_config() if size == "tiny" else preset("deepseek-v4.1-flash")
    prims, name = ops("checkpoint"), f"rope.{size}_{kind}"
    frequency = inverse_frequencies(config.attention, yarn=kind == "yarn")
    want = fixture.take(f"{name}.inv_freq")
    compare.absolute(f"{name}.inv_freq", frequency / want, np.ones_like(want), 1e-6)
    compare.exact(name, rope_frequencies(config.attention)[int(kind == "yarn")], frequency)

    position = fixture.input("rope.positions").astype(np.int32)
    cos, sin = jax.jit(rope_tables)(jnp.asarray(position), jnp.asarray(frequency))
    small = position <= 1000
    for part, got in (("cos", cos), ("sin", sin)):
        want = fixture.take(f"{name}.{part}")
        compare.absolute(f"{name}.{part}", np.asarray(got)[small], want[small], 1e-6)
        compare.absolute(f"{name}.{part} beyond 1000", np.asarray(got), want, 0.05)

    for what in ("q", "k"):
        x = fixture.value(f"{name}.{what}.x")
        for inverse, suffix in ((False, "y"), (True, "y_inverse")):

            def rotate(x, cos, sin, inverse=inverse):
                return prims.bf16(apply_rope(x, cos, sin, inverse=inverse))

            key = f"{name}.{what}.{suffix}"
            compare.one_step(key, jax.jit(rotate)(x, cos, sin), fixture.take(key))


def _rope(size: str, kind: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_rope(fixture, size, kind)


CASES = {
    "norm 1e-20": lambda fixture: check_norm(fixture, 1e-20, "rms.eps1e-20.y"),
    "norm 1e-6": lambda fixture: check_norm(fixture, 1e-6, "rms.eps1e-06.y"),
} | {
    f"{size} {kind}": _rope(size, kind) for size in ("real", "tiny") for kind in ("window", "yarn")
}
SUITE = Suite("modules/norm_rope", CASES)
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
