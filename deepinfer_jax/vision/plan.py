"""How large an image is shown to the model, and how many token rows it takes (model.md 3.13)."""

import math
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.errors import InputError

START, IMAGE, NEWLINE, END = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The canvas of an image and its two grids.

    width, height: canvas in pixels, multiples of the patch size.
    stretch: fill the canvas without keeping the aspect ratio (the width clamp acted).
    patch_rows, patch_columns: patches of the vision encoder.
    cell_rows, cell_columns: squares of `downsample_ratio` patches a side, one token each.
    """

    width: int
    height: int
    stretch: bool
    patch_rows: int
    patch_columns: int
    cell_rows: int
    cell_columns: int

    @property
    def num_tokens(self) -> int:
        """Rows in the prompt: the cells, a newline after each row of them, start and end."""
        return self.cell_rows * (self.cell_columns + 1) + 2


def plan_image(width: int, height: int, vision: VisionConfig, *, is_low: bool = False) -> ImagePlan:
    """Returns the plan of an image of `width` x `height` pixels (model.md 3.13, 9.11).

    is_low: also make an image with more than `min_pixels` so small ("detail": "low", io.md 6).

    Raises:
        InputError: a side is below 1.
    """
    if width < 1 or height < 1:
        raise InputError(f"an image must have at least 1 x 1 pixels, got {width} x {height}")
    stretch = False
    if vision.max_wh_ratio is not None:
        stretch = width >= height * vision.max_wh_ratio
        if width > height * vision.max_wh_ratio:
            width = max(int(height * vision.max_wh_ratio), 1)
    if 0 < width * height < vision.min_pixels or is_low:
        factor = math.sqrt(vision.min_pixels / (width * height))
        width, height = max(int(width * factor), 1), max(int(height * factor), 1)
    patch = vision.patch_size
    plan = _on_canvas(
        math.ceil(width / patch) * patch, math.ceil(height / patch) * patch, stretch, vision
    )
    if plan.num_tokens <= vision.max_image_tokens:
        return plan
    return _on_canvas(*_within_limit(width, height, vision), stretch, vision)


def token_kinds(plan: ImagePlan) -> np.ndarray:
    """Returns what each row of an image is, int32 [num_tokens].

    0 start, 1 cell in raster order, 2 newline, 3 end.
    """
    lines = np.full((plan.cell_rows, plan.cell_columns + 1), IMAGE, np.int32)
    lines[:, -1] = NEWLINE
    return np.concatenate([[START], lines.ravel(), [END]]).astype(np.int32)


def _on_canvas(width: int, height: int, stretch: bool, vision: VisionConfig) -> ImagePlan:
    rows, columns = height // vision.patch_size, width // vision.patch_size
    return ImagePlan(
        width=width,
        height=height,
        stretch=stretch,
        patch_rows=rows,
        patch_columns=columns,
        cell_rows=math.ceil(rows / vision.downsample_ratio),
        cell_columns=math.ceil(columns / vision.downsample_ratio),
    )


def _within_limit(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Returns the largest canvas of the image's ratio whose rows fit `max_image_tokens`."""
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    rows = vision.max_image_tokens - 2
    ratio = height / width
    columns_wide = math.sqrt(rows / ratio + 0.25) - 0.5  # solves columns * ratio * (columns + 1)
    rows_high = columns_wide * ratio
    if columns_wide < 1:
        return cell, rows // 2 * cell
    if rows_high < 1:
        return (rows - 1) * cell, cell
    factor = min(
        math.floor(columns_wide) * cell / width,
        math.floor(rows_high) * cell / height,
    )
    # One side of a thin image may round down to nothing; it keeps one patch.
    fitted = (math.floor(side * factor / patch) * patch for side in (width, height))
    fitted_width, fitted_height = (max(side, patch) for side in fitted)
    return fitted_width, fitted_height
