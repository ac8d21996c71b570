"""Images to canvases: the released preprocessing, its options, and what is no image."""

import base64
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from deepinfer_jax.errors import InputError
from deepinfer_jax.model.vision.patches import patch_rows, pixel_values
from deepinfer_jax.vision.data_url import decode_data_url, encode_data_url
from deepinfer_jax.vision.image import CANVAS_GREY, ImageOptions, read_image
from deepinfer_jax.vision.plan import token_kinds

from .hostile import encode
from .test_plan import RELEASED

SMALL = replace(RELEASED, patch_size=4, max_image_tokens=24, min_pixels=256)
pytestmark = pytest.mark.accept(12)


@pytest.fixture(scope="module")
def golden(fixtures_dir):
    return load_file(fixtures_dir / "modules" / "vision.safetensors")


def values(image, side):
    """Patches as the encoder gets them: (channel, row, column), normalised, BF16."""
    rows, columns = image.plan.patch_rows, image.plan.patch_columns
    split = image.pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    return np.asarray(pixel_values(jnp.asarray(split.reshape(rows * columns, -1))))


@pytest.mark.parametrize("case", "abcde")
def test_patches_grid_and_kinds_are_exact(golden, case):
    image = read_image(golden[f"img_{case}.png_bytes"].tobytes(), SMALL)
    plan = image.plan
    grid = [plan.patch_rows, plan.patch_columns, plan.cell_rows, plan.cell_columns]
    assert grid == golden[f"img_{case}.grid"].tolist()
    np.testing.assert_array_equal(token_kinds(plan), golden[f"img_{case}.types"])
    expected = golden[f"img_{case}.patches"].astype(np.float32)
    np.testing.assert_array_equal(values(image, 4), expected)


def test_released_size_is_exact(golden):
    image = read_image(golden["real.png_bytes"].tobytes(), RELEASED)
    plan = image.plan
    grid = [plan.patch_rows, plan.patch_columns, plan.cell_rows, plan.cell_columns]
    assert grid == golden["real.grid"].tolist()
    expected = golden["real.patches_every_97th"].astype(np.float32)
    np.testing.assert_array_equal(values(image, 14)[::97], expected)


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def test_every_source_is_the_same_image(pixels, tmp_path):
    data = encode(pixels, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    sources = [
        data, bytearray(data), path, str(path), encode_data_url(data), pixels,
        Image.fromarray(pixels), np.dstack([pixels, np.zeros_like(pixels[:, :, :1])]),
        encode(pixels, "BMP"), read_image(data, SMALL),
    ]  # fmt: skip
    found = [read_image(source, SMALL) for source in sources]
    assert len({image.digest for image in found}) == 1
    assert all((image.pixels == found[0].pixels).all() for image in found)
    other = read_image(255 - pixels, SMALL)
    assert other.digest != found[0].digest
    assert other.plan == found[0].plan


def test_alpha_is_dropped_or_laid_over_white(pixels):
    clear = np.dstack([pixels, np.zeros_like(pixels[:, :, :1])])
    plain = read_image(pixels, SMALL).pixels
    assert (read_image(clear, SMALL).pixels == plain).all()
    white = read_image(clear, SMALL, options=ImageOptions(white_background=True)).pixels
    assert (white[5:-5] == 255).all()
    assert (read_image(pixels, SMALL, options=ImageOptions(white_background=True)).pixels
            == plain).all()  # fmt: skip


def test_exif_turns_only_when_asked(pixels):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    data = encode(Image.fromarray(pixels), "PNG", exif=exif)
    assert read_image(data, SMALL).plan == read_image(pixels, SMALL).plan
    turned = read_image(data, SMALL, options=ImageOptions(exif_transpose=True))
    upright = read_image(np.rot90(pixels, -1), SMALL)
    assert (turned.plan, turned.digest) == (upright.plan, upright.digest)


def test_sixteen_bits_keep_their_brightness():
    ramp = np.linspace(0, 65_535, 64, dtype=np.uint16)[None].repeat(64, 0)
    deep = read_image(encode(ramp, "PNG"), SMALL).pixels
    flat = read_image((ramp >> 8).astype(np.uint8), SMALL).pixels
    np.testing.assert_array_equal(deep, flat)
    assert len(np.unique(deep)) > 20


def test_grey_and_first_frame(pixels):
    grey = np.asarray(Image.fromarray(pixels).convert("L"))
    assert (read_image(grey, SMALL).pixels == read_image(encode(grey, "PNG"), SMALL).pixels).all()
    frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
    animated = encode(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert read_image(animated, SMALL).digest == read_image(pixels, SMALL).digest


def test_canvas_is_grey_beside_the_image():
    black = np.zeros((64, 61, 3), np.uint8)
    found = read_image(black, replace(SMALL, max_image_tokens=1024)).pixels
    assert found.shape == (64, 64, 3)
    assert (found[:, 0] == CANVAS_GREY).all()
    assert (found[:, 5:-5] == 0).all()


def test_width_clamp_stretches():
    wide = np.zeros((4, 400, 3), np.uint8)
    found = read_image(wide, replace(SMALL, max_wh_ratio=2.0))
    assert found.plan.stretch
    assert (found.pixels == 0).all()


def test_an_image_is_checked_against_the_model(pixels):
    image = read_image(pixels, SMALL)
    with pytest.raises(InputError, match="read for the model that sees it"):
        read_image(image, replace(SMALL, patch_size=8))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (5, "got int"),
        (np.zeros((4, 4, 3), np.float32), r"uint8 of shape .*got float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 2), np.uint8), r"\[4, 4, 2\]"),
        (np.zeros((0, 4), np.uint8), r"\[0, 4\]"),
        ("/no/such/file.png", "must name a file"),
        ("data:image/png;base64,@@@", "base64 text"),
        ("data:image/png,abc", "must begin with"),
        (Image.new("F", (4, 4)), "mode 'F'"),
        (Image.new("I", (4, 4)), "mode 'I'"),
    ],
)
def test_what_is_no_image(source, complaint):
    with pytest.raises(InputError, match=complaint):
        read_image(source, SMALL)


def test_data_urls():
    text = base64.encodebytes(bytes(300)).decode()
    assert decode_data_url("data:;base64," + text, max_bytes=300) == bytes(300)
    assert decode_data_url("data:image/png;x=y;BASE64,", max_bytes=3) == b""
    with pytest.raises(InputError, match="at most 100 bytes"):
        decode_data_url("data:;base64," + text, max_bytes=100)
    with pytest.raises(InputError, match="base64 text"):
        decode_data_url("data:;base64,aGk", max_bytes=100)


def test_patches_of_the_model_are_those_pixels(pixels, fixtures_dir):
    from deepinfer_jax.config.hf import read_config

    config = read_config(fixtures_dir / "tiny_v41")
    image = read_image(pixels, config.vision)
    rows = patch_rows(config, image.pixels)
    np.testing.assert_array_equal(np.asarray(pixel_values(jnp.asarray(rows))), values(image, 4))
