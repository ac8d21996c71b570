"""A conversation on a terminal: what was said, how it goes on, and its commands."""

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from deepinfer_jax.chat.encode import ChatEncoder
    from deepinfer_jax.chat.parse import ToolCallDelta
    from deepinfer_jax.chat.session import Generator
    from deepinfer_jax.sampling.params import SamplingParams

Message = dict[str, Any]
# What a terminal would act on, except line ends and tabs.
_CONTROLS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


@dataclass
class Talk:
    """A conversation that grows by `answer`. Reasoning goes to stdout on a terminal only.

    options: of `ChatEncoder.prepare`, as thinking, reasoning_effort and tools.
    """

    llm: "Generator"
    encoder: "ChatEncoder"
    params: "SamplingParams"
    options: dict[str, Any]
    console: "Console"  # of stderr
    is_interactive: bool = field(default_factory=lambda: sys.stdout.isatty())
    messages: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URLs, of the next message

    def reset(self, system: str | None) -> None:
        """Forgets everything but the system message."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @property
    def open_calls(self) -> list[Message]:
        """Tool calls of the last message; their results come next."""
        return self.messages[-1].get("tool_calls", []) if self.messages else []

    def answer(self, text: str) -> None:
        """Streams the answer to a message. The turn is kept only if it is answered to its end.

        Raises:
            InputError: The message cannot be encoded, or the conversation has become too long.
        """
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        content = [*images, {"type": "text", "text": text}] if images else text
        self.go_on([*self.messages, {"role": "user", "content": content}])
        self.images = []

    def attach(self, name: str) -> None:
        """Keeps an image file for the next message.

        Raises:
            InputError: It is no image that can be read, or the model does not see.
        """
        from deepinfer_jax.vision.data_url import encode_data_url

        self.encoder.read(name, Path(name))
        self.images.append(encode_data_url(Path(name).read_bytes()))

    def go_on(self, turn: list[Message]) -> None:
        """Streams the answer to messages; errors as `answer`."""
        from deepinfer_jax.chat.session import stream_chat

        started = time.perf_counter()
        content, reasoning, count, reason = "", "", 0, None
        calls: list[Message] = []
        for delta in stream_chat(self.llm, self.encoder, turn, self.params, **self.options):
            if delta.reasoning:
                self._write_reasoning(delta.reasoning)
            if reasoning and delta.content and not content:
                self._write_reasoning("\n\n")
            self._write(delta.content)
            content, reasoning = content + delta.content, reasoning + delta.reasoning
            for part in delta.tool_calls:
                self._add_call(calls, part)
            count += len(delta.token_ids)
            reason = delta.finish_reason
        self._write("\n")
        if reasoning and not self.is_interactive:
            sys.stderr.write("\n")
        self.console.print(
            f"[dim]{count} tokens in {time.perf_counter() - started:.1f} s, finish: {reason}"
            + (f", seed {self.params.seed}" if self.params.temperature else "")
            + "[/dim]"
        )
        answer: Message = {"role": "assistant", "content": content}
        if reasoning:
            answer["reasoning_content"] = reasoning
        if calls:
            answer["tool_calls"] = calls
        self.messages = [*turn, answer]

    def _add_call(self, calls: list[Message], part: "ToolCallDelta") -> None:
        if part.id is not None:
            calls.append(
                {
                    "id": part.id,
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
            )
            self._write(f"\n[{part.name}] ")
        calls[part.index]["function"]["arguments"] += part.arguments
        self._write(part.arguments)

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(_CONTROLS) if self.is_interactive else text)
        sys.stdout.flush()

    def _write_reasoning(self, text: str) -> None:
        if self.is_interactive:
            self._write_dim(text.translate(_CONTROLS))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()

    def _write_dim(self, text: str) -> None:
        from rich.console import Console
        from rich.text import Text

        Console(soft_wrap=True).print(Text(text, style="dim"), end="")
        sys.stdout.flush()


def set_system(talk: Talk, text: str) -> str:
    """Changes the system message; without a text there is none."""
    rest = talk.messages if talk.system is None else talk.messages[1:]
    talk.messages = ([{"role": "system", "content": text}] if text else []) + rest
    return "The system message is changed." if text else "There is no system message."


def set_thinking(talk: Talk, text: str) -> str:
    """Turns reasoning on or off, or sets its effort."""
    from deepinfer_jax.chat.messages import EFFORTS
    from deepinfer_jax.errors import InputError

    if text not in ("on", "off", *EFFORTS):
        raise InputError(f"/think takes on, off or one of {', '.join(EFFORTS)}, got {text!r}")
    thinking = text != "off"
    effort = text if text in EFFORTS else None
    talk.options = talk.options | {"thinking": thinking, "reasoning_effort": effort}
    return f"Thinking is {'on' if thinking else 'off'}" + (f", effort {effort}." if effort else ".")


def attach_image(talk: Talk, text: str) -> str:
    """Attaches an image to the next message; without a name those that wait are dropped."""
    if not text:
        talk.images = []
        return "No image is attached."
    talk.attach(text)
    return f"{len(talk.images)} images go with the next message."


def set_tools(talk: Talk, text: str) -> str:
    """Reads the tools of a JSON file; without a name there are none."""
    from deepinfer_jax.chat.messages import build_conversation
    from deepinfer_jax.errors import InputError

    tools = _read_json(text) if text else None
    if tools is not None:
        if not isinstance(tools, list):
            raise InputError(f"/tools takes a file with a JSON list of tools, {text} has none")
        build_conversation("x", tools=tools)
    talk.options = talk.options | {"tools": tools}
    return f"{len(tools or [])} tools are declared."


def forget(talk: Talk, text: str) -> str:
    """Forgets all but the system message."""
    talk.reset(talk.system)
    return "The conversation is forgotten."


def save(talk: Talk, text: str) -> str:
    """Writes messages and options as JSON."""
    from deepinfer_jax.errors import InputError

    if not text:
        raise InputError("/save takes the name of a file")
    record = {"messages": talk.messages, **talk.options}
    try:
        Path(text).write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise InputError(f"/save cannot write {text}: {error}") from error
    return f"{len(talk.messages)} messages are in {text}."


def load(talk: Talk, text: str) -> str:
    """Reads what /save has written."""
    from deepinfer_jax.chat.messages import build_conversation
    from deepinfer_jax.errors import InputError

    found = _read_json(text)
    if not isinstance(found, dict) or not isinstance(found.get("messages"), list):
        raise InputError(f"/load takes a file that /save has written, {text} is none")
    options = {k: v for k, v in found.items() if k in ("thinking", "reasoning_effort", "tools")}
    messages = found["messages"]
    if messages:
        build_conversation([*messages, {"role": "user", "content": "x"}], **options)
    talk.messages, talk.options = messages, talk.options | options
    return f"{len(messages)} messages are loaded."


def regenerate(talk: Talk, text: str) -> str:
    """Answers the last message again, with another seed."""
    from deepinfer_jax.errors import InputError
    from deepinfer_jax.sampling.random import fresh_seed

    if not talk.messages or talk.messages[-1]["role"] != "assistant":
        raise InputError("/regen answers a message again, and there is none yet")
    talk.params = replace(talk.params, seed=fresh_seed())
    talk.go_on(talk.messages[:-1])
    return ""


def stats(talk: Talk, text: str) -> str:
    """Returns what the engine has done so far."""
    from deepinfer_jax.llm import LLM

    if not isinstance(talk.llm, LLM):
        return "Only an LLM keeps statistics."
    found = talk.llm.stats()
    drafts = f"{sum(found.accepted)} of {sum(found.verified)} drafts accepted"
    return (
        f"{found.counters.get('tokens', 0)} tokens in {found.counters.get('steps', 0)} steps, "
        f"{drafts}, {found.cache.hit_tokens} prompt tokens reused, "
        f"{found.cache.free} of {found.blocks} cache blocks free"
    )


#: Command -> (arguments, what it does, how).
COMMANDS: "dict[str, tuple[str, str, Callable[[Talk, str], str]]]" = {
    "/system": ("[TEXT]", "changes the system message", set_system),
    "/think": ("on|off|EFFORT", "turns reasoning on or off", set_thinking),
    "/image": ("[FILE]", "shows an image with the next message", attach_image),
    "/tools": ("[FILE]", "declares the tools of a JSON file", set_tools),
    "/regen": ("", "answers again with another seed", regenerate),
    "/save": ("FILE", "writes the conversation", save),
    "/load": ("FILE", "reads it back", load),
    "/stats": ("", "shows what the engine has done", stats),
    "/reset": ("", "forgets the conversation (so does /clear)", forget),
}


def _read_json(name: str) -> Any:
    from deepinfer_jax.errors import InputError

    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{name or 'the file'} must be a readable JSON file: {error}") from error
