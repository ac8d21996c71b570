"""Tool calls in the format of DeepSeek-V4.1 as a grammar (io.md 1.4, 2.8).

Tags hold the token of a marker, and no other spelling of it: whoever reads the calls goes by that
token alone. Nothing but tags can hold it, so the body of a text parameter ends at the first closing
tag, and may be any text, "</" included.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer_jax.errors import GrammarError

MARKER = "\uff5cDSML\uff5c"
#: Keywords of a text parameter that its body, which is no JSON, is held to.
_TEXT_KEYWORDS = {"type", "enum", "const", "description", "title", "default", "examples"}
#: Keywords of the schema of all parameters that a call is held to, or that hold it to nothing.
_CALL_KEYWORDS = _TEXT_KEYWORDS - {"enum", "const"} | {
    *("properties", "required", "additionalProperties", "$defs", "definitions"),
    *("$schema", "$id", "$comment"),
}
#: How JSON is written: a few spaces between two tokens, never spaces alone.
_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,40}"}


def tool_lark(
    tools: list[dict[str, Any]], *, marker: int, begin: str, is_single: bool = False
) -> str:
    """Returns the Lark grammar of calls of these tools; arguments: `Grammar.tool_calls`.

    Args:
        tools: name, parameters (a JSON schema of an object) and strict of each.
        marker: id of `MARKER`.
        begin: "opened", "required" or "auto".
        is_single: one call at most.

    Raises:
        GrammarError: a schema that cannot be enforced, by its place.
    """
    names = " | ".join(f"tool{number}" for number in range(len(tools)))
    many = "invoke" if is_single else "invoke+"
    rules = [f"calls: {many} {_literal(f'</{MARKER} calls>')}", f"invoke: {names}"]
    opening = f"{MARKER} calls>\n"
    if begin == "opened":
        rules.append("start: calls")
    elif begin == "required":
        rules.append(f"start: {_literal(chr(10) * 2 + '<' + opening)} calls")
    else:
        rules.append("start: text | lead calls")
        rules.append(r"text: /(?s:.)*/")
        # A lexeme that ends in the beginning of a tag: the marker can only come right behind it.
        rules.append(rf"lead: /(?s:.)*</ {_literal(opening)}")
    rules.append(rf"body: /(?s:.)*<\// {_literal(f'{MARKER} parameter>' + chr(10))}")
    for number, tool in enumerate(tools):
        rules += _tool(f"tool{number}", tool)
    return "\n".join(rules).replace(MARKER, f'" <[{marker}]> "').replace('"" ', "")


def _tool(rule: str, tool: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rules of one tool: its parameters in the order of the schema."""
    name, schema, is_strict = tool["name"], tool["parameters"], tool["strict"]
    where = f"tool {name!r}"
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise GrammarError(f"{where}: parameters must be a schema of an object, got {schema!r:.80}")
    if is_strict:
        unknown = [key for key in required if key not in properties]
        if unknown:
            raise GrammarError(f"{where}: required names {unknown[0]!r}, which properties lack")
        other = [key for key in schema if key not in _CALL_KEYWORDS]
        if other:
            raise GrammarError(f"{where}: {other[0]} cannot be enforced on a call: leave it out")
    end = _literal(f"</{MARKER} parameter>\n")
    schemas = dict(parameter_schemas(tool))
    parts = []
    for place, (key, one) in enumerate(properties.items()):
        part = f"{rule}p{place}"
        parts.append(part if key in required else f"{part}?")
        path = f"{where}, /properties/{key}"
        if any(character in key for character in '"<>&\n') or MARKER in key:
            raise GrammarError(f"{path}: a parameter's name may hold no quotes or brackets")
        if is_strict and not isinstance(one, dict):
            raise GrammarError(f"{path}: must be an object, got {one!r:.80}")
        texts = _texts(one, is_strict=is_strict) if isinstance(one, dict) else None
        tag = f'<{MARKER} parameter name="{key}" string="{json.dumps(texts is not None)}">'
        if texts is None:
            # In ASCII, so that no marker inside of it is taken for a tag.
            yield f"{part}j: %json {json.dumps(schemas[key])}"
            yield f"{part}: {_literal(tag)} {part}j {end}"
        elif texts:
            choices = " | ".join(map(_literal, texts))
            yield f"{part}: {_literal(tag)} ({choices}) {end}"
        else:
            yield f"{part}: {_literal(tag)} body"
    head = _literal(f'<{MARKER} invoke name="{name}">\n')
    yield f"{rule}: {head} {' '.join(parts)} {_literal(f'</{MARKER} invoke>{chr(10)}')}"


def parameter_schemas(tool: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, schema that stands by itself) of the parameters of a tool."""
    schema = tool["parameters"]
    options = _JSON | {"lenient": not tool["strict"], "coerce_one_of": not tool["strict"]}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for key, one in schema.get("properties", {}).items():
        own = one if isinstance(one, dict) else {}
        yield key, {**own, **shared, "x-guidance": options}


def _texts(schema: Mapping[str, Any], *, is_strict: bool) -> list[str] | None:
    """Returns the choices of a parameter that is a text, none for any text; None if it is JSON.

    Texts go as they are. What a body cannot be held to, JSON can: those go as JSON if it matters.
    """
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_text = schema.get("type") == "string" or ("type" not in schema and values)
    if not is_text or not all(isinstance(one, str) for one in values):
        return None
    if any(MARKER in one or not one for one in values):
        return None
    if is_strict and any(key not in _TEXT_KEYWORDS for key in schema):
        return None
    return list(values)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
