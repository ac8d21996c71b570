"""`Grammar`: what a completion must match, as the user states it; nothing is compiled here."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, get_args

from deepinfer_jax.errors import GrammarError

Kind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "tool_calls"]
Whitespace = Literal["flexible", "compact"]
#: Where tool calls may come: the prompt has opened their block, the answer is calls alone, or it is
#: text, calls, or text and then calls.
Begin = Literal["opened", "required", "auto"]

#: Most bytes of each kind's text, checked before anything reads it (io.md 2.4).
MAX_BYTES: dict[str, int] = {
    "json_schema": 256 * 1024,
    "json_object": 2,
    "regex": 8 * 1024,
    "ebnf": 256 * 1024,
    "choice": 256 * 1024,
    "tool_calls": 256 * 1024,
}
MAX_NESTING = 64
MAX_ENUM = 4096
MAX_TOOLS = 256
_SO_KINDS = {"json": "json_schema", "regex": "regex", "ebnf": "ebnf"}
_SO_FIELDS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A constraint on a completion's text; made by the class methods, immutable, JSON-like fields.

    It binds from the first output token, or from later on: after `start_after`, the spelling of a
    token such as the end of thinking, before which the text is free but may not end; or after the
    ids `trigger`, before which the text is free and may end. A text ends only where it is complete.

    kind, text: the constraint; a schema or list of choices is JSON text. whitespace: between two
    JSON tokens, up to 40 characters or none. strict: refuse schema keywords that cannot be
    enforced; otherwise they are dropped and named in `RequestOutput.warnings`. regex_unicode:
    classes such as \\d are those of Unicode. trigger, bound_token: of `so_args`.

    Raises:
        GrammarError: a field outside its range, or a text that is too large or too deep.

    Examples:
        >>> di.Grammar.regex("[0-9]{3}-[0-9]{4}").kind
        'regex'
        >>> di.Grammar.json_schema({"type": "integer"}).text
        '{"type":"integer"}'
    """

    __no_type_check__: ClassVar[bool] = True  # `__post_init__` checks, and says what is legal

    kind: Kind
    text: str
    whitespace: Whitespace = "flexible"
    strict: bool = True
    regex_unicode: bool = False
    start_after: str | None = None
    trigger: tuple[int, ...] = ()
    bound_token: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in MAX_BYTES:
            raise GrammarError(f"a grammar is one of {list(MAX_BYTES)}, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise GrammarError(f"{self.kind} needs a text, got a {type(self.text).__name__}")
        if not self.text:
            raise GrammarError(f"{self.kind} must not be empty: leave the grammar out instead")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise GrammarError(f"{self.kind} must be valid Unicode text: {error}") from error
        if size > MAX_BYTES[self.kind]:
            raise GrammarError(
                f"{self.kind} may have {MAX_BYTES[self.kind]} bytes, got {size}: make it smaller"
            )
        if self.whitespace not in ("flexible", "compact"):
            raise GrammarError(f'whitespace is "flexible" or "compact", got {self.whitespace!r}')
        for name in ("strict", "regex_unicode"):
            if not isinstance(getattr(self, name), bool):
                raise GrammarError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.start_after is not None and not (
            isinstance(self.start_after, str) and self.start_after
        ):
            raise GrammarError(f"start_after must spell a token, got {self.start_after!r}")
        _check_trigger(self.trigger, self.bound_token)
        if self.trigger and self.start_after:
            raise GrammarError("start_after and trigger both say where a grammar begins: give one")
        _CHECKS[self.kind](self.text)

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | str,
        *,
        whitespace: Whitespace = "flexible",
        strict: bool = True,
        start_after: str | None = None,
    ) -> "Grammar":
        """Returns the grammar of the JSON texts that a schema (draft 2020-12) describes.

        Properties come in the order of the schema, those that are only required after them.

        Raises:
            GrammarError: the schema is no JSON object, or too large.
        """
        return cls(
            kind="json_schema",
            text=schema if isinstance(schema, str) else _dump("json_schema", schema),
            whitespace=whitespace,
            strict=strict,
            start_after=start_after,
        )

    @classmethod
    def json_object(
        cls, *, whitespace: Whitespace = "flexible", start_after: str | None = None
    ) -> "Grammar":
        """Returns the grammar of any JSON object."""
        return cls(kind="json_object", text="{}", whitespace=whitespace, start_after=start_after)

    @classmethod
    def regex(
        cls, pattern: str, *, regex_unicode: bool = False, start_after: str | None = None
    ) -> "Grammar":
        """Returns the grammar of the texts that a regular expression matches as a whole.

        Raises:
            GrammarError: the pattern is empty, too large or too deep.
        """
        return cls(kind="regex", text=pattern, regex_unicode=regex_unicode, start_after=start_after)

    @classmethod
    def ebnf(cls, text: str, *, start_after: str | None = None) -> "Grammar":
        """Returns a context-free grammar: GBNF (`root ::= ...`) or Lark (`start: ...`).

        Raises:
            GrammarError: the text is empty, too large or too deep.
        """
        return cls(kind="ebnf", text=text, start_after=start_after)

    @classmethod
    def choice(cls, choices: Sequence[str], *, start_after: str | None = None) -> "Grammar":
        """Returns the grammar of exactly one of some texts.

        Raises:
            GrammarError: there are none or too many, or one is empty or no text.
        """
        is_list = isinstance(choices, Sequence) and not isinstance(choices, str | bytes)
        value = list(choices) if is_list else choices
        return cls(kind="choice", text=_dump("choice", value), start_after=start_after)

    @classmethod
    def tool_calls(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        begin: Begin,
        is_single: bool = False,
        start_after: str | None = None,
    ) -> "Grammar":
        """Returns the grammar of calls of these tools, in the model's own format.

        A call has parameters that the tool declares, in their order, and all that are required.

        Args:
            tools: each with name, parameters (a JSON schema of an object), and perhaps strict:
                True (also if absent) refuses keywords that cannot be enforced, False drops them.
            begin: `Begin`.
            is_single: one call at most.
            start_after: as of the other grammars.

        Raises:
            GrammarError: a tool has no name or no such schema.
        """
        kept = [
            {
                "name": one.get("name"),
                "parameters": one.get("parameters"),
                "strict": one.get("strict", True),
            }
            for one in tools
        ]
        text = _dump("tool_calls", {"begin": begin, "is_single": is_single, "tools": kept})
        return cls(kind="tool_calls", text=text, start_after=start_after)

    @classmethod
    def so_args(cls, args: Mapping[str, Any]) -> "Grammar":
        """Returns the grammar of DeepInfer's `so_args`, taken verbatim.

        Args:
            args: schema_type ("json", "regex" or "ebnf"), schema (text, or an object for "json"),
                and perhaps trigger_token_ids (the text is free until they appear as a whole) and
                bound_token_id (once it appears, the rest of the trigger is forced).

        Raises:
            GrammarError: a field is missing, unknown, or illegal.
        """
        unknown = [name for name in args if name not in _SO_FIELDS]
        if unknown:
            raise GrammarError(f"so_args has the fields {_SO_FIELDS}, got {unknown[0]!r} as well")
        kind, schema = _SO_KINDS.get(str(args.get("schema_type"))), args.get("schema")
        if kind is None or schema is None:
            raise GrammarError(
                f"so_args needs schema and schema_type, one of {list(_SO_KINDS)}; got {args!r:.200}"
            )
        if kind == "json_schema":
            found = cls.json_schema(schema)
        else:
            found = cls.regex(schema) if kind == "regex" else cls.ebnf(schema)
        trigger = args.get("trigger_token_ids") or ()
        if not isinstance(trigger, Sequence) or isinstance(trigger, str):
            raise GrammarError(f"trigger_token_ids must be a list of token ids, got {trigger!r}")
        bound = args.get("bound_token_id")
        return replace(found, trigger=tuple(trigger), bound_token=bound)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Grammar":
        """Returns the grammar that `dataclasses.asdict` took apart, also after a trip through JSON.

        Raises:
            GrammarError: it is none.
        """
        known = cls.__dataclass_fields__
        unknown = [name for name in fields if name not in known]
        missing = [name for name in ("kind", "text") if name not in fields]
        if unknown or missing:
            raise GrammarError(
                f"a grammar has the fields {list(known)} with kind and text at least, got "
                f"{sorted(fields)}"
            )
        return cls(**{**fields, "trigger": tuple(fields.get("trigger") or ())})

    def after(self, token: str | None) -> "Grammar":
        """Returns the grammar bound from after a token on, such as "</think>"; None: at once."""
        return replace(self, start_after=token)


def _check_trigger(trigger: Any, bound: Any) -> None:
    ids = (
        (*trigger, *(() if bound is None else (bound,))) if isinstance(trigger, tuple) else (None,)
    )
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
        raise GrammarError(
            f"trigger_token_ids and bound_token_id are token ids, got {trigger!r} and {bound!r}"
        )
    if bound is not None and not trigger:
        raise GrammarError("bound_token_id needs trigger_token_ids, which it forces: give them too")


def _check_brackets(text: str) -> None:
    """Raises GrammarError for brackets deeper than `MAX_NESTING`; text in quotes counts as well."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        if depth > MAX_NESTING:
            raise GrammarError(f"brackets may nest {MAX_NESTING} deep in a grammar: flatten it")


def _check_object(text: str) -> None:
    if text != "{}":
        raise GrammarError(f'json_object has the text "{{}}", got {text!r:.80}')


def _check_choices(text: str) -> None:
    choices = _load("choice", text)
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_ENUM:
        raise GrammarError(f"choice takes a list of 1..{MAX_ENUM} texts, got {text:.80}")
    bad = [one for one in choices if not isinstance(one, str) or not one]
    if bad:
        raise GrammarError(f"choices must be texts that are not empty, got {bad[0]!r}")


def _check_schema(text: str) -> None:
    schema = _load("json_schema", text)
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object here, got {text!r:.80}")
    # Breadth first: a schema may be deeper than Python's own stack.
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(MAX_NESTING):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, dict):
                below += [(f"{path}/{name}", one) for name, one in value.items()]
                enum = value.get("enum")
                if isinstance(enum, list) and len(enum) > MAX_ENUM:
                    raise GrammarError(
                        f"an enum may have {MAX_ENUM} values, {path}/enum has {len(enum)}"
                    )
            elif isinstance(value, list):
                below += [(f"{path}/{place}", one) for place, one in enumerate(value)]
        level = below
    if level:
        raise GrammarError(
            f"a JSON schema may be {MAX_NESTING} levels deep, {level[0][0]:.200} is deeper"
        )


def _check_tools(text: str) -> None:
    found = _load("tool_calls", text)
    tools = found.get("tools") if isinstance(found, dict) else None
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise GrammarError(f"tool_calls takes 1..{MAX_TOOLS} tools, got {text:.80}")
    if found.get("begin") not in get_args(Begin):
        raise GrammarError(f"begin is one of {get_args(Begin)}, got {found.get('begin')!r}")
    for flag in (found.get("is_single"), *(tool.get("strict") for tool in tools)):
        if not isinstance(flag, bool):
            raise GrammarError(f"is_single and strict must be True or False, got {flag!r}")
    for tool in tools:
        name, schema = tool.get("name"), tool.get("parameters")
        if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_:-]+", name):
            raise GrammarError(f"a tool's name is of letters, digits, _, - and :, got {name!r}")
        if not isinstance(schema, dict):
            raise GrammarError(f"tool {name!r} needs parameters, a JSON schema; got {schema!r:.80}")
        _check_schema(_dump("tool_calls", schema))


def _dump(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{kind} must be JSON values: {error}") from error


def _load(kind: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{kind} must be JSON text: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_CHECKS = {
    "json_schema": _check_schema,
    "json_object": _check_object,
    "regex": _check_brackets,
    "ebnf": _check_brackets,
    "choice": _check_choices,
    "tool_calls": _check_tools,
}
