"""Parts of the network with `kernels="pallas_interpret"` against the XLA path, on nano's weights.

The kernels' bodies run under the CPU interpreter, in the places where the network calls them.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.model import moe
from deepinfer_jax.model.attention import projections
from deepinfer_jax.model.layer import layer_at
from deepinfer_jax.model.rope import rope_frequencies, rope_tables
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.numerics.selection import attention_widths
from pallas_kernels import COVERED, core
from pallas_kernels.tables import misfit

LAYER = 4


@pytest.fixture(scope="module")
def nano():
    return di.load("nano")


def interpreted(config):
    """Returns the config as `load(kernels="pallas_interpret")` gives it."""
    widths = attention_widths(config)
    kernels = tuple((op, "pallas_interpret") for op in sorted(COVERED) if not misfit(op, widths))
    return replace(config, execution=replace(config.execution, kernels=kernels))


def rows(config, count, seed=0):
    """Returns hidden rows at the BF16 rounding point."""
    x = np.random.default_rng(seed).standard_normal((count, config.hidden_size), np.float32)
    return core.round_bf16(jnp.asarray(x))


def both(config, fn):
    """Returns fn(ops, config) with XLA and with interpreted kernels."""
    other = interpreted(config)
    return [
        jax.jit(lambda: fn(ops_for(c.execution), c))()  # noqa: B023
        for c in (config, other)
    ]


def assert_near(found, expected):
    """BF16 results of sums in another order: an ulp here and there, of the value or of the row."""
    assert np.isfinite(found).all()
    scale = np.sqrt(np.mean(np.square(expected)))
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-6 * scale)


def test_load_takes_the_name(nano):
    assert di.load("nano", kernels="pallas_interpret").config == interpreted(nano.config)


def test_norm_has_the_bits_of_core(nano):
    weight = nano.params.layers.attn_norm[LAYER]
    x = rows(nano.config, 5)
    xla, kernel = both(nano.config, lambda ops, c: ops.norm(x, weight, c.rms_norm_eps))
    np.testing.assert_array_equal(np.asarray(kernel), np.asarray(xla))


@pytest.mark.parametrize("count", [1, 8])
def test_query_projections(nano, count):
    layer = layer_at(nano.params.layers, LAYER)
    x = rows(nano.config, count)
    rope = rope_tables(jnp.arange(count), rope_frequencies(nano.config.attention)[0])

    def fn(ops, config):
        latent = projections.query_latent(ops, config, layer, x)
        return projections.queries(ops, config, layer, latent, rope)

    xla, kernel = both(nano.config, fn)
    assert_near(np.asarray(kernel), np.asarray(xla))


def test_output_projection_with_its_groups(nano):
    layer = layer_at(nano.params.layers, LAYER)
    heads, width = nano.config.attention.num_attention_heads, nano.config.attention.head_dim
    o = jnp.asarray(np.random.default_rng(1).standard_normal((3, heads, width), np.float32))
    rope = rope_tables(jnp.arange(3), rope_frequencies(nano.config.attention)[0])
    xla, kernel = both(nano.config, lambda ops, c: projections.output(ops, c, layer, o, rope))
    assert_near(np.asarray(kernel), np.asarray(xla))


def test_router_and_experts(nano):
    layer = layer_at(nano.params.layers, LAYER)
    x = rows(nano.config, 4)
    valid = jnp.arange(4) < 3

    def fn(ops, config):
        return moe.moe_layer(ops, config.moe, layer, jnp.int32(LAYER), x, valid)

    (xla, ids, weights), (kernel, other_ids, other_weights) = both(nano.config, fn)
    np.testing.assert_array_equal(np.asarray(other_ids), np.asarray(ids))
    np.testing.assert_allclose(np.asarray(other_weights), np.asarray(weights), rtol=1e-5)
    assert_near(np.asarray(kernel)[:3], np.asarray(xla)[:3])  # the last row is padding


def test_dense_kernels_leave_the_experts_to_xla(nano):
    layer, x, valid = layer_at(nano.params.layers, LAYER), rows(nano.config, 2), jnp.ones(2, bool)
    kernels = (("block_scaled_matmul", "pallas_interpret"),)
    config = replace(nano.config, execution=replace(nano.config.execution, kernels=kernels))
    found, expected = (
        moe.moe_layer(ops_for(c.execution), c.moe, layer, jnp.int32(LAYER), x, valid)[0]
        for c in (config, nano.config)
    )
    assert_near(np.asarray(found), np.asarray(expected))


def test_a_row_keeps_its_bits_among_others(nano):
    layer = layer_at(nano.params.layers, LAYER)
    config = interpreted(nano.config)
    ops = ops_for(config.execution)
    x = rows(config, 3)

    def run(x):
        valid = jnp.ones(x.shape[0], bool)
        return moe.moe_layer(ops, config.moe, layer, jnp.int32(LAYER), x, valid)[0]

    together = np.asarray(jax.jit(run)(x))
    alone = np.asarray(jax.jit(run)(x[1:2]))
    np.testing.assert_array_equal(alone.view(np.uint32), together[1:2].view(np.uint32))
