"""The V4.1 conversation text of an item, written directly for speed.

deepseek-recipe defines this format; `recipe_text` renders the same text through it, and a test
holds both equal on every task and mode.
"""

import json
import re

from deepinfer_jax.training.corpus.records import Call, Item, Message, Tool

# The fullwidth bar of every control token.
BAR = "\uff5c"
BOS, EOS = f"<{BAR}begin▁of▁sentence{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"
PAD = f"<{BAR}▁pad▁{BAR}>"
SYSTEM, USER, ASSISTANT = f"<{BAR}System{BAR}>", f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
IMAGE = f"<{BAR}image{BAR}>"
THINK, THINK_END, DSML = "<think>", "</think>", f"{BAR}DSML{BAR}"

_EFFORT = {"low": 50, "high": 75, "max": 100}
_EFFORT_TEXT = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
_TOOLS_HEAD = f"""\n\n## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)
_FORMAT_HEAD = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


def _tools_text(tools: tuple[Tool, ...]) -> str:
    lines = [
        f'{{"name": {json.dumps(t.name)}, "description": {json.dumps(t.description)}, '
        f'"parameters": {t.parameters}}}'
        for t in tools
    ]
    return _TOOLS_HEAD + "\n".join(lines) + _TOOLS_TAIL


def calls_text(calls: tuple[Call, ...]) -> str:
    """Returns the DSML block of tool calls, without the blank lines before it."""
    lines = [f"<{DSML} calls>"]
    for call in calls:
        lines.append(f'<{DSML} invoke name="{call.name}">')
        for name, value in json.loads(call.arguments).items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value)
            flag = "true" if is_text else "false"
            lines.append(
                f'<{DSML} parameter name="{name}" string="{flag}">{text}</{DSML} parameter>'
            )
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return "\n".join(lines)


_INVOKE = re.compile(rf'<{DSML} invoke name="([^"]+)">\n((?:.|\n)*?)</{DSML} invoke>\n')
_PARAMETER = re.compile(
    rf'<{DSML} parameter name="([^"]+)" string="(true|false)">((?:.|\n)*?)</{DSML} parameter>\n'
)


def parse_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """Returns the content before a DSML block and its calls.

    Raises:
        ValueError: the block is not exactly in the V4.1 form.
    """
    content, opened, rest = text.partition(f"\n\n<{DSML} calls>\n")
    if not opened:
        if DSML in text:
            raise ValueError("a DSML tag outside a calls block.")
        return text, ()
    body = rest.removesuffix(f"</{DSML} calls>")
    if body == rest or _INVOKE.sub("", body):
        raise ValueError("the calls block is not a list of invokes.")
    calls = []
    for name, inner in _INVOKE.findall(body):
        if _PARAMETER.sub("", inner):
            raise ValueError("the invoke is not a list of parameters.")
        arguments = {
            key: value if is_text == "true" else json.loads(value)
            for key, is_text, value in _PARAMETER.findall(inner)
        }
        calls.append(Call(name=name, arguments=json.dumps(arguments)))
    if not calls:
        raise ValueError("the calls block is empty.")
    return content, tuple(calls)


def completion(message: Message, thinking: bool) -> str:
    """Returns what the model writes for a turn, without end of sentence."""
    text = f"{message.reasoning}{THINK_END}" if thinking else ""
    text += message.content
    return f"{text}\n\n{calls_text(message.calls)}" if message.calls else text


def _head(item: Item) -> tuple[str, tuple[Message, ...]]:
    """Returns the text up to the first turn that is not the leading system turn."""
    messages = item.messages
    system = ""
    if messages[0].role == "system":
        system, messages = messages[0].content, messages[1:]
    extra = _tools_text(item.tools) if item.tools else ""
    extra += f"{_FORMAT_HEAD}{item.schema}" if item.schema else ""
    effort = _EFFORT_TEXT.format(_EFFORT[item.effort]) if item.thinking else ""
    text = effort + system + extra
    return f"{BOS}{SYSTEM}{text}" if text else BOS, messages


def _turns(item: Item) -> list[str]:
    """Returns the text of every turn; the last is the expected completion alone."""
    head, messages = _head(item)
    parts = [head]
    opening = f"{ASSISTANT}{THINK if item.thinking else THINK_END}"
    for i, message in enumerate(messages):
        last = i + 1 == len(messages)
        if message.role == "assistant":
            # Reasoning of earlier turns stays only where tools are declared.
            keep = item.thinking and (last or bool(item.tools))
            parts.append(opening if keep or not item.thinking else f"{ASSISTANT}{THINK_END}")
            parts.append(completion(message, keep) + EOS)
        elif message.role == "tool":
            follows = messages[i - 1].role == "tool"
            parts.append("\n\n" if follows else USER)
            parts.append(f"<tool_result>{message.content}</tool_result>")
        elif message.role == "user":
            parts.append(f"{USER}{message.content}")
        else:
            raise ValueError(f"a {message.role} turn must be the first one.")
    return parts


def prompt_text(item: Item) -> str:
    """Returns the text that is given to the model: all but the expected completion."""
    return BOS + item.prompt if item.is_raw else "".join(_turns(item)[:-1])


def expected_text(item: Item) -> str:
    """Returns the text that the model should write, reasoning and end of sentence included."""
    return item.answer + EOS if item.is_raw else _turns(item)[-1]


def full_text(item: Item) -> str:
    """Returns the whole text of an item."""
    return f"{BOS}{item.prompt}{item.answer}{EOS}" if item.is_raw else "".join(_turns(item))
