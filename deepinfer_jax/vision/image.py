"""An image file, picture or array to pixels on the planned canvas (model.md 3.13, io.md 6).

Files come from strangers: kind, bytes, sides and pixels are checked before anything is decoded.
"""

import os
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.vision.data_url import decode_data_url
from deepinfer_jax.vision.plan import ImagePlan, plan_image

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
#: Grey of the canvas beside an image that does not fill it.
CANVAS_GREY = 127
DIGEST_BYTES = 16

#: What an image may be given as: the bytes of a file, a path, a data URL, a picture, an array.
ImageSource = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How a file becomes pixels; the defaults are what the released code does.

    exif_transpose: turn the image as its EXIF orientation says.
    white_background: lay transparent pixels over white, where the default drops alpha.
    is_low: show no more than about the model's `min_pixels` ("detail": "low").
    max_bytes: limit of an encoded file.
    max_pixels: limit of width * height; memory is at most about 8 bytes a pixel.
    max_side: limit of either side in pixels.
    """

    exif_transpose: bool = False
    white_background: bool = False
    is_low: bool = False
    max_bytes: int = 32 * 2**20
    max_pixels: int = 2**26
    max_side: int = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """An image as the model takes it.

    pixels: uint8 [height, width, 3] on the canvas of the plan.
    digest: 16 bytes that tell canvases apart, for the prefix cache.
    """

    __no_type_check__: ClassVar[bool] = True

    pixels: np.ndarray = field(repr=False)
    plan: ImagePlan
    digest: bytes


def read_image(
    source: ImageSource, vision: VisionConfig, *, options: ImageOptions | None = None
) -> ImageInput:
    """Returns an image on its canvas; of an animation the first frame.

    Args:
        source: bytes of a PNG, JPEG, GIF, WebP or BMP file; its path; a "data:" URL; a
            `PIL.Image.Image`; or uint8 [h, w], [h, w, 3] or [h, w, 4].
        vision: sizes of the model's image encoder.
        options: None: `ImageOptions()`.

    Raises:
        InputError: no image, a broken one, or one beyond the limits.
        ConfigError: Pillow is not installed.
    """
    options = options or ImageOptions()
    if isinstance(source, ImageInput):
        return _checked_canvas(source, vision)
    picture = _picture(source, options)
    plan = plan_image(picture.width, picture.height, vision, is_low=options.is_low)
    pixels = np.asarray(_on_canvas(picture, plan), dtype=np.uint8)
    size = f"{plan.width}x{plan.height}:".encode()
    digest = sha256(size + pixels.tobytes()).digest()[:DIGEST_BYTES]
    return ImageInput(pixels=pixels, plan=plan, digest=digest)


def _checked_canvas(image: ImageInput, vision: VisionConfig) -> ImageInput:
    """Returns an image that was read before, if it was read for such a model."""
    patch, ratio = vision.patch_size, vision.downsample_ratio
    plan = image.plan
    grid = (plan.height // patch, plan.width // patch)
    cells = (-(-grid[0] // ratio), -(-grid[1] // ratio))
    if (
        (plan.patch_rows, plan.patch_columns) != grid
        or (plan.cell_rows, plan.cell_columns) != cells
        or image.pixels.shape != (grid[0] * patch, grid[1] * patch, 3)
    ):
        raise InputError(
            f"an image must be read for the model that sees it: this one has {image.pixels.shape} "
            f"pixels in {plan.patch_rows} x {plan.patch_columns} patches, the model's patches have "
            f"{patch} pixels a side. Read it again with this model's config.vision"
        )
    return image


def import_pillow() -> Any:
    """Returns the module `PIL.Image`.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "images need Pillow, which is not installed: pip install 'deepinfer-jax[vision]'"
        ) from error
    return Image


def _picture(source: ImageSource, options: ImageOptions) -> "Image":
    """Returns an RGB picture of a source."""
    pillow = import_pillow()
    if isinstance(source, np.ndarray):
        if (
            source.dtype != np.uint8
            or source.ndim not in (2, 3)
            or 0 in source.shape
            or (source.ndim == 3 and source.shape[2] not in (3, 4))
        ):
            raise InputError(
                "an image array must be uint8 of shape [h, w], [h, w, 3] or [h, w, 4], got "
                f"{source.dtype} {list(source.shape)}: convert it"
            )
        _check_size(source.shape[1], source.shape[0], options)
        return _rgb(pillow.fromarray(np.ascontiguousarray(source)), options)
    if isinstance(source, pillow.Image):
        _check_size(source.width, source.height, options)
        return _decoded(lambda: source.copy(), options)
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = decode_data_url(source, max_bytes=options.max_bytes)
    if isinstance(source, str | os.PathLike):
        source = _file_bytes(Path(source), options)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise InputError(
            "an image must be the bytes of a file, a path, a data URL, a PIL image or a uint8 "
            f"array, got {type(source).__name__}"
        )
    data = bytes(source)
    _check_bytes(len(data), options)
    _check_webp(data, options)
    return _decoded(lambda: _open(pillow, data, options), options)


def _file_bytes(path: Path, options: ImageOptions) -> bytes:
    if not path.is_file():
        raise InputError(f"an image path must name a file, and {str(path)!r} is none")
    _check_bytes(path.stat().st_size, options)
    return path.read_bytes()


def _open(pillow: Any, data: bytes, options: ImageOptions) -> "Image":
    """Returns the first frame of a file, decoded; its size is checked after the header."""
    try:
        picture = pillow.open(BytesIO(data), formats=FORMATS)
    except pillow.UnidentifiedImageError as error:
        raise InputError(
            f"an image must be a {', '.join(FORMATS)} file, and these {len(data)} bytes begin with "
            f"{data[:8]!r}: they are of another kind, or their header is broken"
        ) from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _too_large(str(error), options) from error
    _check_size(picture.width, picture.height, options)
    picture.load()
    return picture


def _decoded(read: Any, options: ImageOptions) -> "Image":
    """Returns the RGB picture that `read` opens.

    Decoders of hostile bytes raise nearly anything; all of it means that the image is broken.
    """
    try:
        picture = read()
        # Only alpha-aware conversions may see it: others warn, and the rule is to drop it.
        if options.exif_transpose:
            from PIL import ImageOps

            picture = ImageOps.exif_transpose(picture)
        return _rgb(picture, options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the image is broken or cut short: {type(error).__name__}: {error}. Save it again, "
            "for example as PNG"
        ) from error


def _rgb(picture: "Image", options: ImageOptions) -> "Image":
    if picture.mode in ("F", "I"):
        raise InputError(
            f"an image must have 8 or 16 bits a channel, got Pillow mode {picture.mode!r}, whose "
            "range is unknown: scale it to 0..255 and convert it to uint8"
        )
    if picture.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255, which turns nearly every such image white.
        high = (np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8)
        return import_pillow().fromarray(high).convert("RGB")
    if options.white_background and picture.has_transparency_data:
        over = picture.convert("RGBA")
        white = import_pillow().new("RGBA", over.size, (255, 255, 255, 255))
        return import_pillow().alpha_composite(white, over).convert("RGB")
    picture.info.pop("transparency", None)  # it would make the conversion below warn
    return picture.convert("RGB")


def _on_canvas(picture: "Image", plan: ImagePlan) -> "Image":
    """Returns a picture resized to the canvas: bicubic, whole and centred unless stretched."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    size = (plan.width, plan.height)
    sides = (
        round(picture.height / picture.width * plan.width),
        round(picture.width / picture.height * plan.height),
    )
    if plan.stretch or min(sides) == 0:
        return picture.resize(size, Resampling.BICUBIC)
    grey = (CANVAS_GREY, CANVAS_GREY, CANVAS_GREY)
    return ImageOps.pad(picture, size, method=Resampling.BICUBIC, color=grey)


def _check_bytes(size: int, options: ImageOptions) -> None:
    if size == 0:
        raise InputError("an image file must have content, and this one is empty")
    if size > options.max_bytes:
        raise InputError(
            f"an image file must have at most {options.max_bytes} bytes, got {size}: make it "
            "smaller, or raise ImageOptions.max_bytes"
        )


def _check_size(width: int, height: int, options: ImageOptions) -> None:
    if width < 1 or height < 1:
        raise InputError(f"an image must have at least 1 x 1 pixels, got {width} x {height}")
    if width * height > options.max_pixels or max(width, height) > options.max_side:
        raise _too_large(f"it has {width} x {height}", options)


def _too_large(what: str, options: ImageOptions) -> InputError:
    return InputError(
        f"an image must have at most {options.max_pixels} pixels and {options.max_side} a side: "
        f"{what}. Make it smaller, or raise ImageOptions.max_pixels"
    )


def _check_webp(data: bytes, options: ImageOptions) -> None:
    """Checks the size of a WebP file, for which Pillow allocates canvases on opening."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return

    def number(start: int, size: int) -> int:
        return int.from_bytes(data[start : start + size], "little")

    kind = data[12:16]
    if kind == b"VP8X":
        _check_size(number(24, 3) + 1, number(27, 3) + 1, options)
    elif kind == b"VP8L":
        bits = number(21, 4)
        _check_size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, options)
    elif kind == b"VP8 ":
        _check_size(number(26, 2) & 0x3FFF, number(28, 2) & 0x3FFF, options)
