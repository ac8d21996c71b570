"""Rows of images on the host side: whole images in steps, the right rows, nothing lost."""

import random
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cache.keys import ImageSpan
from deepinfer_jax.engine import engine as module
from deepinfer_jax.engine.images import ImagePool, cuts_beside_images, pool_bytes, pool_rows
from deepinfer_jax.engine.layout import unpack
from deepinfer_jax.engine.prompt import (
    PromptImage,
    pack_image,
    placed_images,
    unpack_image,
    with_image_tokens,
)
from deepinfer_jax.engine.sizes import engine_capacity, plan_layouts
from deepinfer_jax.errors import CacheError
from deepinfer_jax.vision.image import ImageInput
from deepinfer_jax.vision.plan import plan_image
from tests.deepinfer_jax.engine.fake_device import FakeDevice
from tests.deepinfer_jax.engine.small_engine import small_engines
from tests.golden.network import tiny_config

pytestmark = pytest.mark.accept(12)
IMAGE = tiny_config().image_token_id
DRAW = np.random.default_rng(4)
PICTURES = [
    DRAW.integers(0, 256, (*size, 3), dtype=np.uint8)
    for size in ((16, 16), (28, 20), (16, 20), (30, 62), (12, 40))
]


def at(start: int, length: int, digest: bytes = b"one") -> PromptImage:
    """Returns an image that was not read."""
    span = ImageSpan(start=start, length=length, digest=digest)
    plan = plan_image(12, 12, tiny_config().vision)
    pixels = np.zeros((plan.height, plan.width, 3), np.uint8)
    return PromptImage(span, ImageInput(pixels=pixels, plan=plan, digest=digest))


class SeeingDevice(FakeDevice):
    """Checks that rows of images take what was encoded for them, and all of an image in a step."""

    def dispatch(self, plan, now=0.0):
        for action, arguments in plan.before:
            if action == "encode":
                self.encode(*arguments)
        plan.before = [one for one in plan.before if one[0] != "encode"]
        parts = unpack(plan.layout, plan.vector)
        for chunk in plan.chunks:
            for one in chunk.sequence.images:
                if one.stop <= chunk.start or one.start >= chunk.stop:
                    continue
                assert one.stop <= chunk.stop, "an image is cut"
                for position in range(max(one.start, chunk.start), one.stop):
                    row = chunk.row + position - chunk.start
                    assert parts.ids[row] == IMAGE
                    pixels, number = self.images[parts.image[row]]
                    assert number == position - one.start
                    assert (pixels == one.image.pixels).all()
        return super().dispatch(plan, now)


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_get_their_own_rows(monkeypatch, seed):
    rng = random.Random(seed)
    make = small_engines(monkeypatch, slots=3, blocks=70, max_len=136, prefix_restore="halo")
    monkeypatch.setattr(module, "engine_device", SeeingDevice)
    engine = make()
    rows = 24 if seed % 2 else 60
    engine.scheduler.images = ImagePool(rows)
    engine.device.images = [None] * rows
    for _ in range(10):
        ids, images = [], []
        for _ in range(rng.randint(1, 3)):
            ids += [rng.randint(3, 400) for _ in range(rng.choice((0, 0, 1, 7, 20)))]
            if rng.random() < 0.8:
                ids.append(IMAGE)
                images.append(rng.choice(PICTURES))
        ids = ids or [5]
        params = di.SamplingParams(max_tokens=rng.randint(1, 4), seed=0)
        engine.submit(ids, params, images=images)
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.drain()
    engine.scheduler.check()
    assert engine.counters["finished_length"] + engine.counters["finished_stop"] == 10


def test_the_pool_keeps_what_a_step_needs_and_evicts_the_oldest():
    pool = ImagePool(10)
    first = pool.place(at(0, 4, b"a"))
    assert first is not None
    assert first[1]
    assert pool.place(at(9, 4, b"a"))[1] is False  # the same image at another place
    assert pool.place(at(0, 6, b"b"))[1] is True
    assert pool.place(at(0, 1, b"c")) is None  # both are needed now
    pool.begin_step()
    assert pool.place(at(0, 4, b"a"))[1] is False
    rows, is_new = pool.place(at(0, 2, b"c"))  # takes the place of b
    assert is_new
    assert not set(rows.tolist()) & set(first[0].tolist())
    pool.check()
    pool.begin_step()
    assert pool.place(at(0, 10, b"d"))[1] is True
    pool.check()
    pool._free.append(3)
    with pytest.raises(CacheError, match="free or used once"):
        pool.check()
    pool.clear()
    pool.check()


def test_cuts_move_in_front_of_images():
    images = (at(10, 20), at(30, 6), at(70, 9))
    assert cuts_beside_images((16, 32, 48, 64, 80), images, 16) == (48, 64, 80)
    assert cuts_beside_images((10, 30, 36, 70, 79), images, 16) == (10, 30, 36, 70, 79)
    assert cuts_beside_images((72,), images, 16) == (64,)
    assert cuts_beside_images((), images, 16) == ()


def test_a_blind_model_has_no_part_for_images():
    config, runtime = tiny_config(), di.RuntimeConfig()
    blind = replace(config, vision=None)
    assert pool_rows(blind, runtime) == pool_bytes(blind, 0) == 0
    seeing, plain = (
        plan_layouts(one, runtime, engine_capacity(one, runtime, 0), 0)[0]
        for one in (config, blind)
    )
    assert "image" in seeing.places
    assert "image" not in plain.places
    assert unpack(plain, np.zeros(plain.size, np.int32)).image is None


def test_image_tokens_of_a_text_go_in_front():
    config = tiny_config()
    bos = config.bos_token_id
    assert with_image_tokens(config, [bos, 7], 2) == [bos, IMAGE, IMAGE, 7]
    assert with_image_tokens(config, [7, 8], 1) == [IMAGE, 7, 8]
    assert with_image_tokens(config, [7, IMAGE], 1) == [7, IMAGE]
    assert with_image_tokens(config, [bos, 7], 0) == [bos, 7]


def test_images_survive_as_plain_values():
    ids, (one,) = placed_images(tiny_config(), [5, IMAGE, 6], [PICTURES[1]])
    assert ids == [5, *[IMAGE] * 11, 6]
    again = unpack_image(pack_image(one))
    assert (again.span, again.image.plan, again.image.digest) == (
        one.span,
        one.image.plan,
        one.image.digest,
    )
    assert (again.image.pixels == one.image.pixels).all()
