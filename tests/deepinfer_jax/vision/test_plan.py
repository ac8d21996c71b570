"""Planned canvases against the released planner (model.md 3.13, 9.11; io.md 6)."""

import io
import json
import math
from dataclasses import replace

import deepseek_recipe
import numpy as np
import pytest
from PIL import Image

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.vision.plan import plan_image, token_kinds

RELEASED = VisionConfig(
    num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816,
    patch_size=14, rope_theta=10000.0, downsample_ratio=3, max_image_tokens=1024,
    min_pixels=295_936, max_wh_ratio=None,
)  # fmt: skip
pytestmark = [pytest.mark.accept(12), pytest.mark.accept(11)]


def test_every_fixture_plan_is_exact(fixtures_dir):
    plans = json.loads((fixtures_dir / "modules" / "vision_plan.json").read_text())
    assert len(plans) == 40
    for name, expected in plans.items():
        size, _, ratio = name.partition("@max_wh_ratio=")
        width, height = map(int, size.split("x"))
        vision = replace(RELEASED, max_wh_ratio=float(ratio) if ratio else None)
        plan = plan_image(width, height, vision)
        found = {
            "n_llm_h": plan.cell_rows,
            "n_llm_w": plan.cell_columns,
            "best_height": plan.height,
            "best_width": plan.width,
        }
        assert found == expected, name
        assert (plan.patch_rows, plan.patch_columns) == (plan.height // 14, plan.width // 14)


@pytest.mark.parametrize(
    ("size", "canvas", "tokens"),
    [
        ((1, 1), (546, 546), 184), ((448, 448), (546, 546), 184), ((640, 480), (644, 490), 206),
        ((1024, 768), (1036, 770), 496), ((1920, 1080), (1708, 966), 968),
        ((4000, 3000), (1512, 1134), 1001), ((6000, 6000), (1302, 1302), 994),
        ((3000, 100), (3010, 112), 221), ((100, 3000), (112, 3010), 290),
    ],
)  # fmt: skip
def test_published_examples(size, canvas, tokens):
    plan = plan_image(*size, RELEASED)
    assert ((plan.width, plan.height), plan.num_tokens) == (canvas, tokens)


def reference(width, height):
    """The published rule for patches of 14, cells of 3 x 3, 1024 tokens: (width, height, tokens).

    In whole cells and from the text of model.md 3.13 alone; no width clamp.
    """
    if width * height < 295_936:
        grown = (295_936 / (width * height)) ** 0.5
        width, height = int(width * grown) or 1, int(height * grown) or 1
    canvas = [side + -side % 14 for side in (width, height)]

    def tokens():
        across, down = (-(-side // 42) for side in canvas)
        return down * (across + 1) + 2

    if tokens() > 1024:
        slope = height / width
        across = (1022 / slope + 0.25) ** 0.5 - 0.5
        if across < 1:
            canvas = [42, 511 * 42]
        elif across * slope < 1:
            canvas = [1021 * 42, 42]
        else:
            shrink = min(int(across) * 42 / width, int(across * slope) * 42 / height)
            # The rule has no case for a side of nothing; it keeps one patch (model.md 9.11).
            canvas = [max(int(side * shrink / 14), 1) * 14 for side in (width, height)]
    return *canvas, tokens()


def test_a_thousand_random_sizes_follow_the_reference_formula():
    draw, kinds = np.random.default_rng(4), {"grown": 0, "kept": 0, "shrunk": 0, "thin": 0}
    for index in range(1000):
        # To 60,000 pixels a side; every fourth about as large as the limits.
        low, high = (0, 11) if index % 4 else (6, 8)
        width, height = (int(x) for x in np.exp(draw.uniform(low, high, 2)))
        plan = plan_image(width, height, RELEASED)
        found = plan.width, plan.height, plan.num_tokens
        assert found == reference(width, height), (width, height)
        assert not plan.stretch
        grown = plan.width * plan.height > width * height
        name = "thin" if min(plan.width, plan.height) <= 42 else "grown" if grown else "shrunk"
        kinds["kept" if math.isclose(plan.width, width, abs_tol=13) else name] += 1
    assert min(kinds.values()) > 30, kinds


@pytest.mark.slow
def test_random_sizes_are_those_of_the_recipe():
    """deepseek-recipe's own planner; it rounds thin images otherwise, so there are none."""
    preprocessor = deepseek_recipe.OpenCvImagePreprocessor()
    options = deepseek_recipe.PreprocessOptions("high", 8192, 4096)
    draw, compared = np.random.default_rng(5), 0
    while compared < 120:
        width, height = (int(x) for x in np.exp(draw.uniform(3, 7.2, 2)))
        if max(width, height) > 4 * min(width, height):
            continue
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, "PNG")
        theirs = preprocessor.preprocess(file.getvalue(), options)
        ours = plan_image(width, height, RELEASED)
        assert (ours.width, ours.height) == (theirs.width, theirs.height), (width, height)
        compared += 1


def test_low_detail_has_about_min_pixels():
    plan = plan_image(1920, 1080, RELEASED, is_low=True)
    assert ((plan.width, plan.height), plan.num_tokens) == ((728, 420), 192)


def test_any_size_fits_the_limit():
    draw = np.random.default_rng(0)
    for _ in range(1000):
        width, height = (int(x) for x in np.exp(draw.uniform(0, 11, 2)))
        vision = replace(
            RELEASED,
            max_image_tokens=int(draw.choice([5, 16, 64, 1024])),
            min_pixels=int(draw.choice([1, 42 * 42])),
            max_wh_ratio=draw.choice([None, 0.5, 20.0]),
        )
        plan = plan_image(width, height, vision)
        kinds = token_kinds(plan)
        assert 4 <= plan.num_tokens == len(kinds)
        assert min(plan.width, plan.height) >= 14
        assert plan.num_tokens <= vision.max_image_tokens
        assert [int((kinds == kind).sum()) for kind in range(4)] == [
            1, plan.cell_rows * plan.cell_columns, plan.cell_rows, 1,
        ]  # fmt: skip


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 1)])
def test_no_pixels_are_no_image(size):
    with pytest.raises(InputError, match="at least 1 x 1"):
        plan_image(*size, RELEASED)
