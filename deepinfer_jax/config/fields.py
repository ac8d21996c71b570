"""Reads JSON objects against a table of fields and collects every mismatch as one line of text."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Default of a field that has none.
REQUIRED: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One accepted key: what is expected in words, a test, a conversion and a default."""

    name: str
    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    default: Any = REQUIRED


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if _is_integer(value):
        return abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def integer(name: str, *, minimum: int = 1, default: Any = REQUIRED) -> Field:
    """Returns a field that holds an integer of at least `minimum`, below 2^63."""
    return Field(
        name=name,
        expected=f"an integer >= {minimum}",
        accepts=lambda value: _is_integer(value) and minimum <= value < 2**63,
        default=default,
    )


def number(name: str, *, minimum: float = 0.0) -> Field:
    """Returns a field that holds a finite number, above zero or at least `minimum`."""
    expected = f"a finite number >= {minimum:g}" if minimum else "a finite number > 0"
    return Field(
        name=name,
        expected=expected,
        accepts=lambda value: _is_number(value) and value > 0 and value >= minimum,
        convert=float,
    )


def boolean(name: str, *, default: Any = REQUIRED) -> Field:
    """Returns a field that holds true or false."""
    return Field(
        name=name,
        expected="true or false",
        accepts=lambda value: isinstance(value, bool),
        default=default,
    )


def integers(name: str, *, default: Any = REQUIRED) -> Field:
    """Returns a field that holds a list of integers >= 0; read as a tuple."""
    return Field(
        name=name,
        expected="a list of integers >= 0",
        accepts=lambda value: (
            isinstance(value, list | tuple)
            and all(_is_integer(item) and 0 <= item < 2**63 for item in value)
        ),
        convert=tuple,
        default=default,
    )


def constant(name: str, value: Any, *, optional: bool = False) -> Field:
    """Returns a field that must hold exactly `value`; other values are not supported."""
    return Field(
        name=name,
        expected=f"{show(value)} (no other value is supported)",
        accepts=lambda given: given == value and isinstance(given, bool) == isinstance(value, bool),
        default=value if optional else REQUIRED,
    )


def choice(name: str, values: tuple[str, ...], *, default: str) -> Field:
    """Returns a field that holds one of a few words."""
    return Field(
        name=name,
        expected=" or ".join(map(show, values)),
        accepts=lambda value: isinstance(value, str) and value in values,
        default=default,
    )


def nullable(field: Field, *, default: Any = None) -> Field:
    """Returns the field with null accepted as well; absent means `default`."""
    return Field(
        name=field.name,
        expected=f"{field.expected}, or null",
        accepts=lambda value: value is None or field.accepts(value),
        convert=lambda value: None if value is None else field.convert(value),
        default=default,
    )


def nested(name: str, *, may_be_null: bool = False) -> Field:
    """Returns a field that holds another object, kept as it is for its own table."""
    return Field(
        name=name,
        expected="an object or null" if may_be_null else "an object",
        accepts=lambda value: isinstance(value, Mapping) or (may_be_null and value is None),
    )


def ignored(name: str) -> Field:
    """Returns a field that is accepted with any value, because it has no effect on inference."""
    return Field(name=name, expected="anything", accepts=lambda value: True, default=None)


def show(value: Any) -> str:
    """Returns the JSON spelling of a value, shortened to 80 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def mismatch(path: str, expected: str, received: Any) -> str:
    """Returns the line of one problem: field path, expected, received."""
    return f"{path}: expected {expected}, received {show(received)}"


def read_fields(
    data: Mapping[str, Any], path: str, fields: Iterable[Field], problems: list[str]
) -> dict[str, Any]:
    """Returns the converted values of the good fields and appends a line for every other one.

    Args:
        data: The JSON object.
        path: Prefix of its field paths: empty, or ending in a dot.
        fields: The complete list of accepted keys.
        problems: Receives missing keys, refused values and unknown keys.
    """
    values: dict[str, Any] = {}
    known = set()
    for field in fields:
        known.add(field.name)
        if field.name not in data:
            if field.default is REQUIRED:
                problems.append(f"{path}{field.name}: expected {field.expected}, received no value")
            else:
                values[field.name] = field.default
        elif field.accepts(data[field.name]):
            values[field.name] = field.convert(data[field.name])
        else:
            problems.append(mismatch(path + field.name, field.expected, data[field.name]))
    problems.extend(
        f"{path}{name}: expected no such key (unknown keys may change the arithmetic), "
        f"received {show(data[name])}"
        for name in data
        if name not in known
    )
    return values
