"""From a canvas of pixels to patches, and the sizes of encoding programs (model.md 3.13).

An image is encoded alone, in a program whose size is a function of the image: nothing that happens
to be encoded beside it can change a bit.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig, VisionConfig
from deepinfer_jax.errors import InputError

#: Patches of a row tile of the encoder. Part of the arithmetic, as `ExecutionConfig.row_tile` is.
TILE = 64
#: Patches of the smallest program, unless no image has as many; the next has half as many more.
LEAST_PATCHES = 512


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of an image: rows and columns; ratio: patches along a side of a cell.

    A cell is what one token of the prompt stands for. Cells at the right and lower edge may lie
    partly outside.
    """

    rows: int
    columns: int
    ratio: int

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.rows * self.columns

    @property
    def cell_rows(self) -> int:
        """Rows of cells."""
        return -(-self.rows // self.ratio)

    @property
    def cell_columns(self) -> int:
        """Columns of cells."""
        return -(-self.columns // self.ratio)

    @property
    def tokens(self) -> int:
        """Prompt tokens: start, every row of cells with a newline behind it, end."""
        return self.cell_rows * (self.cell_columns + 1) + 2


@dataclass(frozen=True, slots=True)
class EncoderSize:
    """Capacities of an encoding program: prompt tokens, and the patches those can have."""

    tokens: int
    patches: int


def vision_of(config: ModelConfig) -> VisionConfig:
    """Returns the config of the image encoder.

    Raises:
        InputError: the model has none.
    """
    if config.vision is None:
        raise InputError(
            "images need an image encoder, and this model has none (its config.json has no "
            "vision_config): remove the images"
        )
    return config.vision


def encoder_sizes(config: ModelConfig) -> tuple[EncoderSize, ...]:
    """Returns the sizes of all encoding programs of a model, ascending; none without an encoder.

    From the patches of the smallest image to those of the largest: one row of cells, as many as
    tokens beside start, newline and end.
    """
    vision = config.vision
    if vision is None:
        return ()
    most = _in_tiles(vision.downsample_ratio**2 * (vision.max_image_tokens - 3))
    patches = _in_tiles(max(vision.min_pixels // vision.patch_size**2, LEAST_PATCHES))
    found = []
    while patches < most:
        found.append(patches)
        patches = _in_tiles(3 * patches // 2)
    return tuple(EncoderSize(vision.max_image_tokens, count) for count in (*found, most))


def _in_tiles(patches: int) -> int:
    """Returns whole tiles of patches, two at least.

    Because the loop over one is inlined and rounds differently (determinism.md 12).
    """
    return max(2, -(-patches // TILE)) * TILE


def size_for(config: ModelConfig, grid: Grid) -> EncoderSize:
    """Returns the smallest program that an image fits.

    Raises:
        InputError: it has more tokens than the model allows.
    """
    found = [size for size in encoder_sizes(config) if size.patches >= grid.patches]
    if grid.tokens > vision_of(config).max_image_tokens:
        raise InputError(
            f"an image may have at most max_image_tokens={vision_of(config).max_image_tokens} "
            f"tokens, {grid.rows} x {grid.columns} patches have {grid.tokens}: plan a smaller one"
        )
    return found[0]


def grid_of(config: ModelConfig, pixels: Any) -> Grid:
    """Returns the patch grid of a canvas.

    Args:
        config: of the model.
        pixels: uint8 [height, width, 3], both sides multiples of the patch size.

    Raises:
        InputError: the model has no image encoder, or the canvas is not of that form.
    """
    vision = vision_of(config)
    side = vision.patch_size
    fits = pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8
    if not fits or 0 in pixels.shape or pixels.shape[0] % side or pixels.shape[1] % side:
        raise InputError(
            f"a canvas is uint8 [height, width, 3] with sides in multiples of {side} pixels, got "
            f"{pixels.dtype} {tuple(pixels.shape)}: `deepinfer_jax.vision` makes one from an image"
        )
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    return Grid(rows, columns, vision.downsample_ratio)


def patch_rows(config: ModelConfig, pixels: Any) -> Any:
    """Returns the patches of a canvas in raster order, each as (channel, row, column).

    Args:
        config: of the model.
        pixels: as in `grid_of`; a NumPy array stays one.

    Returns:
        uint8 [patches, 3 * patch_size^2].

    Raises:
        InputError: as `grid_of`.
    """
    grid, side = grid_of(config, pixels), vision_of(config).patch_size
    split = pixels.reshape(grid.rows, side, grid.columns, side, 3)
    return split.transpose(0, 2, 4, 1, 3).reshape(grid.patches, 3 * side * side)


def padded_patches(config: ModelConfig, pixels: np.ndarray, size: EncoderSize) -> np.ndarray:
    """Returns `patch_rows` with zeros behind them, as many rows as the program takes."""
    found = patch_rows(config, pixels)
    return np.pad(found, ((0, size.patches - found.shape[0]), (0, 0)))


def pixel_values(patches: Array) -> Float[Array, "..."]:
    """Returns (x/255 - 0.5)/0.5 of uint8 values, rounded to BF16 in both arithmetics, as float32.

    From a table: XLA turns a division by a constant into a product, with other bits.
    """
    scaled = np.arange(256, dtype=np.float32) / np.float32(255)
    values = (scaled - np.float32(0.5)) / np.float32(0.5)
    return jnp.asarray(values.astype(jnp.bfloat16).astype(np.float32))[patches.astype(jnp.int32)]
