"""Image tokens to rows: by id, one an image."""

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_jax.config.hf import read_config
from deepinfer_jax.errors import InputError
from deepinfer_jax.vision.image import read_image
from deepinfer_jax.vision.prompt import expand_images


@pytest.fixture(scope="module")
def config(fixtures_dir):
    return read_config(fixtures_dir / "tiny_v41")


def test_tokens_become_rows_and_spans(config):
    token = config.image_token_id
    sizes = ((20, 16), (36, 36))
    images = [read_image(np.zeros((h, w, 3), np.uint8), config.vision) for w, h in sizes]
    rows = [image.plan.num_tokens for image in images]
    ids, spans = expand_images([0, token, 7, token], images, config)
    assert ids == [0] + [token] * rows[0] + [7] + [token] * rows[1]
    assert [(s.start, s.length) for s in spans] == [(1, rows[0]), (rows[0] + 2, rows[1])]
    assert [s.digest for s in spans] == [image.digest for image in images]
    assert expand_images([1, 2], (), config) == ([1, 2], ())


def test_counts_must_agree(config):
    image = read_image(np.zeros((9, 9, 3), np.uint8), config.vision)
    for ids, images in (([0], [image]), ([config.image_token_id], []), ([0], [image, image])):
        with pytest.raises(InputError, match="one image token"):
            expand_images(ids, images, config)


def test_blind_models_take_none(config):
    image = read_image(np.zeros((9, 9, 3), np.uint8), config.vision)
    blind = replace(config, vision=None)
    assert expand_images([config.image_token_id], (), blind) == ([config.image_token_id], ())
    with pytest.raises(InputError, match="no image encoder"):
        expand_images([config.image_token_id], [image], blind)
