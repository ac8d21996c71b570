"""Golden file attention: the core with its sink, the output product, the whole sub-layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.attention import core, indexer, projections
from deepinfer_jax.numerics import ops as core_ops
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import NUMERICS, Weights, layer_params, ops, tiny_config
from tests.golden.sublayer import Sublayer, sublayer_weights

FULL = (1, 9, 50)
#: (sub-layer, tokens) -> rows whose top-k edge is an exact tie of BF16 scores.
TIED_ROWS = {(2, 50): [20, 36, 37, 41]}


def check_core(fixture: Fixture, name: str, numerics: str) -> None:
    """-1 indices, a row without keys, sinks of +-60; one BF16 step or f32."""
    prims = ops(NUMERICS[numerics])
    index, kv = fixture.input(f"{name}.idx"), fixture.value(f"{name}.kv")
    q, sink = fixture.value(f"{name}.q"), fixture.input(f"{name}.sink")

    def run(q, kv, index, sink):
        o = core.attend(prims, q, kv[jnp.maximum(index, 0)], index >= 0, sink)
        return prims.bf16(o)

    got = jax.jit(run)(q, kv, index, sink)
    if numerics == "f32":
        compare.relative(f"{name}.o_f32", got, fixture.take(f"{name}.o_f32"))
    else:
        compare.one_step(f"{name}.o_ref", got, fixture.take(f"{name}.o_ref"))


class Watched(core_ops.Ops):
    """Primitives that keep what was quantised: the intermediate of the output product."""

    seen: ClassVar[list] = []

    def q8(self, x: Any) -> Any:
        self.seen.append(x)
        return core_ops.Ops.q8(self, x)


def run_output(fixture: Fixture, numerics: str, config: ModelConfig) -> tuple[Any, Any]:
    """Returns (output, intermediate) of the output product without rotation."""
    mode = NUMERICS[numerics]
    prims, weights = ops(mode), Weights(fixture, "wo.w", mode)
    wo_a, wo_b = weights.quantised("_a"), weights.quantised("_b")
    if numerics == "bf16":
        wo_a = wo_a.dequantize().astype(jnp.bfloat16)
    layer = layer_params(wo_a=wo_a, wo_b=wo_b)
    o = fixture.value("wo.o")
    half = config.attention.qk_rope_head_dim // 2
    still = jnp.ones((len(o), half)), jnp.zeros((len(o), half))

    def run(o):
        spy = Watched(fixed_order=prims.fixed_order, rounded=prims.rounded)
        y = projections.output(spy, config, layer, o, still)
        return y, Watched.seen.pop()

    return jax.jit(run)(o)


def check_output(fixture: Fixture, numerics: str) -> None:
    """Grouped product and second product; bf16 (the intermediate too) or f32."""
    y, middle = run_output(fixture, numerics, tiny_config(NUMERICS[numerics]))
    if numerics == "f32":
        compare.relative("wo.y_f32", y, fixture.take("wo.y_f32"))
    else:
        compare.rounded("wo.mid_ref", middle, fixture.take("wo.mid_ref"))
        compare.rounded("wo.y_ref", y, fixture.take("wo.y_ref"))


def check_fp8_variant(fixture: Fixture) -> None:
    """The named variant: Q8 input, intermediate quantised straight from its float32 sum."""
    config = tiny_config("checkpoint")
    kernels = (("output_projection", "fp8"),)
    config = replace(config, execution=replace(config.execution, kernels=kernels))
    y, middle = run_output(fixture, "bf16", config)
    compare.relative("wo.mid_fp8variant_f32", middle, fixture.take("wo.mid_fp8variant_f32"))
    compare.rounded("wo.y_fp8variant", y, fixture.take("wo.y_fp8variant"))


def check_full(fixture: Fixture, number: int, numerics: str) -> None:
    """v -> y from position 0 over a cached sequence in tiles; bf16 or f32."""
    mode, name = NUMERICS[numerics], f"full{number}"
    weights = sublayer_weights(Weights(fixture, f"{name}.w", mode))
    values = {count: fixture.value(f"{name}.n{count}.v") for count in FULL}
    found = {}
    run = Sublayer(mode)
    for count, v in values.items():
        found[count] = np.array(run.rows(weights, number, run.state(), v)[1])
    for count in FULL:
        key = f"{name}.n{count}.{numerics}.y"
        want = fixture.take(key)
        if numerics == "f32":
            compare.relative(key, found[count], want)
        else:
            tied = TIED_ROWS.get((number, count))
            if tied:
                # Ties are undefined in the reference; here it took the higher index.
                other = higher_index_on_ties(weights, number, values[count])
                found[count][tied] = other[tied]
            compare.rounded(key, found[count], want)


def higher_index_on_ties(weights: tuple, number: int, v: np.ndarray) -> np.ndarray:
    """Returns the outputs with exact ties of BF16 scores broken towards the higher index."""
    plain = indexer.select

    def select(config, scores, length, inside=None):
        mirrored = None if inside is None else inside[:, ::-1]
        size = scores.shape[1]
        visible = jnp.arange(size) < length[:, None]
        turned = jnp.where(visible, scores, -jnp.inf)[:, ::-1]
        chosen = plain(config, turned, jnp.full_like(length, size), mirrored)
        ordered = jnp.sort(jnp.where(chosen >= 0, size - 1 - chosen, size), axis=1)
        return jnp.where(ordered == size, -1, ordered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "select", select)
        run = Sublayer("checkpoint")
        return run.rows(weights, number, run.state(), v)[1]


def _core(name: str, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_core(fixture, name, numerics)


def _output(numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_output(fixture, numerics)


def _full(number: int, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_full(fixture, number, numerics)


CASES = (
    {f"core {n} {m}": _core(n, m) for n in ("a", "b", "edge") for m in NUMERICS}
    | {f"output {m}": _output(m) for m in NUMERICS}
    | {"output fp8 variant": check_fp8_variant}
    | {f"full{number} {m}": _full(number, m) for number in (0, 2, 6) for m in NUMERICS}
)
SUITE = Suite("modules/attention", CASES)
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
