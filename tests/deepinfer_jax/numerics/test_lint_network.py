"""The network's own programs under the lint: level "batch" passes, level "off" does not."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.loading import load
from deepinfer_jax.model.cached import init_state, make_plan, prefill
from deepinfer_jax.model.forward import draft, score
from deepinfer_jax.numerics.lint import lint_program
from tests.golden.network import TINY

#: 8 x 11: no other axis of the programs is a multiple of it.
ROWS = 88
# The HLO is the same; only machine code, which is never run, is made faster.
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}


@lru_cache(maxsize=4)
def model(numerics, determinism):
    return load(TINY, numerics=numerics, determinism=determinism)


def lint_score(chosen, length, rows):
    def run(params, ids):
        return score(params, chosen.config, ids)

    ids = jax.ShapeDtypeStruct((length,), jnp.int32)
    return lint_program(run, chosen.params, ids, rows=rows, **QUICK)


def lint_prefill(chosen, wanted):
    state = init_state(chosen.config, RuntimeConfig(max_seqs=3, max_len=48, block_tokens=128))
    zeros = np.zeros(ROWS, np.int32)
    plan = make_plan(chosen.config, zeros, zeros, zeros, rows=zeros[:wanted])

    def run(params, state, plan):
        return prefill(params, chosen.config, state, plan)

    return lint_program(run, chosen.params, state, plan, rows=ROWS, **QUICK)


@pytest.mark.accept(3)
@pytest.mark.parametrize(
    ("numerics", "length", "rows"), [("checkpoint", 9, None), ("float32", ROWS, ROWS)]
)
def test_score_passes(numerics, length, rows):
    assert lint_score(model(numerics, "batch"), length, rows) == []


@pytest.mark.accept(3)
def test_prefill_passes():
    assert lint_prefill(model("checkpoint", "batch"), 4) == []


@pytest.mark.accept(3)
def test_prefill_passes_with_one_tile_of_logit_rows():
    assert lint_prefill(model("float32", "batch"), 8) == []


@pytest.mark.accept(3)
def test_draft_passes():
    chosen = model("float32", "batch")

    def run(params, ids):
        return draft(params, chosen.config, ids)

    ids = jax.ShapeDtypeStruct((ROWS + 1,), jnp.int32)
    assert lint_program(run, chosen.params, ids, rows=ROWS, **QUICK) == []


@pytest.mark.accept(3)
def test_off_has_stock_operations_outside_tile_loops():
    found = lint_score(model("float32", "off"), ROWS, ROWS)
    assert {finding.rule for finding in found} == {"contraction", "row-sum"}
    hlo = [f for f in found if f.where.startswith("%") and f.rule == "contraction"]
    outside = [f for f in hlo if f.where.endswith("outside loops")]
    # The head is outside; the other products are in the loop over layers, with all rows at once.
    vocab = model("float32", "off").config.vocab_size
    assert any(f"f32[{ROWS},{vocab}]" in f.text for f in outside)
    assert len(hlo) > 10
