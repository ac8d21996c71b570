"""A compiled grammar, from which every completion gets a matcher of its own (io.md 2.4 to 2.6)."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.errors import GrammarError
from deepinfer_jax.grammar.gate import Gate
from deepinfer_jax.grammar.matcher import Matcher
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.grammar.tools import MARKER, parameter_schemas, tool_lark
from deepinfer_jax.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

#: Spaces between two JSON tokens: enough for any indentation, and no completion of spaces alone.
_SPACES = r"[ \n\r\t]{1,40}"


@dataclass(frozen=True, slots=True)
class Template:
    """warnings: schema keywords that were dropped, if the grammar is not strict."""

    vocabulary: Vocabulary
    warnings: tuple[str, ...]
    _first: "llguidance.LLMatcher"

    def fork(self) -> "llguidance.LLMatcher":
        """Returns a matcher at the start; it shares what the lexer has learnt so far."""
        return self._first.deep_copy()

    def matcher(self, gate: Gate) -> Matcher:
        """Returns the matcher of one completion."""
        return Matcher(self, gate)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> Template:
    """Returns the compiled grammar. It may take seconds: call it beside the engine's loop.

    The first mask belongs to it: only that shows whether there is any text at all, and it fills the
    lexer's tables.

    Raises:
        GrammarError: the grammar is malformed, empty or too costly, or cannot be enforced. Of a
            schema it names the keyword and its place.
    """
    import llguidance

    # Work limits of one construction or mask, the same on any machine. All requests wait for a
    # mask: with these items an ambiguous grammar takes 50 ms at most before it ends its own.
    limits = llguidance.LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
    text = _inner_grammar(grammar, vocabulary)
    first = llguidance.LLMatcher(vocabulary.inner, text, log_level=0, limits=limits)
    if first.is_error():
        raise GrammarError(_explain(grammar, first.get_error()))
    warnings = tuple(first.get_grammar_warnings())
    # llguidance may give a word too many.
    mask = np.frombuffer(first.compute_bitmask(), np.int32)[: vocabulary.width]
    if first.is_error() or not (mask & vocabulary.allowed).any():
        reason = first.get_error().split("\n")[0] or "no token is allowed"
        raise GrammarError(
            f"{grammar.kind}: no text at all, or none within limits, matches ({reason})"
        )
    return Template(vocabulary=vocabulary, warnings=warnings, _first=first)


def grammar_gate(grammar: Grammar, vocabulary: Vocabulary) -> Gate:
    """Returns where the grammar begins to bind.

    Raises:
        GrammarError: a token that does not exist.
    """
    if grammar.start_after is not None:
        return Gate(trigger=(vocabulary.token(grammar.start_after),), may_end=False)
    bound = grammar.bound_token
    ids = (*grammar.trigger, *(() if bound is None else (bound,)))
    outside = [token for token in ids if token >= 32 * vocabulary.width]
    if outside:
        raise GrammarError(f"trigger_token_ids must be ids of the vocabulary, got {outside}")
    return Gate(trigger=grammar.trigger, bound_token=bound)


def _inner_grammar(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """Returns the text that llguidance compiles.

    Raises:
        GrammarError: GBNF that cannot be read.
    """
    import llguidance

    matcher = llguidance.LLMatcher
    if grammar.kind in ("json_schema", "json_object"):
        text = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
        options: JsonCompileOptions = {
            "whitespace_flexible": grammar.whitespace == "flexible",
            "whitespace_pattern": _SPACES if grammar.whitespace == "flexible" else None,
            "lenient": not grammar.strict,
            "coerce_one_of": not grammar.strict,
        }
        if grammar.start_after is None:
            try:
                return matcher.grammar_from_json_schema(text, overrides=options)
            except ValueError as error:
                raise GrammarError(f"json_schema: {error}") from error
        # Models put line ends between their reasoning and the answer.
        schema = json.loads(text)
        own = schema.get("x-guidance")
        schema |= {"x-guidance": {**(own if isinstance(own, dict) else {}), **options}}
        return matcher.grammar_from_lark(f"start: /\\n*/ json\njson: %json {json.dumps(schema)}")
    if grammar.kind == "regex":
        classes = "" if grammar.regex_unicode else "dws"
        pattern = llguidance.regex_to_lark(_without_anchors(grammar.text), classes)
        return matcher.grammar_from_lark(f"start: /{pattern}/")
    if grammar.kind == "tool_calls":
        found = json.loads(grammar.text)
        marker = vocabulary.token(MARKER)
        begin, is_single = found["begin"], found["is_single"]
        lark = tool_lark(found["tools"], marker=marker, begin=begin, is_single=is_single)
        return matcher.grammar_from_lark(lark)
    if grammar.kind == "choice":
        choices = " | ".join(json.dumps(one) for one in json.loads(grammar.text))
        return matcher.grammar_from_lark(f"start: {choices}")
    return matcher.grammar_from_lark(_as_lark(grammar.text))


def _without_anchors(pattern: str) -> str:
    """Returns the pattern without `^` and `$` at its ends: it is matched as a whole anyway."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - len(pattern.removesuffix("$").rstrip("\\")) - 1
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # it raises plain exceptions for malformed text
        raise GrammarError(
            f"ebnf must be GBNF with a rule root (root ::= ...) or Lark with a rule start: {error}"
        ) from error


def _explain(grammar: Grammar, message: str) -> str:
    """Returns an error text with the place in the schema of what it names."""
    message = message.strip()
    if grammar.kind == "tool_calls":
        # Below its first line is the grammar that was made of the tools.
        return f"tools: {message.splitlines()[0]}{_refused_parameter(grammar)}"
    if grammar.kind != "json_schema":
        return f"{grammar.kind}: {message}"
    named = set(re.findall(r"[\"']([^\"']+)[\"']", message))
    named |= set(message.replace(":", " ").split())
    found = [path for path, key, value in _places(json.loads(grammar.text), "") if key in named]
    found += [
        path
        for path, key, value in _places(json.loads(grammar.text), "")
        if isinstance(value, str) and value in named and key not in named
    ]
    where = f" (at {', '.join(found[:5])})" if found else ""
    hint = "; Grammar.json_schema(..., strict=False) drops it" if "Unimplemented" in message else ""
    return f"json_schema: {message}{where}{hint}"


def _refused_parameter(grammar: Grammar) -> str:
    """Returns the place of the first parameter that llguidance does not take by itself."""
    import llguidance

    matcher = llguidance.LLMatcher
    for tool in json.loads(grammar.text)["tools"]:
        for key, schema in parameter_schemas(tool):
            text = matcher.grammar_from_json_schema(json.dumps(schema))
            if matcher.validate_grammar(text):
                return f" (at tool {tool['name']!r}, /properties/{key})"
    return ""


def _places(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (JSON pointer, key, value) of everything in a schema."""
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, one in pairs:
        yield f"{path}/{key}", str(key), one
        yield from _places(one, f"{path}/{key}")
