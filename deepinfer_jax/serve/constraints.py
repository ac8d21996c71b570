"""The one constraint a body may put on its answer, under all the names clients use (io.md 3)."""

from collections.abc import Mapping
from typing import Any

from deepinfer_jax.errors import InputError
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.serve.errors import ApiError, bad_field

#: Field of the body -> what it holds.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "so_args": "so_args",
}
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
_FORMATS = ("json_schema", "json_object", "regex", "text")


def read_constraint(fields: Mapping[str, Any], start_after: str | None = None) -> Grammar | None:
    """Returns the grammar that a checked body asks for, None if the answer is free.

    Schemas are taken as they were sent: what recipe makes of them lacks the enums of integers.

    Args:
        fields: of the body.
        start_after: the token before which the text is free, None if it binds at once.

    Raises:
        ApiError: 400; two constraints, or one that is none.
    """
    asked = [(name, kind, fields[name]) for name, kind in _ALIASES.items() if name in fields]
    if "structured_outputs" in fields:
        asked += _structured(fields["structured_outputs"])
    asked += _formats(fields)
    if not asked:
        return None
    if len(asked) > 1:
        names = ", ".join(name for name, _, _ in asked)
        raise ApiError(400, f"an answer has one constraint at most, got {names}", param=asked[1][0])
    ((name, kind, value),) = asked
    if fields.get("ignore_eos"):
        raise ApiError(
            400, f"ignore_eos would go on behind the end that {name} sets", param="ignore_eos"
        )
    try:
        return _grammar(kind, value, name, strict=fields.get("strict", True)).after(start_after)
    except InputError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from error


def _grammar(kind: str, value: Any, name: str, *, strict: bool) -> Grammar:
    if kind == "json":
        if not isinstance(value, str | Mapping):
            raise bad_field(name, "a JSON schema (an object, or its text)", value)
        return Grammar.json_schema(value, strict=strict)
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise bad_field(name, "a list of texts", value)
        return Grammar.choice(value)
    if kind == "so_args":
        if not isinstance(value, Mapping) or not isinstance(value.get("schema"), str | Mapping):
            raise bad_field(name, "an object with a schema", value)
        return Grammar.so_args(value)
    if not isinstance(value, str):
        raise bad_field(name, "a text", value)
    return Grammar.regex(value) if kind == "regex" else Grammar.ebnf(value)


def _structured(value: Any) -> list[tuple[str, str, Any]]:
    where = "structured_outputs"
    if not isinstance(value, Mapping):
        raise bad_field(where, f"an object with one of {', '.join(_STRUCTURED)}", value)
    given = {kind: one for kind, one in value.items() if one is not None and one is not False}
    unknown = [kind for kind in given if kind not in _STRUCTURED]
    if unknown or not given:
        raise bad_field(where, f"an object with one of {', '.join(_STRUCTURED)}", value)
    return [(f"{where}.{kind}", kind, one) for kind, one in given.items()]


def _formats(fields: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Returns the constraint of a response format, whichever protocol's."""
    places = {
        "response_format": fields.get("response_format"),
        "text.format": _inner(fields.get("text"), "text"),
        "output_config.format": _inner(fields.get("output_config"), "output_config"),
    }
    found = []
    for where, value in places.items():
        if value is None:
            continue
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind not in _FORMATS:
            raise bad_field(where, f"an object whose type is one of {', '.join(_FORMATS)}", value)
        if kind == "regex":
            found.append((where, "regex", value.get("regex")))
        elif kind == "json_object":
            found.append((where, "json_object", None))
        elif kind == "json_schema":
            inner = value.get("json_schema") if where == "response_format" else value
            if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
                raise bad_field(where, "a json_schema with a schema", value)
            found.append((where, "json", inner["schema"]))
    return found


def _inner(value: Any, where: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad_field(where, "an object", value)
    return value.get("format")
