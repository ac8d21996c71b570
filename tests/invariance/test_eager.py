"""Rounding points survive fusion: eager calls and compiled programs give the same layers (A10)."""

from functools import partial

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.loading import load
from deepinfer_jax.model.step import step
from tests.golden.network import TINY

ROWS = 20


def layers_of(numerics, run):
    model = load(TINY, numerics=numerics)
    ids = np.random.default_rng(1).integers(3, 500, ROWS).astype(np.int32)
    plan = di.make_plan(model.config, ids, np.arange(ROWS), np.full(ROWS, 1))
    state = di.init_state(model.config, RuntimeConfig(max_seqs=1, max_len=128))
    _, hidden, seen = run(model.params, model.config, state, plan)
    streams = np.asarray(seen["x_out"])[:, :ROWS]
    return [*streams, np.asarray(hidden)[:ROWS]]


program = partial(step, collect=("x_out",))


# Rounding points are what fusion could remove, and float32 has none.
@pytest.mark.parametrize(
    "numerics",
    [
        pytest.param("float32", marks=[pytest.mark.slow, pytest.mark.accept(3)]),
        "checkpoint",
    ],
)
def test_eager_layers_equal_jitted_layers(numerics):
    jitted = layers_of(numerics, jax.jit(program, static_argnums=1))
    eager = layers_of(numerics, program)
    for number, (one, other) in enumerate(zip(jitted, eager, strict=True)):
        same = one.view(np.uint32) == other.view(np.uint32)
        assert same.all(), f"layer {number}: {(~same).sum()} of {same.size} values differ"


@pytest.mark.slow
@pytest.mark.accept(3)
def test_layers_computed_op_by_op_differ_by_no_more_than_a_few_roundings():
    """Without any fusion a float32 sum may differ in its last bit, hence flip a BF16 rounding.

    A rounding point that fusion had removed would change nearly every value of its layer.
    """
    jitted = layers_of("checkpoint", jax.jit(program, static_argnums=1))
    with jax.disable_jit():
        alone = layers_of("checkpoint", program)
    for number, (one, other) in enumerate(zip(jitted, alone, strict=True)):
        differing = (one != other).sum()
        assert differing <= one.size * 5e-3, f"layer {number}: {differing} of {one.size} differ"
