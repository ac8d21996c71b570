"""Loss and gradients against finite differences, the indexers' loss, router balancing."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.losses import (
    LossSettings,
    balanced_bias,
    expert_load,
    total_loss,
    weighted_cross_entropy,
)
from tests.deepinfer_jax.training.tiny_training import parameters, random_ids, two_layer_config

INDEX_PATH = ("indexers", "index_wk", "index_k_norm")
NO_GRADIENT = ("gate_bias",)


@lru_cache(maxsize=1)
def model():
    """A 2-layer model whose constant leaves carry noise, one batch, and its jitted losses."""
    config = two_layer_config()
    draw = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.asarray(draw.standard_normal(leaf.shape), jnp.float32),
        parameters(config),
    )
    ids = random_ids(config, (2, 24))
    weights = jnp.asarray(draw.integers(0, 2, ids.shape), jnp.float32)
    settings = LossSettings(is_quantised=False)

    def losses(params):
        _, metrics = total_loss(params, config, ids, weights, settings)
        return metrics["token_loss"], metrics["index_loss"]

    def pulled(params):
        values, pull = jax.vjp(losses, params)
        one, none = jnp.ones(()), jnp.zeros(())
        return values, pull((one, none))[0], pull((none, one))[0]

    return params, jax.jit(losses), jax.jit(pulled)(params)


def leaves(tree):
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def slope(params, losses, which, name, direction, step):
    """Returns the central difference of one loss along a direction of one leaf."""
    found = []
    for sign in (1, -1):
        moved = jax.tree_util.tree_map_with_path(
            lambda path, x, sign=sign: (
                x + sign * step * direction if jax.tree_util.keystr(path) == name else x
            ),
            params,
        )
        found.append(float(losses(moved)[which]))
    return (found[0] - found[1]) / (2 * step)


@pytest.mark.parametrize("which", [0, 1], ids=["token_loss", "index_loss"])
def test_gradients_agree_with_finite_differences(which):
    params, losses, (values, *gradients) = model()
    assert all(map(np.isfinite, values))
    gradient = leaves(gradients[which])
    checked = 0
    for name, leaf in gradient.items():
        size = float(jnp.linalg.norm(leaf))
        if (which == 1) != any(part in name for part in INDEX_PATH) or "gate_bias" in name:
            continue
        assert size > 0, name
        # Far enough to rise above float32 rounding of the loss, near enough to be straight: the
        # Engram gate has the square root of what these two are factors of.
        change = 2e-4 if name in (".engram.q_weight", ".engram.k_weight") else 1.5e-3
        step = min(change / size, 0.05 * float(jnp.linalg.norm(leaves(params)[name])))
        found = slope(params, losses, which, name, leaf / size, step)
        noise = 2e-6 * float(values[which]) / step
        assert found == pytest.approx(size, rel=0.02, abs=noise), name
        checked += 1
    assert checked == (4 if which else len(gradient) - 6)


def test_index_loss_reaches_only_indexer_and_index_keys():
    _, _, (values, token, index) = model()
    assert values[1] > 0
    for name, leaf in leaves(index).items():
        assert bool(jnp.any(leaf)) == any(part in name for part in INDEX_PATH), name
    for name, leaf in leaves(token).items():
        unreached = any(part in name for part in (*INDEX_PATH, *NO_GRADIENT))
        assert bool(jnp.any(leaf)) != unreached, name


def test_cross_entropy_does_not_depend_on_the_chunk():
    draw = np.random.default_rng(0)
    head, hidden = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in ((50, 8), (21, 8)))
    targets = jnp.asarray(draw.integers(0, 50, 21), jnp.int32)
    weights = jnp.asarray(draw.random(21), jnp.float32)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    chosen = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(21), targets]
    expected = (chosen * np.asarray(weights)).sum()
    for chunk in (8, 21, 64):
        found = weighted_cross_entropy(head, hidden, targets, weights, chunk=chunk)
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_balancing_lowers_crowded_and_raises_idle_experts():
    ids = jnp.asarray([[[[0, 1], [0, 2], [0, 1]]], [[[3, 2], [1, 0], [3, 2]]]])
    load = expert_load(ids, 4)
    np.testing.assert_array_equal(load, [[3, 2, 1, 0], [1, 1, 2, 2]])
    moved = balanced_bias(jnp.zeros((2, 4)), load, 0.5)
    np.testing.assert_array_equal(moved, [[-0.5, -0.5, 0.5, 0.5], [0.5, 0.5, -0.5, -0.5]])
    even = balanced_bias(jnp.ones((1, 2)), jnp.asarray([[3.0, 3.0]]), 0.5)
    np.testing.assert_array_equal(even, [[1, 1]])
