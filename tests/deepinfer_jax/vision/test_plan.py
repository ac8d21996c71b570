"""Planned canvases against the released planner (model.md 3.13, 9.11; io.md 6)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.vision.plan import plan_image, token_kinds

RELEASED = VisionConfig(
    num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816,
    patch_size=14, rope_theta=10000.0, downsample_ratio=3, max_image_tokens=1024,
    min_pixels=295_936, max_wh_ratio=None,
)  # fmt: skip
pytestmark = pytest.mark.accept(12)


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
