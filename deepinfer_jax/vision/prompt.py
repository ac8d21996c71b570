"""Images in a sequence of token ids (model.md 3.13, "Insertion")."""

from collections.abc import Sequence

from deepinfer_jax.cache.keys import ImageSpan
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.vision.image import ImageInput


def expand_images(
    token_ids: Sequence[int], images: Sequence[ImageInput], config: ModelConfig
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Returns the ids with each placeholder repeated for every row of its image, and the spans.

    Placeholders are the ids `config.image_token_id`, one an image, in order.

    Raises:
        InputError: there are more or fewer placeholders than images, or the model sees nothing.
    """
    if not images and config.vision is None:
        return list(token_ids), ()
    require_vision(config)
    placeholder = config.image_token_id
    count = sum(1 for token in token_ids if token == placeholder)
    if count != len(images):
        raise InputError(
            f"a prompt must hold one image token (id {placeholder}) for each image: {count} for "
            f"{len(images)} images. Write the image token once where each image belongs"
        )
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    for token in token_ids:
        if token != placeholder:
            expanded.append(int(token))
            continue
        image = images[len(spans)]
        rows = image.plan.num_tokens
        spans.append(ImageSpan(start=len(expanded), length=rows, digest=image.digest))
        expanded.extend([int(token)] * rows)
    return expanded, tuple(spans)


def require_vision(config: ModelConfig) -> None:
    """Checks that a model can see.

    Raises:
        InputError: it has no image encoder, or runs where none does.
    """
    if config.execution.on_ascend:
        raise InputError('a model loaded with kernels="ascend" takes text alone: leave images out')
    if config.vision is None or config.image_token_id is None:
        raise InputError(
            "this model has no image encoder (config.json has no vision_config) and takes no "
            "images: leave them out, or load a checkpoint that sees"
        )
