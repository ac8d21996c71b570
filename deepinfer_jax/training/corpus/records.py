"""Records of the corpus: messages, tools and checkable items."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. Roles: system, user, assistant, tool."""

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool schema; `parameters` is the text of a JSON schema."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One checkable item of the corpus.

    A conversation item has `messages`, whose last one is the assistant's expected turn. A raw item
    has none: its text is `prompt` + `answer`. `answer` is what `check` expects after the prompt,
    without reasoning. `meta` holds what the scorer of the task needs; `entities` are the strings
    that belong to the split of the item.
    """

    task: str
    key: str
    answer: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    thinking: bool = False
    effort: str = "high"
    tools: tuple[Tool, ...] = ()
    schema: str = ""
    entities: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_raw(self) -> bool:
        """Whether the item is plain text without a conversation."""
        return not self.messages
