"""Checks of the fields of messages and tools; every error names the field it is about."""

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_jax.errors import InputError


def fail(where: str, rule: str, value: object, advice: str = "") -> InputError:
    """Returns the error that `where` breaks `rule`."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return InputError(f"{where} must be {rule}, got {shown}" + (f": {advice}" if advice else ""))


def given(value: object, where: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of an object that are not None; any but the allowed ones raise."""
    if not isinstance(value, Mapping):
        raise fail(where, f"an object with the fields {', '.join(allowed)}", value)
    fields = {name: item for name, item in value.items() if item is not None}
    unknown = [name for name in fields if name not in allowed]
    if unknown:
        raise InputError(
            f"{where} may have the fields {', '.join(allowed)}, got also "
            f"{', '.join(map(repr, unknown))}: the prompt format has no place for more, remove them"
        )
    return fields


def text(value: object, where: str) -> str:
    """Returns a text that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise fail(where, "a text", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise fail(where, "valid Unicode", value, f"{error}; remove the lone surrogate") from error
    return value


def boolean(value: object, where: str) -> bool:
    """Returns a true or false."""
    if not isinstance(value, bool):
        raise fail(where, "true or false", value)
    return value


def items(value: object, where: str) -> list[Any]:
    """Returns a list that is not empty."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise fail(where, "a list with at least one entry", value)
    return list(value)


def one_of(value: object, where: str, legal: tuple[str, ...], advice: str = "") -> str:
    """Returns one of the legal texts."""
    if not isinstance(value, str) or value not in legal:
        raise fail(where, "one of " + ", ".join(legal), value, advice)
    return value


def content(value: object, where: str) -> str:
    """Returns a message's text: a text, or text parts joined by an empty line."""
    if isinstance(value, str):
        return text(value, where)
    return "\n\n".join(_part(part, f"{where}[{n}]") for n, part in enumerate(_parts(value, where)))


def mixed_content(value: object, where: str) -> tuple[list[str | None], list[Any]]:
    """Returns a message's parts in order, None for an image, and the sources of the images.

    An image is a part {"type": "image_url", "image_url": {"url": "data:..."}} as in OpenAI's
    protocol, or {"type": "image", "image": SOURCE} with anything that `read_image` takes.
    """
    if isinstance(value, str):
        return [text(value, where)], []
    texts: list[str | None] = []
    sources: list[Any] = []
    for number, part in enumerate(_parts(value, where)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        place = f"{where}[{number}]"
        if kind not in ("image", "image_url"):
            texts.append(_part(part, place))
            continue
        own = given(part, place, ("type", kind))
        if kind not in own:
            raise fail(f"{place}.{kind}", "an image", None)
        texts.append(None)
        sources.append(own[kind] if kind == "image" else _image_url(own[kind], f"{place}.{kind}"))
    return texts, sources


def _image_url(value: object, where: str) -> str:
    own = given(value, where, ("url", "detail"))
    url = text(own.get("url"), f"{where}.url")
    if own.get("detail", "auto") not in ("auto", "high", "original"):
        advice = "give ImageOptions(is_low=True) to read_image, and its result as a part"
        raise fail(f"{where}.detail", "auto, high or original here", own["detail"], advice)
    if url[:5].lower() != "data:":
        advice = "nothing is fetched here; read the file, or encode it as base64"
        raise fail(f"{where}.url", "a data URL", url, advice)
    return url


def _parts(value: object, where: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise fail(where, "a text or a list of parts", value)
    return list(value)


def _part(value: object, where: str) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and "image" in kind:
        raise fail(where, "a text part", value, "images stand in user messages")
    if kind == "file":
        raise fail(where, "a text part", value, "files are not supported")
    if kind != "text":
        raise fail(where, 'a part {"type": "text", "text": ...}', value)
    return text(given(value, where, ("type", "text")).get("text"), f"{where}.text")
