"""Golden file moe: router, score function, ties, experts, the whole sub-layer."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import moe
from deepinfer_jax.model.params import ExpertParams
from pallas_kernels import core
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import NUMERICS, Weights, layer_params, ops, tiny_config

EXPERTS = 8


def check_router(fixture: Fixture, name: str) -> None:
    """384 experts, top 6, image bias; logits and weights f32, experts as sets."""
    prims, config = ops("checkpoint"), tiny_config()
    settings = replace(config.moe, n_routed_experts=384, num_experts_per_tok=6)
    bias = _bias(fixture, name, f"{name}.image_mask")
    gate, x = fixture.value(f"{name}.weight"), fixture.value(f"{name}.x")

    def run(x, gate, bias):
        return prims.contract(x, gate), *moe.route(prims, settings, gate, bias, x)

    logits, ids, weights = jax.jit(run)(x, gate, bias)
    compare.relative(f"{name}.logits", logits, fixture.take(f"{name}.logits"))
    _check_routing(fixture, name, ids, weights)


def _bias(fixture: Fixture, prefix: str, mask: str) -> np.ndarray:
    """Returns one bias row per token, the image row at image positions."""
    text, image = fixture.input(f"{prefix}.bias"), fixture.input(f"{prefix}.bias_vl")
    return np.where(fixture.input(mask).astype(bool)[:, None], image, text)


def _check_routing(fixture: Fixture, name: str, ids: jax.Array, weights: jax.Array) -> None:
    want_ids, want = fixture.take(f"{name}.experts"), fixture.take(f"{name}.weights")
    compare.same_sets(f"{name}.experts", ids, want_ids)
    got = compare.by_id(weights, ids)
    compare.relative(f"{name}.weights", got, compare.by_id(want, want_ids))


def check_score(fixture: Fixture) -> None:
    """sqrt(softplus), large logits included; f32."""
    got = jax.jit(moe.router_scores)(jnp.asarray(fixture.input("score.logit"))[None])[0]
    compare.relative("score.sqrtsoftplus", got, fixture.take("score.sqrtsoftplus"))


def check_ties(fixture: Fixture) -> None:
    """Equal scores: the lower expert id; exact."""
    got = core.top_k(jnp.asarray(fixture.input("ties.score")), 3)[1]
    compare.exact("ties.top3", got, fixture.take("ties.top3"))


def experts_of(fixture: Fixture, mode: str) -> tuple[ExpertParams, ExpertParams]:
    """Returns (routed experts [1, e, ..], shared expert)."""
    weights = Weights(fixture, "w", mode)

    def one(prefix: str, layout: str) -> ExpertParams:
        return ExpertParams(
            **{n: weights.quantised(f"{prefix}.{n}", layout) for n in ("w1", "w3", "w2")}
        )

    routed = [one(f"experts.{expert}", "fp4_row32") for expert in range(EXPERTS)]
    return (
        jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *routed),
        one("shared_experts", "fp8_block32"),
    )


def check_experts(fixture: Fixture, name: str, numerics: str) -> None:
    """Shared expert, expert 0 at two weights, routing, total; bf16 or f32."""
    mode, key = NUMERICS[numerics], f"{name}.{numerics}"
    config, prims = tiny_config(mode), ops(mode)
    routed, shared = experts_of(fixture, mode)
    gate = Weights(fixture, "w", mode).plain("gate.weight")
    # REF ran with BF16 as the default dtype, so its routing weight 0.37 was a BF16 number.
    light = 0.37 if numerics == "f32" else 0.369140625
    bias, x = _bias(fixture, "w.gate", f"{name}.image_mask"), fixture.value(f"{name}.x")

    def run(x, gate, bias, routed, shared):
        layer = layer_params(gate=gate, gate_bias=bias, experts=routed, shared=shared)
        valid = jnp.ones(x.shape[:1], bool)
        total, ids, weights = moe.moe_layer(prims, config.moe, layer, 0, x, valid)
        x8, first = prims.q8(x), jax.tree.map(lambda leaf: leaf[0, 0], routed)
        alone = [
            moe.swiglu(prims, config.moe, first, x8, jnp.full((x.shape[0], 1), weight))
            for weight in (1.0, light)
        ]
        return total, ids, weights, moe.swiglu(prims, config.moe, shared, x8), *alone

    total, ids, weights, y_shared, y_1, y_037 = jax.jit(run)(x, gate, bias, routed, shared)
    _check_routing(fixture, key, ids, weights)
    check = compare.relative if numerics == "f32" else compare.rounded
    outputs = {
        "shared_y": y_shared,
        "expert0_y_weight1": y_1,
        "expert0_y_weight0.37": y_037,
        "y": total,
    }
    for part, got in outputs.items():
        check(f"{key}.{part}", got, fixture.take(f"{key}.{part}"))


def _router(name: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_router(fixture, name)


def _experts(name: str, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_experts(fixture, name, numerics)


CASES = (
    {f"router{i}": _router(f"router{i}") for i in range(3)}
    | {"score": check_score, "ties": check_ties}
    | {f"s{i} {numerics}": _experts(f"s{i}", numerics) for i in range(3) for numerics in NUMERICS}
)
SUITE = Suite("modules/moe", CASES)
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
