"""What a body says about calls of tools, and the conversation that leads to them (io.md 2.8)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_jax.chat.tools import call_grammar
from deepinfer_jax.grammar.spec import Begin, Grammar
from deepinfer_jax.serve.errors import bad_field
from deepinfer_jax.serve.protocols import CHAT, MESSAGES, Converted, Protocol, convert

if TYPE_CHECKING:
    import deepseek_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Which calls an answer may have.

    tools: that may be called. begin: where calls may come. strict: names of the strict tools -> the
    schemas of their parameters as they were sent: what recipe makes of them lacks the enums of
    integers, for one. is_single: one call at most.
    """

    tools: "tuple[deepseek_recipe.ToolDefinition, ...]"
    begin: Begin
    strict: Mapping[str, Any]
    is_single: bool

    @property
    def is_promised(self) -> bool:
        """Whether the client was promised something about the calls."""
        return bool(self.tools) and (self.begin != "auto" or bool(self.strict))

    def grammar(self, *, is_always: bool) -> Grammar | None:
        """Returns `call_grammar` of these."""
        return call_grammar(
            self.tools,
            begin=self.begin,
            strict=self.strict,
            is_single=self.is_single,
            is_always=is_always,
        )


def convert_calls(
    protocol: Protocol, given: dict[str, Any], options: "deepseek_recipe.ConversionOptions"
) -> tuple[Converted, Calls]:
    """Returns the conversation of checked fields, and the calls that its answer may have.

    Recipe opens the calls in the prompt if one must be made, which it does not do with reasoning,
    nor for "any" of Messages. The prompt is the usual one then, and the grammar alone requires a
    call.

    Raises:
        ApiError: 400; the field at fault is named.
    """
    choice = given.get("tool_choice")
    kind, name = _kind(choice), _name(choice)
    begin: Begin = "auto"
    if kind not in ("required", "any", "function", "tool"):
        converted = convert(protocol, given, options)
    else:
        usual = {"type": "auto"} if protocol is MESSAGES else "auto"
        converted = convert(protocol, given | {"tool_choice": usual}, options, said=given)
        begin = "required"
        if kind != "any" and not converted.conversation.thinking_mode:
            converted, begin = convert(protocol, given, options), "opened"
    tools = tuple(converted.conversation.tools)
    if begin != "auto" and not tools:
        raise bad_field("tool_choice", "auto or none without tools", choice)
    if begin == "required" and name is not None:
        tools = tuple(tool for tool in tools if name in (tool.name, tool.name.split("::")[-1]))
        if not tools:
            raise bad_field("tool_choice", "the name of a tool in tools", choice)
    return converted, Calls(
        tools=tools,
        begin=begin,
        strict=dict(_strict(protocol, given, "")) if tools else {},
        is_single=_is_single(given, choice),
    )


def _kind(choice: Any) -> Any:
    return choice.get("type") if isinstance(choice, Mapping) else choice


def _name(choice: Any) -> str | None:
    """Returns the name of the one tool that must be called."""
    if not isinstance(choice, Mapping):
        return None
    inner = choice.get("function")
    name = (inner if isinstance(inner, Mapping) else choice).get("name")
    return name if isinstance(name, str) else None


def _is_single(given: Mapping[str, Any], choice: Any) -> bool:
    if not isinstance(choice, Mapping) or "disable_parallel_tool_use" not in choice:
        return not given.get("parallel_tool_calls", True)
    single = choice["disable_parallel_tool_use"]
    if not isinstance(single, bool):
        raise bad_field("tool_choice.disable_parallel_tool_use", "true or false", single)
    return single


def _strict(
    protocol: Protocol, given: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name, schema) of strict tools; recipe has checked what it reads of them."""
    for number, entry in enumerate(given.get("tools", ())):
        if entry.get("type") == "namespace":
            yield from _strict(protocol, entry, f"{entry['name']}::")
        tool = entry.get("function", {}) if protocol is CHAT else entry
        strict = tool.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise bad_field(f"tools[{number}].strict", "true or false", strict)
        if strict:
            schema = tool.get("input_schema" if protocol is MESSAGES else "parameters")
            yield prefix + tool["name"], schema or {}
