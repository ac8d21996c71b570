"""Images of a prompt in their places, as a request brings them."""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepinfer_jax.cache.keys import ImageSpan
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.vision.image import ImageInput, read_image
from deepinfer_jax.vision.plan import ImagePlan
from deepinfer_jax.vision.prompt import expand_images, require_vision


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt and the rows that it takes there."""

    span: ImageSpan
    image: ImageInput

    @property
    def start(self) -> int:
        """First row."""
        return self.span.start

    @property
    def stop(self) -> int:
        """Row behind the last."""
        return self.span.start + self.span.length


def read_images(config: ModelConfig, sources: Items[Any]) -> tuple[ImageInput, ...]:
    """Returns images as a model takes them; sources: of `vision.image.read_image`.

    Raises:
        InputError: an image that cannot be used, or a model that sees nothing.
        ConfigError: Pillow is not installed.
    """
    if not sources:
        return ()
    require_vision(config)
    assert config.vision is not None
    return tuple(read_image(source, config.vision) for source in sources)


def with_image_tokens(config: ModelConfig, ids: Items[int], count: int) -> list[int]:
    """Returns the ids of a text with `count` image tokens in front, unless it has some.

    Behind the token that begins a text, where there is one.
    """
    found, token = list(ids), config.image_token_id
    if not count or token is None or token in found:
        return found
    first = int(found[:1] == [config.bos_token_id])
    return found[:first] + [token] * count + found[first:]


def placed_images(
    config: ModelConfig, ids: Items[int], sources: Items[Any]
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Returns (ids with a row for every token of every image, the images in their places).

    Args:
        config: of the model.
        ids: of the prompt, with one image token for each image.
        sources: images, as `vision.image.read_image` takes them.

    Raises:
        InputError: an image that cannot be used, a model that sees nothing, or another number of
            image tokens.
        ConfigError: Pillow is not installed.
    """
    if not sources:
        return list(ids), ()  # what holds image tokens all the same is refused by `host_ids`
    images = read_images(config, sources)
    expanded, spans = expand_images(ids, images, config)
    return expanded, tuple(map(PromptImage, spans, images))


def pack_image(image: PromptImage) -> dict[str, Any]:
    """Returns an image as plain values, for JSON."""
    pixels = zlib.compress(image.image.pixels.tobytes())
    return {
        "start": image.span.start,
        "plan": asdict(image.image.plan),
        "digest": image.image.digest.hex(),
        "pixels": b64encode(pixels).decode("ascii"),
    }


def unpack_image(saved: dict[str, Any]) -> PromptImage:
    """Returns the image that `pack_image` wrote."""
    plan = ImagePlan(**saved["plan"])
    data = zlib.decompress(b64decode(saved["pixels"]))
    pixels = np.frombuffer(data, np.uint8).reshape(plan.height, plan.width, 3)
    digest = bytes.fromhex(saved["digest"])
    span = ImageSpan(start=int(saved["start"]), length=plan.num_tokens, digest=digest)
    return PromptImage(span, ImageInput(pixels=pixels, plan=plan, digest=digest))
