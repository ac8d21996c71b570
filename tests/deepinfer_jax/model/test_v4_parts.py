"""Parts of DeepSeek-V4 against direct float64 formulas, other levels, gradients, real sizes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model import moe
from deepinfer_jax.model.forward import score
from deepinfer_jax.model.params import ExpertParams
from deepinfer_jax.model.params_v4 import V4CompressorParams
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.step import Plan, step
from deepinfer_jax.model.v4 import compress, streams
from deepinfer_jax.model.v4.moe import route
from deepinfer_jax.model.v4.role import v4_role_table
from deepinfer_jax.model.v4.state import init_cache_v4
from deepinfer_jax.numerics.ops import ops_for
from tests.golden.ledger import Fixture
from tests.golden.test_tiny_v4 import FOLDER, SCORE, config, params

DIM = 64
pytestmark = pytest.mark.accept(3)


def prims():
    return ops_for(config().execution)


def near(got, want, tolerance=1e-5):
    want = np.asarray(want)
    error = np.abs(np.asarray(got) - want).max()
    assert error <= tolerance * np.abs(want).max(), error


def ids_of(count):
    return jnp.asarray(Fixture("tiny_v4/golden_f32").input("B.ids")[:count])


@pytest.mark.parametrize(
    ("position", "ratio", "first", "last"),
    [(0, 4, -4, 3), (3, 4, -4, 3), (4, 4, 0, 7), (11, 4, 4, 11), (127, 128, 0, 127)],
)
def test_pooled_positions(position, ratio, first, last):
    (got,) = np.asarray(compress.pooled_positions(jnp.asarray([position]), ratio))
    assert list(got) == list(range(first, last + 1))


def compressor(ratio, generator):
    width = 2 * DIM if ratio == 4 else DIM
    leaves = [
        jnp.asarray(generator.normal(size=shape), jnp.float32)
        for shape in ((width, 8), (width, 8), (ratio, width), (DIM,))
    ]
    return V4CompressorParams(*leaves)


@pytest.mark.parametrize(("ratio", "window"), [(4, 0), (4, 1), (4, 5), (128, 0), (128, 1)], ids=str)
def test_pooling_formula(ratio, window):
    """model.md 10.4.4 for one entry; poison before position 0 has no effect."""
    generator = np.random.default_rng(ratio + window)
    leaves = compressor(ratio, generator)
    width = leaves.ape.shape[1]
    tokens = generator.normal(size=((window + 1) * ratio, 2, width)).astype(np.float32)
    position = jnp.full((8,), len(tokens) - 1, jnp.int32)
    pooled = compress.pooled_positions(position, ratio)
    read = np.where((pooled >= 0)[:, :, None, None], tokens[np.maximum(pooled, 0)], np.nan)
    got = jax.jit(lambda *arrays: compress.pool(prims(), leaves, 1e-6, *arrays))(read, pooled >= 0)
    ape, gates, values = np.asarray(leaves.ape, np.float64), [], []
    halves = [(window - 1, 0), (window, DIM)] if ratio == 4 else [(window, 0)]
    for start, channel in halves:
        for row in range(ratio) if start >= 0 else ():
            gate, value = tokens[start * ratio + row, :, channel : channel + DIM]
            gates.append(gate + ape[row, channel : channel + DIM])
            values.append(value)
    weight = np.exp(np.asarray(gates) - np.max(gates, axis=0))
    entry = (weight / weight.sum(axis=0) * np.asarray(values, np.float64)).sum(axis=0)
    want = entry / np.sqrt((entry**2).mean() + 1e-6) * np.asarray(leaves.norm)
    near(got[0], want)


def test_head_collapse_formula():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(8, 4, DIM)).astype(np.float32)
    leaves = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params().hc_head)
    got = jax.jit(partial(streams.head_collapse, prims(), config()))(params().hc_head, x)
    flat = x.reshape(8, -1).astype(np.float64)
    mixed = flat @ leaves.fn.T / np.sqrt((flat**2).mean(axis=1, keepdims=True) + 1e-6)
    mix = 1 / (1 + np.exp(-(mixed * leaves.scale[0] + leaves.base))) + config().mhc.hc_eps
    near(got, (mix[:, :, None] * x).sum(axis=1))


def role_of(layer):
    return jax.tree.map(lambda leaf: leaf[layer], v4_role_table(config()))


def test_roles():
    table = v4_role_table(config())
    assert table.group.tolist() == [-1, -1, 0, 1, 0, 1]
    assert table.source.tolist() == [0, 0, 0, 0, 1, 1]
    assert table.hashed.tolist() == [0, 1, -1, -1, -1, -1]
    assert table.scored.tolist() == [-1, -1, 0, 1, 2, 3]
    released = v4_role_table(preset("deepseek-v4-flash"))
    assert released.hashed.tolist() == [0, 1, 2] + [-1] * 40
    assert released.scored.tolist() == [-1] * 3 + list(range(40))
    assert (released.group == 0).sum() == 21
    assert (released.group == 1).sum() == 20


@pytest.mark.parametrize("layer", [0, 1, 2, 5])
def test_route(layer):
    """Hash layers take the stored row in stored order, the others s + bias descending."""
    generator = np.random.default_rng(layer)
    v = jnp.asarray(generator.normal(size=(8, DIM)), jnp.float32)
    ids = jnp.asarray(generator.integers(0, 512, 8), jnp.int32)
    gate = params().layers.gate[layer]
    arguments = (params(), gate, role_of(layer), ids, v)
    chosen, weights = jax.jit(partial(route, prims(), config().moe))(*arguments)
    score = np.sqrt(np.log1p(np.exp(np.asarray(v, np.float64) @ np.asarray(gate).T)))
    if layer < 2:
        want = np.asarray(params().tid2eid)[layer, ids]
    else:
        biased = score + np.asarray(params().gate_bias)[layer - 2]
        want = np.argsort(-biased, axis=1)[:, :2]
    assert np.asarray(chosen).tolist() == want.tolist()
    taken = np.take_along_axis(score, want, axis=1)
    near(weights, 1.5 * taken / taken.sum(axis=1, keepdims=True))


def test_an_expert_named_twice_counts_twice():
    """A table row may hold one id in two slots: both add its output."""
    table = params().tid2eid.at[0, :, 1].set(params().tid2eid[0, :, 0])
    table = table.at[0, ::2, 1].set((table[0, ::2, 0] + 1) % 8)  # rows with and without
    altered = replace(params(), tid2eid=table)
    v = jnp.asarray(np.random.default_rng(3).normal(size=(8, DIM)), jnp.float32)
    ids, settings = jnp.arange(8, dtype=jnp.int32), config().moe

    @jax.jit
    def run(altered, v):
        found = route(prims(), settings, altered, altered.layers.gate[0], role_of(0), ids, v)
        valid = jnp.ones((8,), bool)
        out = moe.routed_experts(prims(), settings, altered.layers.experts, 0, v, *found, valid)
        return *found, out

    chosen, weights, out = map(np.asarray, run(altered, v))
    assert (chosen[1::2, 0] == chosen[1::2, 1]).all()
    near(weights[1::2], np.full((4, 2), 0.75))
    for row, slot in np.ndindex(chosen.shape):
        expert = jax.tree.map(lambda w, e=chosen[row, slot]: w[0, e], params().layers.experts)
        near(out[row, slot], direct_expert(expert, v[row], weights[row, slot]))


def direct_expert(expert: ExpertParams, v, weight):
    gate, up = (np.asarray(v, np.float64) @ np.asarray(w).T for w in (expert.w1, expert.w3))
    limit = config().moe.swiglu_limit
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (gate / (1 + np.exp(-gate)) * up * weight) @ np.asarray(expert.w2).T


@pytest.mark.parametrize("level", [pytest.param("run", marks=pytest.mark.slow), "off"])
def test_other_levels(level):
    execution = replace(config().execution, determinism=level)
    want = SCORE(params(), config(), ids_of(37))
    other = replace(config(), execution=execution)
    near(SCORE(params(), other, ids_of(37)), want)


@pytest.mark.slow
def test_quantised_weights_give_the_same_logits():
    """Weights too large to expand at load are dequantised where they are used."""
    stored = load_params(FOLDER, config())
    want = SCORE(params(), config(), ids_of(37))
    near(SCORE(stored, config(), ids_of(37)), want)


def test_decode_at_a_million_tokens_has_shapes():
    config = preset("deepseek-v4-flash")
    layout = CacheLayout(num_slots=3, num_blocks=8193, max_blocks=8192)
    state = jax.eval_shape(lambda: init_cache_v4(config, layout))
    plan = Plan(*[jax.ShapeDtypeStruct((16,), jnp.int32)] * 3, jax.ShapeDtypeStruct((), jnp.int32))
    after, hidden, _ = jax.eval_shape(
        lambda params, state, plan: step(params, config, state, plan),
        abstract_params(config),
        state,
        plan,
    )
    assert hidden.shape == (16, 4096)
    assert jax.tree.leaves(after) == jax.tree.leaves(state)
    assert [leaf.shape for leaf in state.main] == [(21, 8193, 32, 512), (20, 8193, 1, 512)]
    assert [leaf.shape for leaf in state.tail] == [(21, 3, 15, 2, 1024), (20, 3, 135, 2, 512)]
    assert state.index_tail.shape == (21, 3, 15, 2, 256)


@pytest.mark.slow
def test_gradient():
    """Reverse mode reaches every float leaf that scores depend on, and is the slope."""
    ids = ids_of(140)  # past the first ratio-128 row

    def loss(params):
        return (score(params, config(), ids) ** 2).mean()

    value, slope = jax.jit(jax.value_and_grad(loss, allow_int=True))(params())
    flat, _ = jax.tree_util.tree_flatten_with_path(slope)
    for path, leaf in flat:
        if leaf.dtype == jnp.float32:
            name = jax.tree_util.keystr(path)
            assert np.isfinite(leaf).all(), name
            assert (np.abs(leaf).max() > 0) == (not name.startswith((".indexers", ".gate_bias")))
    ape = params().compressors[1].ape
    direction = slope.compressors[1].ape / jnp.linalg.norm(slope.compressors[1].ape)
    step = 0.02
    moved = [
        replace(
            params(),
            compressors=(
                params().compressors[0],
                replace(params().compressors[1], ape=ape + sign * step * direction),
            ),
        )
        for sign in (1, -1)
    ]
    measured = (jax.jit(loss)(moved[0]) - jax.jit(loss)(moved[1])) / (2 * step)
    assert np.isfinite(value)
    near(measured, jnp.linalg.norm(slope.compressors[1].ape), 0.05)
