"""The one constraint on an answer, under all the names it has in requests (io.md 3)."""

from collections.abc import Mapping
from typing import Any

from deepinfer_jax.errors import InputError
from deepinfer_jax.grammar.spec import Grammar

#: Field -> what it holds.
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
#: Fields that hold nothing but a constraint, in every kind of request.
ALIASES = (*_ALIASES, "structured_outputs")


class ConstraintError(InputError):
    """A constraint that is none. field: where it stands."""

    def __init__(self, field: str, message: str) -> None:
        """Keeps both."""
        super().__init__(message)
        self.field = field


def read_constraint(fields: Mapping[str, Any]) -> Grammar | None:
    """Returns the grammar that fields ask for, None if the answer is free.

    Schemas are taken as they were sent: what recipe makes of them lacks the enums of integers.

    Args:
        fields: of a request; `strict` false drops keywords of a schema that cannot be enforced.

    Raises:
        ConstraintError: two constraints, or one that is none.
    """
    asked = [(name, kind, fields[name]) for name, kind in _ALIASES.items() if name in fields]
    if "structured_outputs" in fields:
        asked += _structured(fields["structured_outputs"])
    asked += _formats(fields)
    if not asked:
        return None
    if len(asked) > 1:
        names = ", ".join(name for name, _, _ in asked)
        raise ConstraintError(asked[1][0], f"an answer has one constraint at most, got {names}")
    ((name, kind, value),) = asked
    if fields.get("ignore_eos"):
        rule = f"ignore_eos would go on behind the end that {name} sets"
        raise ConstraintError("ignore_eos", rule)
    strict = fields.get("strict", True)
    if not isinstance(strict, bool):
        raise _wrong("strict", "true or false", strict)
    try:
        return _grammar(kind, value, name, strict=strict)
    except ConstraintError:
        raise
    except InputError as error:
        raise ConstraintError(name, f"{name}: {error}") from error


def _grammar(kind: str, value: Any, name: str, *, strict: bool) -> Grammar:
    if kind == "json":
        if not isinstance(value, str | Mapping):
            raise _wrong(name, "a JSON schema (an object, or its text)", value)
        return Grammar.json_schema(value, strict=strict)
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise _wrong(name, "a list of texts", value)
        return Grammar.choice(value)
    if kind == "so_args":
        if not isinstance(value, Mapping) or not isinstance(value.get("schema"), str | Mapping):
            raise _wrong(name, "an object with a schema", value)
        return Grammar.so_args(value)
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return Grammar.regex(value) if kind == "regex" else Grammar.ebnf(value)


def _structured(value: Any) -> list[tuple[str, str, Any]]:
    where = "structured_outputs"
    if not isinstance(value, Mapping):
        raise _wrong(where, f"an object with one of {', '.join(_STRUCTURED)}", value)
    given = {kind: one for kind, one in value.items() if one is not None and one is not False}
    unknown = [kind for kind in given if kind not in _STRUCTURED]
    if unknown or not given:
        raise _wrong(where, f"an object with one of {', '.join(_STRUCTURED)}", value)
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
            raise _wrong(where, f"an object whose type is one of {', '.join(_FORMATS)}", value)
        if kind == "regex":
            found.append((where, "regex", value.get("regex")))
        elif kind == "json_object":
            found.append((where, "json_object", None))
        elif kind == "json_schema":
            inner = value.get("json_schema") if where == "response_format" else value
            if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
                raise _wrong(where, "a json_schema with a schema", value)
            found.append((where, "json", inner["schema"]))
    return found


def _inner(value: Any, where: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    return value.get("format")


def _wrong(field: str, rule: str, value: object) -> ConstraintError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ConstraintError(field, f"{field} must be {rule}, got {shown}")
