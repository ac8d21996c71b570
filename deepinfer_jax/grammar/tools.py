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


def tool_lark(tools: list[dict[str, Any]], *, marker: int, is_opened: bool) -> str:
    """Returns the Lark grammar of one or more calls of these tools.

    Args:
        tools: name and parameters (a JSON schema of an object) of each.
        marker: id of `MARKER`.
        is_opened: the prompt has opened the block of calls; otherwise text may come first, or text
            alone.

    Raises:
        GrammarError: a schema that cannot be enforced, by its place.
    """
    names = " | ".join(f"tool{number}" for number in range(len(tools)))
    rules = [f"calls: invoke+ {_literal(f'</{MARKER} calls>')}", f"invoke: {names}"]
    if is_opened:
        rules.append("start: calls")
    else:
        rules.append("start: text | lead calls")
        rules.append(r"text: /(?s:.)*/")
        # A lexeme that ends in the beginning of a tag: the marker can only come right behind it.
        rules.append(rf"lead: /(?s:.)*</ {_literal(f'{MARKER} calls>' + chr(10))}")
    rules.append(rf"body: /(?s:.)*<\// {_literal(f'{MARKER} parameter>' + chr(10))}")
    for number, tool in enumerate(tools):
        rules += _tool(f"tool{number}", tool)
    return "\n".join(rules).replace(MARKER, f'" <[{marker}]> "').replace('"" ', "")


def _tool(rule: str, tool: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rules of one tool: its parameters in the order of the schema."""
    name, schema = tool["name"], tool["parameters"]
    where = f"tool {name!r}"
    properties = schema.get("properties", {})
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise GrammarError(f"{where}: parameters must be a schema of an object, got {schema!r:.80}")
    unknown = [key for key in schema.get("required", ()) if key not in properties]
    if unknown:
        raise GrammarError(f"{where}: required names {unknown[0]!r}, which properties lack")
    end = _literal(f"</{MARKER} parameter>\n")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    for place, (key, one) in enumerate(properties.items()):
        part = f"{rule}p{place}"
        parts.append(part if key in schema.get("required", ()) else f"{part}?")
        path = f"{where}, /properties/{key}"
        if any(character in key for character in '"<>&\n'):
            raise GrammarError(f"{path}: a parameter's name may hold no quotes or brackets")
        if not isinstance(one, dict):
            raise GrammarError(f"{path}: must be an object, got {one!r:.80}")
        texts = _texts(one, path)
        tag = f'<{MARKER} parameter name="{key}" string="{json.dumps(texts is not None)}">'
        if texts is None:
            yield f"{part}j: %json {json.dumps(one | shared, ensure_ascii=False)}"
            yield f"{part}: {_literal(tag)} {part}j {end}"
        elif texts:
            choices = " | ".join(map(_literal, texts))
            yield f"{part}: {_literal(tag)} ({choices}) {end}"
        else:
            yield f"{part}: {_literal(tag)} body"
    head = _literal(f'<{MARKER} invoke name="{name}">\n')
    yield f"{rule}: {head} {' '.join(parts)} {_literal(f'</{MARKER} invoke>{chr(10)}')}"


def _texts(schema: Mapping[str, Any], path: str) -> list[str] | None:
    """Returns the choices of a parameter that is a text, none for any text; None if it is JSON."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_text = schema.get("type") == "string" or "type" not in schema
    if not is_text or not all(isinstance(one, str) for one in values):
        return None
    if "type" not in schema and not values:
        return None
    other = [key for key in schema if key not in _TEXT_KEYWORDS]
    if other:
        raise GrammarError(f"{path}/{other[0]} cannot be enforced on a text: leave it out")
    bad = [one for one in values if MARKER in one or not one]
    if bad:
        raise GrammarError(f"{path}: a choice may not be empty nor hold a tag, got {bad[0]!r}")
    return list(values)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
