"""Tiles of another height, as a GPU has them: other bits, and the same in all company."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.numerics.ops import ops_for
from pallas_kernels import core
from tests.e2e.lab import model

pytestmark = pytest.mark.accept(7)
TALL = 16


def tall():
    right = model()
    execution = replace(right.config.execution, row_tile=TALL)
    return replace(right, config=replace(right.config, execution=execution))


@pytest.mark.slow
def test_the_network_in_tall_tiles_has_equal_bits_in_all_company():
    cases = ["chunks=8", "neighbours=3", "arrival=2", "prefix hit, checkpoint=2", "drafts=8"]
    cases += ["preemption=1", "random=3"]
    report = di.verify_invariance(tall(), cases=cases)
    assert report.is_equal, [str(row.first) for row in report.rows]
    assert report.run["row_tile"] == TALL


def test_primitives_take_the_height_of_the_network():
    ops = ops_for(tall().config.execution)
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((40, 96), (24, 96)))
    for run in (lambda rows: ops.contract(rows, w), lambda rows: ops.norm(rows, w[0], 1e-6)):
        program = jax.jit(run)
        whole = np.asarray(program(x))
        for count in (1, 8, TALL, 17):
            few = np.asarray(program(x[:count]))
            np.testing.assert_array_equal(few.view(np.uint32), whole[:count].view(np.uint32))
    text = str(jax.make_jaxpr(lambda rows: ops.contract(rows, w))(x[:TALL]))
    assert "scan" not in text  # the inside of a tile
    assert "scan" in str(jax.make_jaxpr(lambda rows: core.contract(rows, w))(x[:TALL]))
