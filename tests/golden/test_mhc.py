"""Golden file mhc: coefficients, collapse, norm and update of one shifted sub-layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import mhc
from deepinfer_jax.model.params import MHCParams
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import ops, tiny_config

NAMES = ("s0", "s1", "zero", "big", "equal")


def check_sublayer(fixture: Fixture, name: str) -> None:
    """Coefficients f32; `u`, `v` and `X_out` within one BF16 step."""
    config, prims = tiny_config("checkpoint"), ops("checkpoint")
    params = MHCParams(
        *(jnp.asarray(fixture.input(f"{name}.{k}")) for k in ("fn", "base", "scale"))
    )
    streams, mix, out, weight = (
        fixture.value(f"{name}.{key}") for key in ("X", "A_in", "y", "norm_w")
    )

    def run(streams, mix, out, weight):
        a, c, b = mhc.mix_coefficients(prims, config.mhc, config.rms_norm_eps, params, streams)
        u = mhc.collapse(prims, mix, streams)
        v = prims.norm(u, weight, config.rms_norm_eps)
        return a, c, b, u, v, mhc.update(prims, c, b, out, streams)

    a, c, b, u, v, x = jax.jit(run)(streams, mix, out, weight)
    compare.relative(f"{name}.A_out", a, fixture.take(f"{name}.A_out"))
    compare.relative(f"{name}.C", c, fixture.take(f"{name}.C"))
    compare.relative(f"{name}.B", b, fixture.take(f"{name}.B"))
    compare.one_step(f"{name}.u", u, fixture.take(f"{name}.u"))
    compare.one_step(f"{name}.v", v, fixture.take(f"{name}.v"))
    compare.one_step(f"{name}.X_out", x, fixture.take(f"{name}.X_out"))


def check_sinkhorn(fixture: Fixture) -> None:
    """The balancing alone; f32."""
    config, prims = tiny_config(), ops("float32")
    got = jax.jit(lambda m: mhc.sinkhorn(prims, config.mhc, m))(fixture.input("sinkhorn.M"))
    compare.relative("sinkhorn.B", got, fixture.take("sinkhorn.B"))


def check_learned_head(fixture: Fixture, name: str) -> None:
    """V4's final mix, composed here of shipped primitives (eps 1e-6); f32 and one step."""
    prims, eps = ops("checkpoint"), 1e-6
    fn, base, scale = (fixture.input(f"{name}.v4head.{k}") for k in ("fn", "base", "scale"))

    def run(streams):
        flat = streams.reshape(streams.shape[0], -1)
        mixed = prims.contract(flat, fn) * prims.rms_scale(flat, eps)[:, None]
        mix = jax.nn.sigmoid(mixed * scale + base) + eps
        return mix, mhc.collapse(prims, mix, streams)

    mix, h = jax.jit(run)(fixture.value(f"{name}.X"))
    compare.relative(f"{name}.v4head.mix", mix, fixture.take(f"{name}.v4head.mix"))
    compare.one_step(f"{name}.v4head.h", h, fixture.take(f"{name}.v4head.h"))


def _named(check: Callable[..., None], name: str) -> Callable[[Fixture], None]:
    return lambda fixture: check(fixture, name)


CASES = (
    {f"sublayer {name}": _named(check_sublayer, name) for name in NAMES}
    | {f"learned head {name}": _named(check_learned_head, name) for name in NAMES}
    | {"sinkhorn": check_sinkhorn}
)
SUITE = Suite("modules/mhc", CASES)
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_initial_mix_takes_stream_0():
    np.testing.assert_array_equal(mhc.initial_mix(2, 4), [[1, 0, 0, 0]] * 2)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
