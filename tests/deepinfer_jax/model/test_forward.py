"""The pure functions: inputs, transformations, real-size shapes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.loading import load
from tests.golden.network import TINY


@pytest.fixture(scope="module")
def model():
    return load(TINY, numerics="float32")


@pytest.fixture(scope="module")
def score():
    return jax.jit(di.score, static_argnums=1)


@pytest.mark.parametrize("function", [di.score, di.hidden_states, di.draft])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (np.zeros((0,), np.int32), "at least"),
        (np.array([1, 512, 3], np.int32), "512 at position 1"),
        (np.array([1, 3, -4], np.int32), "-4 at position 2"),
        (np.array([1, 502, 3], np.int32), "every image token 502 takes one row"),
        (np.zeros((2, 3), np.int32), r"shape \[t\]"),
        (np.array([0.5, 1.0], np.float32), "must be integers"),
        (np.ones((1025,), np.int32), "max_position_embeddings=1024"),
    ],
)
def test_bad_ids_raise(function, ids, text, model):
    with pytest.raises(di.InputError, match=text):
        function(model.params, model.config, ids)


def test_draft_needs_a_processed_position(model):
    with pytest.raises(di.InputError, match="at least 2"):
        di.draft(model.params, model.config, np.array([5], np.int32))


def test_draft_needs_draft_stages(model):
    without = replace(model.config, draft=None)
    with pytest.raises(di.InputError, match="draft stages"):
        di.draft(model.params, without, np.array([5, 6], np.int32))


def test_image_ids_are_refused_by_id_not_by_spelling(model):
    assert model.config.image_token_id == 502


@pytest.mark.accept(2)
def test_vmap_gives_the_bits_of_one_sequence_alone(model, score):
    batch = np.array([[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 3, 8, 8, 8, 400, 2, 1, 0]], np.int32)
    mapped = jax.jit(jax.vmap(lambda ids: di.score(model.params, model.config, ids)))(batch)
    for row, ids in zip(np.asarray(mapped), batch, strict=True):
        alone = np.asarray(score(model.params, model.config, ids))
        np.testing.assert_array_equal(row.view(np.uint32), alone.view(np.uint32))


def _loss(params, config, ids):
    scores = di.score(params, config, ids[:-1])
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), ids[1:, None], axis=1).mean()


@pytest.mark.slow
@pytest.mark.accept(2)
def test_gradient_of_the_whole_tree_equals_finite_differences(model):
    ids = np.array([5, 60, 7, 100, 9, 210, 11, 12, 313, 14], np.int32)
    loss = jax.jit(_loss, static_argnums=1)
    value, gradient = jax.jit(jax.value_and_grad(_loss), static_argnums=1)(
        model.params, model.config, ids
    )
    assert value == loss(model.params, model.config, ids)
    backbone = replace(gradient, draft=None, vision=None)
    checked = 0
    for path, slope in jax.tree_util.tree_leaves_with_path(backbone):
        size = float(jnp.linalg.norm(slope))
        name = jax.tree_util.keystr(path)
        if "index" in name or "gate_bias" in name:
            assert size == 0.0, name  # selections have no slope
            continue
        assert size > 0.0, name
        if name not in _CHECKED:
            continue
        # Along its own slope a leaf changes the loss by the slope's norm; the step is small, since
        # a selection that flips makes the loss jump.
        step = 2e-3

        def moved(sign, path=path, slope=slope, size=size, step=step):
            tree = jax.tree_util.tree_map_with_path(
                lambda p, x: x + sign * step * slope / size if p == path else x,
                replace(model.params, draft=None, vision=None),
            )
            return replace(model.params, **{k: getattr(tree, k) for k in _BACKBONE})

        difference = loss(moved(1), model.config, ids) - loss(moved(-1), model.config, ids)
        assert float(difference) / (2 * step) == pytest.approx(size, rel=0.05), name
        checked += 1
    assert checked == len(_CHECKED)


_CHECKED = (
    ".head",
    ".norm",
    ".layers.experts.w2",
    ".layers.shared.w2",
    ".layers.gate",
    ".layers.attn_sink",
    ".layers.hc_ffn.fn",
    ".compressors[1].wkv",
    ".engram.tables[1]",
)
_BACKBONE = ("embed", "norm", "head", "layers", "compressors", "indexers", "engram")


@pytest.mark.slow
@pytest.mark.accept(2)
def test_vmap_of_grad_and_grad_of_vmap(model):
    batch = np.array([[5, 6, 7, 8], [9, 2, 3, 4]], np.int32)

    def loss(head, ids):
        return _loss(replace(model.params, head=head), model.config, ids)

    head = model.params.head
    each = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(head, batch)
    total = jax.jit(jax.grad(lambda h: jax.vmap(loss, in_axes=(None, 0))(h, batch).sum()))(head)
    np.testing.assert_allclose(each.sum(axis=0), total, rtol=1e-5, atol=1e-7)


def test_off_and_run_agree_with_batch_within_rounding(model, score):
    ids = np.arange(3, 95, dtype=np.int32)  # 92 rows, as in tests/invariance/test_cached.py
    reference = np.asarray(score(model.params, model.config, ids))
    for level in ("off", "run"):
        execution = replace(model.config.execution, determinism=level)
        found = np.asarray(score(model.params, replace(model.config, execution=execution), ids))
        np.testing.assert_allclose(found, reference, atol=1e-4 * np.abs(reference).max())


@pytest.mark.accept(2)
@pytest.mark.parametrize("numerics", ["float32", "checkpoint"])
def test_shapes_at_real_size_take_seconds(numerics):
    config = di.preset("deepseek-v4.1-flash")
    config = replace(config, execution=di.ExecutionConfig(numerics=numerics))
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    out = jax.eval_shape(lambda p, i: di.score(p, config, i), abstract_params(config), ids)
    assert (out.shape, out.dtype) == ((4096, 129280), jnp.float32)
    rounds = jax.eval_shape(lambda p, i: di.draft(p, config, i), abstract_params(config), ids)
    assert rounds.logits.shape == (5, 129280)
