"""`score` at level "batch": a row's bits do not depend on the rows that come after it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.loading import load
from deepinfer_jax.model import forward
from tests.golden.network import TINY, tiny_config, tiny_params
from tests.invariance.checker import PROMPT, ROWS, differing, differing_prefixes

FAST = (1, 3, 8, 9, 65)
pytestmark = pytest.mark.accept(2)


def scorer(numerics="float32", **execution):
    model = load(TINY, numerics=numerics)
    config = replace(model.config, execution=replace(model.config.execution, **execution))
    program = jax.jit(di.score, static_argnums=1)
    return lambda ids: program(model.params, config, jnp.asarray(ids))


@pytest.mark.slow
def test_rows_of_score_in_float32():
    assert differing_prefixes(scorer(), FAST) == []


@pytest.mark.slow
def test_rows_of_score_in_float32_at_the_other_lengths():
    rest = tuple(count for count in ROWS[:-1] if count not in FAST)
    assert differing_prefixes(scorer(), rest) == []


# As `test_forward.test_vmap_gives_the_bits_of_one_sequence_alone`, without a jit around it.
@pytest.mark.slow
def test_rows_of_score_of_sequences_side_by_side_under_vmap():
    ids = np.stack([PROMPT[:9], PROMPT[9:18]])
    run = scorer()
    together = jax.vmap(partial(forward.score, tiny_params(), tiny_config()))(jnp.asarray(ids))
    report = [line for i in range(2) for line in differing(f"row {i}", together[i], run(ids[i]))]
    assert report == []


def test_checker_notices_when_all_rows_run_at_once():
    # Positive control: without the tile loop and the fixed-order primitives, rows do depend. The
    # lengths are those of `test_cached`, so that the programs are.
    assert differing_prefixes(scorer(determinism="off"), (9,), of=92) != []
