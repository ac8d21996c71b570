"""Images in the bodies of the conversation protocols: their bytes, within one quota a request."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.errors import InputError
from deepinfer_jax.serve.errors import ApiError
from deepinfer_jax.serve.fetch import FetchLimits, fetch_image
from deepinfer_jax.vision.data_url import decode_data_url
from deepinfer_jax.vision.image import ImageInput, ImageOptions

if TYPE_CHECKING:
    import deepseek_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """What images a request may have.

    most: how many. max_bytes: of all of them, as files. seconds: for all downloads together.
    allow_urls: download what is named by URL.
    """

    most: int = 64
    max_bytes: int = 64 * 2**20
    seconds: float = 10.0
    allow_urls: bool = False


def mentions_image(body: Mapping[str, Any]) -> bool:
    """Says whether a message of a body has a part that is an image, as far as its type tells."""
    level: list[Any] = [body.get("messages"), body.get("input")]
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                kind = one.get("type")
                if isinstance(kind, str) and "image" in kind:
                    return True
                inner += [value for value in one.values() if isinstance(value, dict | list)]
            elif isinstance(one, list):
                inner += [value for value in one if isinstance(value, dict | list)]
        level = inner
    return False


def read_images(
    encoder: ChatEncoder,
    conversation: "deepseek_recipe.Conversation",
    rules: ImageRules,
    fetch: Callable[[str, FetchLimits], bytes] = fetch_image,
    gate: AbstractContextManager[Any] | None = None,
) -> tuple[ImageInput, ...]:
    """Returns the images of a conversation in the order of their tokens in the prompt.

    Args:
        encoder: of the model.
        conversation: as recipe reads the body.
        rules: what a request may have.
        fetch: downloads.
        gate: held while an image is decoded, which bounds the memory of many requests.

    Raises:
        ApiError: 400, with the message at fault: too many or too large, a URL where none is taken,
            no image, or a model that does not see.
    """
    sources = encoder.image_sources(conversation)
    if len(sources) > rules.most:
        raise ApiError(
            400, f"a request may have {rules.most} images, got {len(sources)}", param="messages"
        )
    left, end, images = rules.max_bytes, time.monotonic() + rules.seconds, []
    for source in sources:
        place = source.path.removeprefix(".")
        try:
            if encoder.config.vision is None:
                encoder.read(place, b"")  # says so
            data = _bytes_of(source, left, end, rules, fetch)
            options = ImageOptions(is_low=source.detail == "low")
            with gate or nullcontext():
                images.append(encoder.read(place, data, options))
        except InputError as error:
            text = str(error)
            text = text if text.startswith(place) else f"{place}: {text}"
            raise ApiError(400, text, param=place) from error
        left -= len(data)
    return tuple(images)


def _bytes_of(
    source: "deepseek_recipe.ImageSource",
    left: int,
    end: float,
    rules: ImageRules,
    fetch: Callable[[str, FetchLimits], bytes],
) -> bytes:
    if source.data is not None:
        return source.data
    if source.data_url is not None:
        return decode_data_url(source.data_url, max_bytes=left)
    if not rules.allow_urls:
        raise InputError(
            "an image must be a base64 data URL here: the server was started without "
            "--allow-image-urls and downloads nothing"
        )
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise InputError(f"the images of a request must be there within {rules.seconds:g} s")
    return fetch(source.url or "", FetchLimits(max_bytes=left, seconds=seconds))
