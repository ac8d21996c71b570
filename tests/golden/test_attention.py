"""Golden file attention: the core with its sink, the output product, the whole sub-layer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.attention import core, projections
from deepinfer_jax.model.attention.sublayer import attention, empty_selection
from deepinfer_jax.model.params import CompressorParams, IndexerParams, LayerParams
from deepinfer_jax.model.state import CacheState, single_sequence
from deepinfer_jax.numerics.ops import Ops
from tests.golden import compare
from tests.golden.ledger import Fixture, Left, Suite
from tests.golden.network import NUMERICS, Weights, ops, role, rows_of, stack, tiles, tiny_config

FULL = (1, 9, 50)


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


class Watched(Ops):
    """Primitives that keep what was quantised: the intermediate of the output product."""

    seen: ClassVar[list] = []

    def q8(self, x: Any) -> Any:
        self.seen.append(x)
        return super(Watched, self).q8(x)


def check_output(fixture: Fixture, numerics: str) -> None:
    """Grouped product and second product without rotation; bf16 (the intermediate too) or f32."""
    mode = NUMERICS[numerics]
    config, prims, weights = tiny_config(mode), ops(mode), Weights(fixture, "wo.w", mode)
    wo_a, wo_b = weights.quantised("_a"), weights.quantised("_b")
    if numerics == "bf16":
        wo_a = wo_a.dequantize().astype(jnp.bfloat16)
    layer: Any = LayerParams(
        **dict.fromkeys(LayerParams.__dataclass_fields__) | {"wo_a": wo_a, "wo_b": wo_b}
    )
    o = fixture.value("wo.o")
    half = config.attention.qk_rope_head_dim // 2
    still = jnp.ones((len(o), half)), jnp.zeros((len(o), half))

    def run(o):
        spy = Watched(fixed_order=prims.fixed_order, rounded=prims.rounded)
        y = projections.output(spy, config, layer, o, still)
        return y, Watched.seen.pop()

    y, middle = jax.jit(run)(o)
    if numerics == "f32":
        compare.relative("wo.y_f32", y, fixture.take("wo.y_f32"))
    else:
        compare.rounded("wo.mid_ref", middle, fixture.take("wo.mid_ref"))
        compare.rounded("wo.y_ref", y, fixture.take("wo.y_ref"))


class Sublayer:
    """`attention` over tiles of one sequence, one compiled program for all layer kinds."""

    def __init__(self, mode: str, tokens: int = 50) -> None:
        self.config, self.prims, self.tokens = tiny_config(mode), ops(mode), tokens

        def run(layer, compressors, indexers, role, state, tile, v):
            params: Any = SimpleNamespace(compressors=compressors, indexers=indexers)
            selection = empty_selection(self.config, state, v.shape[0])
            # Behind jaxtyping the record would be refused: only two of its leaves are read.
            call = getattr(attention, "__wrapped__", attention)
            return call(
                self.prims, self.config, params, layer, role, state, selection, tile, v
            )[:2]

        self.step = jax.jit(run)

    def state(self) -> CacheState:
        """Returns an empty state."""
        return single_sequence(self.config, self.tokens, row_tile=8)

    def rows(
        self, weights: tuple, number: int, state: CacheState, v: np.ndarray, start: int = 0
    ) -> tuple[CacheState, np.ndarray]:
        """Returns (state, outputs) after the rows `v` at positions from `start`."""
        outputs = []
        for positions in tiles(len(v), start):
            padded = np.zeros((8, v.shape[1]), np.float32)
            padded[positions >= 0] = v[positions[positions >= 0] - start]
            state, y = self.step(*weights, role(number), state, rows_of(positions), padded)
            outputs.append(np.asarray(y)[positions >= 0])
        return state, np.concatenate(outputs)


def sublayer_weights(weights: Weights) -> tuple[LayerParams, tuple, IndexerParams]:
    """Returns (layer, compressors of both ratios, indexers); absent leaves are never used."""
    layer = weights.attention()
    if not weights.has("indexer.wq_b"):
        empty = jnp.zeros((64, 64)), jnp.zeros((64,)), jnp.zeros((32, 64)), jnp.zeros((32,))
        own = CompressorParams(empty[0], empty[0], empty[1], empty[2], empty[3])
        queries = IndexerParams(layer.wq_b, jnp.zeros((8, 64)))
    else:
        own, queries = weights.compressor(), weights.indexer()
    with_gate = own if own.wgate is not None else own.replace(wgate=own.wkv)
    compressors = (stack(with_gate, 2), stack(own.replace(wgate=None), 1))
    return layer, compressors, stack(queries, 4)


def check_full(fixture: Fixture, number: int, numerics: str) -> None:
    """v -> y from position 0 over a cached sequence in tiles; bf16 or f32."""
    mode, name = NUMERICS[numerics], f"full{number}"
    run, weights = Sublayer(mode), sublayer_weights(Weights(fixture, f"{name}.w", mode))
    check = compare.relative if numerics == "f32" else compare.rounded
    for count in FULL:
        key = f"{name}.n{count}.{numerics}.y"
        _, y = run.rows(weights, number, run.state(), fixture.value(f"{name}.n{count}.v"))
        check(key, y, fixture.take(key))


def _core(name: str, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_core(fixture, name, numerics)


def _output(numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_output(fixture, numerics)


def _full(number: int, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_full(fixture, number, numerics)


CASES = (
    {f"core {n} {m}": _core(n, m) for n in ("a", "b", "edge") for m in NUMERICS}
    | {f"output {m}": _output(m) for m in NUMERICS}
    | {f"full{number} {m}": _full(number, m) for number in (0, 2, 6) for m in NUMERICS}
)
VARIANT = Left(
    2, "variant not implemented: FP8 wo_a", ("wo.y_fp8variant", "wo.mid_fp8variant_f32")
)
SUITE = Suite("modules/attention", CASES, [VARIANT])
pytestmark = pytest.mark.accept(1)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
