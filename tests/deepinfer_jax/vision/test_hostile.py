"""Hostile files give a specific error or the right image, within bounded memory and time."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_jax.errors import InputError
from deepinfer_jax.vision.image import ImageOptions, read_image
from deepinfer_jax.vision.plan import plan_image

from .hostile import encode, hostile_files, png_header
from .test_plan import RELEASED

pytestmark = pytest.mark.accept(12)
VISION = replace(RELEASED, max_image_tokens=24, min_pixels=4096)


def read(data):
    """Returns (image, "") or (None, the error)."""
    try:
        return read_image(data, VISION), ""
    except InputError as error:
        return None, str(error)


def outcome(file):
    """Checks what comes of a file; returns "image" or "error"."""
    found, error = read(file.data)
    if found is None:
        assert file.error is not None, f"{file.name}: {error}"
        assert re.search(file.error, error), f"{file.name}: {error}"
        return "error"
    assert file.size is not None, f"{file.name}: was read"
    if file.size != (-1, -1):  # a flipped bit may change it
        assert found.plan == plan_image(*file.size, VISION), file.name
    assert found.pixels.shape == (found.plan.height, found.plan.width, 3)
    assert found.plan.num_tokens <= VISION.max_image_tokens
    return "image"


@pytest.mark.parametrize("file", hostile_files(40), ids=lambda file: file.name)
def test_hostile_file(file):
    outcome(file)


@pytest.mark.slow
def test_two_hundred_files_in_bounded_memory_and_time():
    code = (
        "import resource\n"
        "from tests.deepinfer_jax.vision import test_hostile as t\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (120, 120))\n"
        "found = [t.outcome(f) for f in t.hostile_files(200, seed=1)]\n"
        "print(len(found), found.count('image'), found.count('error'))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts, memory = done.stdout.strip().splitlines()
    total, images, errors = map(int, counts.split())
    assert (total, images + errors) == (200, 200)
    assert images >= 50
    assert errors >= 80
    assert int(memory) < 1 << 20  # kB


@pytest.mark.slow
def test_largest_image_is_decoded_and_one_pixel_more_is_not():
    from PIL import Image

    found = read_image(encode(Image.new("RGB", (8192, 8192)), "PNG"), RELEASED)
    assert found.plan.num_tokens == 994
    with pytest.raises(InputError, match="8193 x 8192"):
        read_image(png_header(8193, 8192), RELEASED)


def test_limits_are_the_callers():
    data = png_header(100, 100)
    for options, complaint in (
        (ImageOptions(max_bytes=50), "at most 50 bytes"),
        (ImageOptions(max_pixels=9999), "at most 9999 pixels"),
        (ImageOptions(max_side=99), "99 a side"),
    ):
        with pytest.raises(InputError, match=complaint):
            read_image(data, RELEASED, options=options)
