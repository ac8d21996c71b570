"""Chat Completions bodies: names made uniform, and split into prompt and sampling arguments."""

from collections.abc import Mapping
from typing import Any

from deepinfer_jax.chat import fields
from deepinfer_jax.errors import InputError

_PROMPT = ("messages", "tools", "tool_choice", "reasoning_effort", "response_format", "thinking")
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "stop")
_NEITHER = ("model", "stream", "stream_options", "user")


def normalise(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body as recipe takes it; recipe ignores `max_completion_tokens`, for one.

    `max_completion_tokens` becomes `max_tokens`, the role `developer` becomes `system`.

    Raises:
        InputError: Both limits are given and differ.
    """
    result = dict(body)
    limit = result.pop("max_completion_tokens", None)
    if limit is not None:
        if result.get("max_tokens") not in (None, limit):
            raise InputError(
                "max_tokens and max_completion_tokens must be equal if both are given, got "
                f"{result['max_tokens']!r} and {limit!r}: give max_completion_tokens alone"
            )
        result["max_tokens"] = limit
    messages = result.get("messages")
    if isinstance(messages, list):
        result["messages"] = [
            {**message, "role": "system"}
            if isinstance(message, Mapping) and message.get("role") == "developer"
            else message
            for message in messages
        ]
    return result


def prompt_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `ChatEncoder.prepare` in a body; thinking is on unless turned off.

    Raises:
        InputError: A field is unknown, or `thinking` and `reasoning_effort` contradict each other.
    """
    own = fields.given(normalise(body), "the body", _PROMPT + _SAMPLING + _NEITHER)
    fields.items(own.get("messages"), "messages")
    arguments = {name: own[name] for name in _PROMPT if name in own}
    if "thinking" in own:
        kind = fields.given(own["thinking"], "thinking", ("type",)).get("type")
        legal = ("enabled", "adaptive", "disabled")
        arguments["thinking"] = fields.one_of(kind, "thinking.type", legal) != "disabled"
    if own.get("reasoning_effort") == "none":
        if arguments.get("thinking") is True:
            raise InputError(
                'reasoning_effort="none" turns thinking off, but thinking.type is '
                f"{own['thinking']['type']!r}: give one of them"
            )
        del arguments["reasoning_effort"]
        arguments["thinking"] = False
    return arguments


def sampling_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `SamplingParams` fields that a body asks for, with its own values.

    Recipe's conversion would replace `temperature` when thinking and `top_p` always.
    """
    own = normalise(body)
    arguments = {name: own[name] for name in _SAMPLING if own.get(name) is not None}
    if "stop" in arguments:
        stop = arguments["stop"]
        arguments["stop"] = (stop,) if isinstance(stop, str) else tuple(fields.items(stop, "stop"))
    return arguments
