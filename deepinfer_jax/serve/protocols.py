"""The three conversation protocols: their fields, and recipe's conversion both ways (io.md 1)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.request import normalise
from deepinfer_jax.chat.tokenizer import import_recipe
from deepinfer_jax.serve import fields
from deepinfer_jax.serve.errors import ApiError, bad_field

if TYPE_CHECKING:
    import deepseek_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One of the protocols. classes: what recipe's are called, before "Request" and "Response".

    ours: fields that recipe must not see: it ignores some and limits others. stop: its field of
    stop strings. id_prefix: of its responses. is_anthropic: whose errors it has.
    """

    classes: str
    rules: Mapping[str, fields.Rule]
    ours: frozenset[str]
    stop: str
    id_prefix: str
    is_anthropic: bool = False


_OURS = frozenset(fields.COMMON) - {"model", "stream", "temperature", "top_p", "metadata", "user"}
CHAT = Protocol(
    classes="ChatCompletion",
    rules=fields.CHAT,
    ours=_OURS | {"n", "chat_template_kwargs", "parallel_tool_calls", "modalities"},
    stop="stop",
    id_prefix="chatcmpl-",
)
RESPONSES = Protocol(
    classes="Responses",
    rules=fields.RESPONSES,
    ours=_OURS | {"parallel_tool_calls"},
    stop="",
    id_prefix="resp_",
)
MESSAGES = Protocol(
    classes="Messages",
    rules=fields.MESSAGES,
    ours=_OURS,
    stop="stop_sequences",
    id_prefix="msg_",
    is_anthropic=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A body as recipe reads it. generator: makes what turns one completion into its chunks."""

    request: "deepseek_recipe.ConversationRequest"
    generator: Callable[[str, str], Any]

    @property
    def conversation(self) -> "deepseek_recipe.Conversation":
        """What is rendered."""
        return self.request.conversation


def options_for(
    encoder: ChatEncoder, names: tuple[str, ...]
) -> "deepseek_recipe.ConversionOptions":
    """Returns how bodies are converted: the checkpoint's version and special tokens."""
    recipe = import_recipe()
    versions = {name: encoder.version for name in names}
    return (
        recipe.ConversionOptions()
        .with_special_tokens(encoder.special_tokens)
        .with_model_versions_by_name(versions)
    )


def convert(
    protocol: Protocol,
    given: dict[str, Any],
    options: "deepseek_recipe.ConversionOptions",
    said: dict[str, Any] | None = None,
) -> Converted:
    """Returns the conversation of checked fields. said: what the answer repeats of the body, if not
    these fields.

    Raises:
        ApiError: 400; the field at fault is named.
    """
    body = _for_recipe(protocol, given)
    try:
        return _convert(protocol, body, options, _for_recipe(protocol, said or given))
    except _recipe_errors() as error:
        text, status = _describe(error)
        place = _place(protocol, body, options, text)
        text = text.removeprefix(f".{place}: ")  # recipe names some places itself
        raise ApiError(status, f"{place}: {text}" if place else text, param=place) from error


def _convert(
    protocol: Protocol,
    body: dict[str, Any],
    options: "deepseek_recipe.ConversionOptions",
    said: dict[str, Any],
) -> Converted:
    kind = getattr(import_recipe(), f"{protocol.classes}Request")
    request = kind(body)
    if protocol is not RESPONSES:
        converted = request.convert(options)
        return Converted(
            request=converted,
            generator=lambda id, model: kind.chunk_generator(converted, id, model),
        )
    echo, names = kind(said).echo(), request.namespace_tool_map(options)
    converted = request.convert(options)

    def generator(id: str, model: str) -> Any:
        made = kind.chunk_generator(converted, id, model)
        return made.with_namespace_tool_map(names).with_echo(echo)

    return Converted(request=converted, generator=generator)


def _for_recipe(protocol: Protocol, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that recipe converts, under the names it knows."""
    body = {name: value for name, value in given.items() if name not in protocol.ours}
    if protocol is CHAT:
        body = normalise(body)
        template = given.get("chat_template_kwargs", {})
        for name, value in template.items():
            if name not in ("thinking", "enable_thinking") or not isinstance(value, bool):
                rule = "an object with thinking (true or false)"
                raise bad_field("chat_template_kwargs", rule, template)
            body.setdefault("thinking", {"type": "enabled" if value else "disabled"})
    if protocol is MESSAGES:
        config = body.get("output_config", {})
        if "format" in config:  # recipe would drop it
            body["output_config"] = {k: v for k, v in config.items() if k != "format"}
    return body


def _recipe_errors() -> tuple[type[Exception], ...]:
    return (import_recipe().ConversionError, ValueError)


def _describe(error: Exception) -> tuple[str, int]:
    """Returns recipe's own words and the status it wants."""
    if isinstance(error, ValueError):
        return str(error).removeprefix("invalid request body: "), 400
    found = json.loads(getattr(error, "body", "{}"))
    return found["error"]["message"], getattr(error, "status_code", 400)


def _place(
    protocol: Protocol,
    body: dict[str, Any],
    options: "deepseek_recipe.ConversionOptions",
    text: str,
) -> str | None:
    """Returns the field, or the entry of a list, without which recipe no longer says `text`."""

    def says(changed: dict[str, Any]) -> str:
        try:
            _convert(protocol, changed, options, changed)
        except _recipe_errors() as error:
            return _describe(error)[0]
        return ""

    # Last what cannot be missing, because recipe then says only that.
    names = sorted(body, key=lambda name: name in ("messages", "input"))
    for name in names:
        value = body[name]
        if name == "model" or says({k: v for k, v in body.items() if k != name}) == text:
            continue
        if isinstance(value, list):
            for number, entry in enumerate(value[:32]):
                if says(body | {name: [entry]}) == text:
                    return f"{name}[{number}]"
        return name
    return None
