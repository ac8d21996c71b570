"""The same conversation through deepseek-recipe, which defines the format."""

import json
from typing import TYPE_CHECKING

from deepinfer_jax.training.corpus.records import Item
from deepinfer_jax.training.corpus.template import ASSISTANT, EOS, THINK, THINK_END

if TYPE_CHECKING:
    import deepseek_recipe


def recipe_conversation(item: Item, *, whole: bool) -> "deepseek_recipe.Conversation":
    """Returns an item as a conversation of recipe: the prompt, or with the expected turn."""
    import deepseek_recipe as recipe

    messages: list[recipe.Message] = []
    for i, m in enumerate(item.messages if whole else item.messages[:-1]):
        if m.role == "system":
            messages.append(recipe.SystemMessage(m.content))
        elif m.role == "user":
            messages.append(recipe.UserMessage(m.content))
        elif m.role == "tool":
            messages.append(recipe.ToolMessage(m.content, str(i)))
        else:
            calls = [recipe.ToolCall(str(i), c.name, c.arguments) for c in m.calls]
            open_end = i + 1 == len(item.messages) and not calls
            messages.append(
                recipe.AssistantMessage(m.content, m.reasoning or None, calls or None, open_end)
            )
    tools = [
        recipe.ToolDefinition(t.name, t.description, json.loads(t.parameters)) for t in item.tools
    ]
    return recipe.Conversation(
        messages,
        thinking_mode=item.thinking,
        tools=tools or None,
        reasoning_effort=item.effort,  # pyright: ignore[reportArgumentType]
        response_schema=json.loads(item.schema) if item.schema else None,
    )


def recipe_prompt(item: Item) -> str:
    """Returns the prompt of a conversation item as recipe renders it."""
    import deepseek_recipe as recipe

    encoding = recipe.DeepseekV41Encoding()
    return encoding.render_conversation(recipe_conversation(item, whole=False)).prompt


def recipe_text(item: Item) -> str:
    """Returns the whole text of a conversation item as recipe renders it."""
    import deepseek_recipe as recipe

    encoding = recipe.DeepseekV41Encoding()
    text = encoding.render_conversation(recipe_conversation(item, whole=True)).prompt
    if item.messages[-1].calls:
        # Recipe opens the next turn after a finished one.
        return text.removesuffix(ASSISTANT + (THINK if item.thinking else THINK_END))
    return text + EOS
