"""The image encoder beside its golden file: sizes of programs, refusals, gradients, padding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.vision import insert, patches
from deepinfer_jax.model.vision.encode import encode_images, encode_program
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.training.forward import training_ops
from tests.golden.network import tiny_config, tiny_params

pytestmark = pytest.mark.accept(12)
FLASH = preset("deepseek-v4.1-flash")
DRAW = np.random.default_rng(3)


def canvas(rows: int, columns: int) -> np.ndarray:
    """Returns pixels of so many patches."""
    return DRAW.integers(0, 256, (4 * rows, 4 * columns, 3), dtype=np.uint8)


def test_programs_are_few_and_hold_every_image():
    sizes = patches.encoder_sizes(FLASH)
    assert [size.patches for size in sizes] == [1536, 2304, 3456, 5184, 7808, 9216]
    assert all(size.patches % patches.TILE == 0 for size in sizes)
    assert patches.encoder_sizes(replace(FLASH, vision=None)) == ()
    assert [size.patches for size in patches.encoder_sizes(tiny_config())] == [192]
    for rows in range(1, 512):  # every shape of cells that has as many tokens at most
        grid = patches.Grid(3 * rows, 3 * (1022 // rows - 1), 3)
        assert 0 < grid.tokens <= 1024
        size = patches.size_for(FLASH, grid)
        assert grid.patches <= size.patches
        assert size in sizes
    assert patches.size_for(FLASH, patches.Grid(39, 39, 3)) == sizes[0]
    assert patches.size_for(FLASH, patches.Grid(93, 93, 3)) == sizes[-1]
    with pytest.raises(di.InputError, match=r"at most max_image_tokens=1024.*have 1058"):
        patches.size_for(FLASH, patches.Grid(96, 96, 3))


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 10, 3), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
    ],
)
def test_a_canvas_has_one_form(pixels):
    with pytest.raises(di.InputError, match=r"a canvas is uint8 \[height, width, 3\]"):
        encode_images(tiny_params(), tiny_config(), [pixels])


def test_models_without_an_encoder_say_so():
    blind = replace(tiny_config(), vision=None)
    with pytest.raises(di.InputError, match="no vision_config"):
        encode_images(tiny_params(), blind, [canvas(3, 3)])
    with pytest.raises(di.InputError, match="were not loaded"):
        encode_images(tiny_params().replace(vision=None), tiny_config(), [canvas(3, 3)])
    with pytest.raises(di.InputError, match="no image encoder: remove it"):
        di.score(tiny_params(), blind, [5, 502])
    with pytest.raises(di.InputError, match="1 tokens and 2 rows"):
        di.score(tiny_params(), tiny_config(), [5, 502], jnp.zeros((2, 64)))
    with pytest.raises(di.InputError, match="end token_ids with text"):
        di.draft(tiny_params(), tiny_config(), [5, 502], jnp.zeros((1, 64)))
    with pytest.raises(di.InputError, match="go together"):
        di.make_plan(tiny_config(), [5, 502], [0, 1], [1, 1], image_rows=jnp.zeros((1, 64)))


def test_no_image_changes_another_and_none_gives_none():
    config, params = tiny_config(), tiny_params()
    images = [canvas(5, 7), canvas(3, 3), canvas(6, 1)]
    alone = [np.asarray(encode_images(params, config, [image])) for image in images]
    together = np.asarray(encode_images(params, config, images))
    assert (together == np.concatenate(alone)).all()
    assert encode_images(params, config, []).shape == (0, 64)


def test_padding_is_never_seen():
    config, params = tiny_config(), tiny_params()
    image = canvas(5, 7)
    size = patches.size_for(config, patches.grid_of(config, image))
    found = patches.padded_patches(config, image, size)
    sides = jnp.asarray([5, 7], jnp.int32)

    def run(values):
        values = jnp.asarray(values)
        return np.asarray(encode_program(params.vision, values, sides, config=config, tokens=24))

    other = found.copy()
    other[35:] = DRAW.integers(0, 256, other[35:].shape)
    tokens = patches.grid_of(config, image).tokens
    assert (run(found)[:tokens] == run(other)[:tokens]).all()


def test_training_sees_batches_and_has_gradients():
    config, vision = tiny_config(), tiny_params().vision
    ops = training_ops(config)
    batch = np.stack([canvas(3, 6) for _ in range(2)])
    given = jnp.asarray(np.stack([patches.patch_rows(config, one) for one in batch]))

    def rows(params, one):
        return insert.image_rows(ops, config, params, one, (3, 6), 5)

    def loss(params):
        found = jax.vmap(lambda one: rows(params, one))(given)
        return jnp.sin(found).sum(), found

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, found), gradient = both(vision)
    inference = encode_images(tiny_params(), config, list(batch)).reshape(2, 5, 64)
    np.testing.assert_allclose(found, inference, atol=2e-5, rtol=2e-5)
    for leaf, part in zip(jax.tree.leaves(gradient), jax.tree.leaves(vision), strict=True):
        assert leaf.shape == part.shape
        assert bool(jnp.isfinite(leaf).all())
        assert float(jnp.abs(leaf).max()) > 0
    # along one direction, as the difference of two losses says
    step = jax.tree.map(lambda leaf: 1e-4 * jnp.sign(leaf), gradient)
    moved = jax.tree.map(jnp.add, vision, step)
    expected = sum(
        float((a * b).sum())
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(step), strict=True)
    )
    back = jax.tree.map(jnp.subtract, vision, step)
    difference = (float(both(moved)[0][0]) - float(both(back)[0][0])) / 2
    assert difference == pytest.approx(expected, rel=0.05)


def test_the_encoder_under_a_callers_jit_has_the_same_bits():
    config, params, image = tiny_config(), tiny_params(), canvas(4, 5)
    eager = encode_images(params, config, [image])
    inside = jax.jit(lambda p, x: 2 * encode_images(p, config, [x]))(params, jnp.asarray(image))
    assert (np.asarray(2 * eager) == np.asarray(inside)).all()


@pytest.mark.slow
def test_gradients_reach_the_encoder_through_the_network():
    config, params = tiny_config(), tiny_params()
    ids = [5, 9, *[502] * 5, 11, 12]

    def loss(vision):
        whole = params.replace(vision=vision)
        rows = encode_images(whole, config, [image])
        return di.score(whole, config, jnp.asarray(ids), rows)[-1, 3]

    image = canvas(3, 6)
    gradient = jax.grad(loss)(params.vision)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_the_cached_form_in_chunks_has_the_bits_of_score():
    config, params, image = tiny_config(), tiny_params(), canvas(5, 7)
    rows = encode_images(params, config, [image])
    ids = np.asarray([7, 8, 9, *[502] * len(rows), 10, 11], np.int32)
    whole = np.asarray(di.score(params, config, ids, rows))
    place = np.maximum(np.cumsum(ids == 502) - 1, 0)
    state, found = di.init_state(config, di.RuntimeConfig(max_seqs=1, max_len=64)), []
    for start, stop in ((0, 5), (5, 13), (13, len(ids))):
        position = np.arange(start, stop)
        plan = di.make_plan(
            config,
            ids[start:stop],
            position,
            np.ones(stop - start, int),
            length=16,
            image_rows=rows,
            image_place=place[start:stop],
        )
        state, out = di.prefill(params, config, state, plan)
        found.append(np.asarray(out.logits)[: stop - start])
    assert (np.concatenate(found) == whole).all()


def test_ops_of_the_encoder_have_its_own_tile():
    prims = insert.vision_ops(ops_for(tiny_config().execution))
    assert (prims.tile, prims.kernels, prims.is_tiled) == (patches.TILE, (), True)
