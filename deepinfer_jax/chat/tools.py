"""When an answer's tool calls are held to a grammar, and to which (io.md 2.8)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_jax.grammar.spec import Begin, Grammar

if TYPE_CHECKING:
    from deepseek_recipe import ToolDefinition


def call_grammar(
    tools: "Sequence[ToolDefinition]",
    *,
    begin: Begin,
    strict: Mapping[str, Any],
    is_single: bool = False,
    is_always: bool = False,
) -> Grammar | None:
    """Returns the grammar of the calls of an answer, None if they are free.

    They are bound if a call must be made, if one is all there may be, and if a tool is strict.
    Of tools that are not strict, keywords that cannot be enforced are dropped.

    Args:
        tools: that the model may call; none leaves the answer free.
        begin: where calls may come.
        strict: names of the strict tools -> the schemas of their parameters.
        is_single: one call at most.
        is_always: bind the calls of any tool.
    """
    is_bound = begin != "auto" or is_single or is_always or strict
    if not tools or not is_bound:
        return None
    listed = [
        {
            "name": tool.name,
            "parameters": strict.get(tool.name, tool.parameters or {}),
            "strict": tool.name in strict,
        }
        for tool in tools
    ]
    return Grammar.tool_calls(listed, begin=begin, is_single=is_single)
