"""Bytes of "data:" URLs (RFC 2397), base64 only."""

import binascii
import re

from deepinfer_jax.errors import InputError

_HEADER = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w.+-]+=[^;,]*)*;base64", re.IGNORECASE)


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """Returns the content of a base64 data URL; the media type is not trusted and not used.

    Raises:
        InputError: it is none, is not base64, or holds more than `max_bytes`.
    """
    header, comma, body = url.partition(",")
    if not comma or not _HEADER.fullmatch(header):
        raise InputError(
            'an image URL must begin with "data:image/...;base64,", got '
            f"{url[:40]!r}: encode the file as base64"
        )
    return decode_base64(body, max_bytes=max_bytes)


def encode_data_url(data: bytes) -> str:
    """Returns a file as a data URL, without a media type: what it is shows in its bytes."""
    return "data:;base64," + binascii.b2a_base64(data, newline=False).decode("ascii")


def decode_base64(text: str, *, max_bytes: int) -> bytes:
    """Returns the bytes of a base64 text; line ends in it are allowed.

    Raises:
        InputError: it is not base64, or holds more than `max_bytes`.
    """
    if len(text) > max_bytes // 3 * 4 + max_bytes // 16 + 8:  # with a line end every 64 characters
        raise InputError(
            f"an image file must have at most {max_bytes} bytes, and its base64 text has "
            f"{len(text)} characters: make it smaller"
        )
    try:
        return binascii.a2b_base64(
            text.translate({10: None, 13: None}).encode("ascii"), strict_mode=True
        )
    except ValueError as error:
        raise InputError(f"an image must be base64 text without blanks: {error}") from error
