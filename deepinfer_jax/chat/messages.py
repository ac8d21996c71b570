"""Messages, tools and options as a checked `deepseek_recipe.Conversation`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_jax.chat import fields
from deepinfer_jax.chat.tokenizer import import_recipe
from deepinfer_jax.errors import InputError

if TYPE_CHECKING:
    from deepseek_recipe import Conversation, Message, ToolDefinition

Messages = str | Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
#: What a caller may say -> the tier that is rendered.
EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")


def build_conversation(
    messages: Messages,
    *,
    thinking: bool = True,
    reasoning_effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    response_format: Mapping[str, Any] | None = None,
    image_token: str | None = None,
) -> "Conversation":
    """Returns the conversation that recipe renders.

    Args:
        messages: Chat Completions messages; a text stands for one user message. The role
            `developer` is `system`; `latest_reminder`, an assistant's `reasoning_content` and, on
            the last one, `prefix: true` (continue this text) are DeepSeek's own. Empty system
            messages are left out.
        thinking: Whether the answer begins with reasoning.
        reasoning_effort: One of `EFFORTS`; None is the model's default (high).
        tools: Chat Completions function tools.
        tool_choice: "auto", "none", "required", or the one function to call.
        response_format: A Chat Completions response format: its schema becomes part of the prompt.
        image_token: Spelling of the token for an image (`message_images`); None: recipe's own.

    Raises:
        InputError: A field is unknown, absent, of a wrong type or in a wrong place.
    """
    fields.boolean(thinking, "thinking")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    many = fields.items(messages, "messages")
    last = len(many) - 1
    built = [
        _message(m, f"messages[{n}]", n == last, thinking, image_token) for n, m in enumerate(many)
    ]
    _check_tool_results(built)
    built = [message for message in built if message.role != "system" or message.content]
    if not built:
        raise fields.fail("messages", "more than empty system messages", messages)
    if reasoning_effort is not None:
        fields.one_of(reasoning_effort, "reasoning_effort", tuple(EFFORTS))
        if not thinking:
            raise fields.fail(
                "reasoning_effort", "None without thinking", reasoning_effort, "leave it out"
            )
    definitions = [] if tools is None else _tools(tools)
    choice, definitions = _choice(tool_choice, definitions)
    response = _response(response_format)
    if built[-1].prefix and (definitions or "response_format" in response):
        raise InputError(
            f"messages[{last}].prefix continues a text, which takes neither tools nor "
            'response_format {"type": "json_object"}: remove one or the other'
        )
    try:
        return import_recipe().Conversation(
            built,
            thinking_mode=thinking,
            tools=definitions or None,
            tool_choice=choice,
            reasoning_effort=EFFORTS[reasoning_effort] if reasoning_effort else None,
            **response,
        )
    except ValueError as error:
        raise InputError(f"the conversation cannot be rendered: {error}") from error


def message_images(messages: Messages) -> list[tuple[str, Any]]:
    """Returns the images of checked messages in order: where each stands, and its source.

    Images stand in user messages, as parts (`fields.mixed_content`).
    """
    found: list[tuple[str, Any]] = []
    for number, message in enumerate(() if isinstance(messages, str) else messages):
        if message.get("role") != "user" or isinstance(message.get("content"), str):
            continue
        where = f"messages[{number}].content"
        texts, sources = fields.mixed_content(message.get("content"), where)
        places = [f"{where}[{place}]" for place, one in enumerate(texts) if one is None]
        found += zip(places, sources, strict=True)
    return found


def _message(
    value: object, where: str, is_last: bool, thinking: bool, image_token: str | None
) -> "Message":
    role = value.get("role") if isinstance(value, Mapping) else None
    if role is None:
        raise fields.fail(where, "an object with a role", value)
    fields.one_of(role, f"{where}.role", ROLES)
    recipe = import_recipe()
    if role == "assistant":
        return _assistant(value, where, is_last, thinking)
    if role == "tool":
        own = fields.given(value, where, ("role", "content", "tool_call_id"))
        call = fields.text(own.get("tool_call_id"), f"{where}.tool_call_id")
        return recipe.ToolMessage(fields.content(own.get("content"), f"{where}.content"), call)
    own = fields.given(value, where, ("role", "content"))
    if role == "user":
        return _user(own.get("content"), f"{where}.content", image_token)
    body = fields.content(own.get("content"), f"{where}.content")
    return (
        recipe.LatestReminderMessage(body)
        if role == "latest_reminder"
        else recipe.SystemMessage(body)
    )


def _user(content: object, where: str, image_token: str | None) -> "Message":
    """Returns a user's turn. With images it is made by recipe's own reading of such a body.

    Its constructor would take the spelling of the image token in a text for an image.
    """
    recipe = import_recipe()
    texts, images = fields.mixed_content(content, where)
    if not images:
        return recipe.UserMessage("\n\n".join(one for one in texts if one is not None))
    image = {"type": "image_url", "image_url": {"url": "https://image.invalid"}}  # only its place
    parts = [image if one is None else {"type": "text", "text": one} for one in texts]
    body = {"model": "any", "messages": [{"role": "user", "content": parts}]}
    options = (
        recipe.ConversionOptions()
        .with_special_tokens(recipe.SpecialTokens(image=image_token))
        .with_model_versions_by_name({"any": recipe.ModelVersion.DeepseekV41Flash})
    )
    request = recipe.ChatCompletionRequest(json.dumps(body)).convert(options)
    return request.conversation.messages[0]


def _assistant(value: object, where: str, is_last: bool, thinking: bool) -> "Message":
    """Returns a turn of the model. Without thinking its reasoning is dropped, as recipe does."""
    allowed = ("role", "content", "reasoning_content", "tool_calls", "prefix")
    own = fields.given(value, where, allowed)
    if "content" not in own and "tool_calls" not in own:
        raise InputError(f"{where} must have content or tool_calls, and has neither: add one")
    prefix = fields.boolean(own.get("prefix", False), f"{where}.prefix")
    if prefix and (not is_last or "tool_calls" in own):
        raise fields.fail(
            f"{where}.prefix", "false", prefix, "only a last message without tool calls continues"
        )
    calls = None
    if "tool_calls" in own:
        listed = fields.items(own["tool_calls"], f"{where}.tool_calls")
        calls = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(listed)]
    reasoning = fields.text(own.get("reasoning_content", ""), f"{where}.reasoning_content")
    return import_recipe().AssistantMessage(
        fields.content(own.get("content", ""), f"{where}.content"),
        reasoning if thinking else None,
        calls,
        prefix,
    )


def _call(value: object, where: str) -> Any:
    own = fields.given(value, where, ("id", "type", "function", "index"))
    fields.one_of(own.get("type", "function"), f"{where}.type", ("function",))
    function = fields.given(own.get("function"), f"{where}.function", ("name", "arguments"))
    return import_recipe().ToolCall(
        fields.text(own.get("id"), f"{where}.id"),
        fields.text(function.get("name"), f"{where}.function.name"),
        fields.text(function.get("arguments"), f"{where}.function.arguments"),
    )


def _check_tool_results(messages: Sequence["Message"]) -> None:
    """Raises unless each tool call has its result right behind it, and each result its call."""
    open_ids: list[str] = []
    caller = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "tool":
            if message.tool_call_id not in open_ids:
                rule = f"an unanswered call of the assistant before it ({open_ids})"
                raise fields.fail(f"{where}.tool_call_id", rule, message.tool_call_id)
            open_ids.remove(message.tool_call_id)
            continue
        if open_ids:
            break
        open_ids = [call.id for call in message.tool_calls or ()]
        caller = number
        if len(set(open_ids)) < len(open_ids):
            raise fields.fail(f"{where}.tool_calls", "calls with different ids", open_ids)
    if open_ids:
        raise InputError(
            f"messages[{caller}].tool_calls must be followed by one tool message per call, and "
            f"{open_ids} have none: add them, or remove the calls"
        )


def _tools(value: object) -> list["ToolDefinition"]:
    names: list[str] = []
    definitions = []
    for number, tool in enumerate(fields.items(value, "tools")):
        where = f"tools[{number}]"
        own = fields.given(tool, where, ("type", "function"))
        fields.one_of(own.get("type"), f"{where}.type", ("function",))
        allowed = ("name", "description", "parameters", "strict")
        function = fields.given(own.get("function"), f"{where}.function", allowed)
        name = fields.text(function.get("name"), f"{where}.function.name")
        if not _TOOL_NAME.fullmatch(name) or name in names:
            rule = "a name of letters, digits, _ and - that no other tool has"
            raise fields.fail(f"{where}.function.name", rule, name)
        names.append(name)
        description = function.get("description")
        strict = function.get("strict")
        definitions.append(
            import_recipe().ToolDefinition(
                name,
                None
                if description is None
                else fields.text(description, f"{where}.function.description"),
                _schema(function.get("parameters", {}), f"{where}.function.parameters"),
                None if strict is None else fields.boolean(strict, f"{where}.function.strict"),
            )
        )
    return definitions


def _schema(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise fields.fail(where, "a JSON schema (an object)", value)
    try:
        written = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise fields.fail(where, "plain JSON", value, str(error)) from error
    return json.loads(fields.text(written, where))


def _choice(
    value: str | Mapping[str, Any], tools: list["ToolDefinition"]
) -> tuple[str, list["ToolDefinition"]]:
    """Returns recipe's tool choice and the tools to declare: the one of a named choice alone."""
    if isinstance(value, Mapping):
        own = fields.given(value, "tool_choice", ("type", "function"))
        fields.one_of(own.get("type"), "tool_choice.type", ("function",))
        function = fields.given(own.get("function"), "tool_choice.function", ("name",))
        names = tuple(tool.name for tool in tools)
        name = fields.one_of(function.get("name"), "tool_choice.function.name", names)
        return "required", [tool for tool in tools if tool.name == name]
    choice = fields.one_of(value, "tool_choice", ("auto", "none", "required"))
    if choice == "required" and not tools:
        raise fields.fail("tool_choice", "auto or none without tools", choice, "declare the tools")
    return choice, tools


def _response(value: object) -> dict[str, Any]:
    """Returns the keywords of recipe's `Conversation` for a response format."""
    if value is None:
        return {}
    where = "response_format"
    own = fields.given(value, where, ("type", "json_schema", "regex"))
    legal = ("text", "json_object", "json_schema", "regex")
    kind = fields.one_of(own.get("type"), f"{where}.type", legal)
    if own.keys() != ({"type", kind} if kind in legal[2:] else {"type"}):
        raise fields.fail(where, f"{kind} with the fields of that type alone", value)
    if kind == "regex":
        return {"response_regex": fields.text(own["regex"], f"{where}.regex")}
    if kind == "json_schema":
        allowed = ("name", "description", "schema", "strict")
        described = fields.given(own["json_schema"], f"{where}.json_schema", allowed)
        schema = described.get("schema", {})
        return {"response_schema": _schema(schema, f"{where}.json_schema.schema")}
    return {} if kind == "text" else {"response_format": kind}
