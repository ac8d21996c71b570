"""Golden file engram: token reduction, hash constants, hash ids, lookup and gate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.engram import gate, hashing
from deepinfer_jax.model.params import EngramParams
from pallas_kernels import core
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import NUMERICS, Weights, ops, tiny_config, tiny_params


def check_constants(fixture: Fixture) -> None:
    """Token map, primes, multipliers and offsets of the tiny and the released model; exact."""
    token_map = tiny_params().engram.token_map.ids
    compare.exact("tokenmap.tiny", token_map, fixture.take("tokenmap.tiny"))
    pad = token_map[tiny_config().engram.engram_pad_token_id]
    compare.exact("tiny.pad_compressed", pad, fixture.take("tiny.pad_compressed"))
    tiny, real = engram_primes(tiny_config()), engram_primes(preset("deepseek-v4.1-flash"))
    compare.exact("tiny.primes", tiny.primes, fixture.take("tiny.primes"))
    compare.exact("tiny.multipliers", tiny.multipliers, fixture.take("tiny.multipliers"))
    compare.exact("tiny.offsets", tiny.offsets, fixture.take("tiny.offsets"))
    compare.exact("real.primes", real.primes, fixture.take("real.primes"))
    key = "real.multipliers_compressed_99092"
    compare.exact(key, real.multipliers, fixture.take(key))


def context_of(ids: np.ndarray, text: np.ndarray, token_map: np.ndarray, orders: int) -> np.ndarray:
    """Returns compressed ids at p, p-1, ..; -1 for image positions and before the start."""
    compressed = np.where(text.astype(bool), token_map[ids], -1)
    padded = np.concatenate([np.full(orders - 1, -1), compressed])
    return np.stack([padded[orders - 1 - r : padded.size - r] for r in range(orders)], axis=1)


def check_hash(fixture: Fixture, name: str) -> None:
    """Hash ids of both layers, image blocks and BOS/EOS/pad inside; exact."""
    config, token_map = tiny_config(), tiny_params().engram.token_map.ids
    ids, text = fixture.input(f"{name}.ids"), fixture.input(f"{name}.text_mask")
    engram = config.engram
    context = context_of(ids, text, token_map, engram.engram_max_ngram_size).astype(np.int32)
    pad = int(token_map[engram.engram_pad_token_id])

    def run(context):
        places = range(len(engram.engram_layer_ids))
        hashed = [hashing.hash_ids(engram_primes(config), p, context, pad) for p in places]
        return jnp.stack(hashed, axis=1)

    want = fixture.take(f"{name}.out")
    got = np.asarray(jax.jit(run)(jnp.asarray(context)))
    inside = text.astype(bool)  # ids of image positions are masked by the gate
    compare.exact(f"{name}.out", got[inside], want[inside])
    compare.exact(f"{name}.out at images", got[~inside], want[~inside])


def check_module(fixture: Fixture, name: str, numerics: str) -> None:
    """Lookup, projection, gate and injection; f32, or one BF16 step."""
    mode = NUMERICS[numerics]
    config, prims, weights = tiny_config(mode), ops(mode), Weights(fixture, "mod.w", mode)
    table = weights.quantised("embed", "fp8_row32")
    params = EngramParams(
        tables=(),
        wkv=weights.quantised("wkv"),
        q_weight=weights.plain("q_weight"),
        k_weight=weights.plain("k_weight"),
    )
    ids = jnp.asarray(fixture.input(f"{name}.hash_ids").astype(np.int32))
    text = jnp.asarray(fixture.input(f"{name}.text_mask").astype(bool))

    def run(streams, ids, text):
        found = gate.lookup(table, ids)
        return gate.inject(prims, config, params, found, streams, text)

    got = jax.jit(run)(fixture.value(f"{name}.X"), ids, text)
    key = f"{name}.{numerics}.X_out"
    check = compare.relative if numerics == "f32" else compare.one_step
    check(key, got, fixture.take(key))


def check_rows_exact(fixture: Fixture) -> None:
    """A table on the device gives the same rows quantised or expanded."""
    quantised = Weights(fixture, "mod.w", "checkpoint").quantised("embed", "fp8_row32")
    ids = jnp.asarray(fixture.input("mod0.hash_ids").astype(np.int32))
    compare.exact("rows", gate.lookup(quantised, ids), core.dequantize(quantised)[ids])


def _hash(name: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_hash(fixture, name)


def _module(name: str, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_module(fixture, name, numerics)


CASES = (
    {"constants": check_constants, "rows": check_rows_exact}
    | {f"hash{i}": _hash(f"hash{i}") for i in range(4)}
    | {
        f"mod{i} {numerics}": _module(f"mod{i}", numerics)
        for i in range(3)
        for numerics in NUMERICS
    }
)
SUITE = Suite("modules/engram", CASES)
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
