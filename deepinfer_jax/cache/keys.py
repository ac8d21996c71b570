"""Hash chain of the prefix tree: keys of cached blocks (engine.md 6.2).

    h_0 = H(config, weights, salt, options)        h_i = H(h_(i-1), content of block i)

A key depends on nothing of this process, so a store outside it can use the same keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from deepinfer_jax.config.model import ModelConfig

KEY_BYTES = 16
TOKEN_BYTES = 4

#: Token ids of one sequence; an int32 array is the fast form.
TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """An image in a sequence: rows [start, start + length) and a hash of its pixels.

    Its rows all hold the same placeholder id, so only the hash tells two images apart.
    """

    start: int
    length: int
    digest: bytes


def root_key(
    config: ModelConfig, *, weights: str, salt: str = "", options: tuple[str, ...] = ()
) -> bytes:
    """Returns the key before the first block; unlike roots never share a block.

    Args:
        config: the model and how it is run; fixes the row formats and the arithmetic.
        weights: identity of the weights, such as a checksum.
        salt: the request's `cache_salt`.
        options: engine options that change cached values, "name=value".
    """
    digest = sha256()
    for field in (repr(config), weights, salt, *sorted(options)):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()[:KEY_BYTES]


def block_key(parent: bytes, content: bytes) -> bytes:
    """Returns the 128-bit key of a block from its parent's key and its own content."""
    return sha256(parent + content).digest()[:KEY_BYTES]


def block_contents(
    tokens: TokenIds,
    block_tokens: int,
    *,
    first: int = 0,
    last: int | None = None,
    images: tuple[ImageSpan, ...] = (),
) -> Iterator[bytes]:
    """Yields the content of the full blocks `first` to `last` (exclusive, None: all full ones).

    A content is the block's ids as little-endian int32, then every image that overlaps it with
    its place relative to the block.
    """
    last = len(tokens) // block_tokens if last is None else last
    chosen = tokens[first * block_tokens : last * block_tokens]
    data = np.asarray(chosen, dtype="<i4").tobytes()
    size = block_tokens * TOKEN_BYTES
    for number in range(last - first):
        content = data[number * size : (number + 1) * size]
        if images:
            content += _image_bytes(images, (first + number) * block_tokens, block_tokens)
        yield content


def _image_bytes(images: tuple[ImageSpan, ...], start: int, block_tokens: int) -> bytes:
    parts = []
    for image in images:
        if image.start < start + block_tokens and start < image.start + image.length:
            place = (image.start - start, image.length, len(image.digest))
            parts.append(b"".join(value.to_bytes(8, "little", signed=True) for value in place))
            parts.append(image.digest)
    return b"".join(parts)
