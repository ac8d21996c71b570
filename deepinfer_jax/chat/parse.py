"""Completion ids to reasoning, content and tool calls, at once or as they arrive."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.tokenizer import import_recipe
from deepinfer_jax.engine.output import FinishReason

if TYPE_CHECKING:
    from deepseek_recipe import Conversation, ParsingOptions

ChatFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the model asks for. `arguments` is the JSON text it wrote, unchanged.

    id: "call_n", n counting the calls of the conversation, so that equal tokens give equal results.
    problem: why the call cannot be made as it is (unknown tool, broken JSON), None if it can.
    """

    id: str
    name: str
    arguments: str
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """An answer. reasoning: None without thinking."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the assistant message to append to the messages of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """More of tool call `index`. `id` and `name` come once, in its first delta."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """What an answer grew by; the last one carries the finish reason.

    logprobs: one float for every id, None unless asked for. `LLM.stream_chat` yields these, and
    raises before the first.

    Examples:
        >>> short = di.SamplingParams(temperature=0, max_tokens=4)
        >>> parts = list(llm.stream_chat("What is 17 + 25?", short))
        >>> parts[-1].finish_reason
        'length'
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finish_reason: ChatFinishReason | None = None


class ChatParser:
    """Reads one completion of a conversation: `push` ids as they come, then `finish` once.

    `</think>` and tool-call tags count by token id, so a model that quotes them does not end its
    reasoning. Stop strings are matched in the content, not in reasoning or tool calls; when one is
    complete `is_finished` turns true, and further ids are dropped.
    """

    def __init__(
        self, encoder: ChatEncoder, conversation: "Conversation", stop: Sequence[str] = ()
    ) -> None:
        """Starts where the prompt of the conversation ends."""
        recipe = import_recipe()
        self._recipe = recipe
        self._eos = encoder.config.eos_token_id
        self._calls_before = sum(len(m.tool_calls or ()) for m in conversation.messages)
        self._tools = {tool.name for tool in conversation.tools}
        self.options = parsing_options(encoder, conversation, stop)
        request = recipe.ConversationRequest(conversation, encoder.version)
        # The name and id of a response are the server's concern; neither reaches a result here.
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "chat", "chat")
        self._processor = recipe.StreamProcessor(generator, self.options, encoder.recipe_tokenizer)
        self._response = recipe.ChatCompletionResponse("chat", "chat", 0, 0, 0)
        self._take(self._processor.push(recipe.InferenceChunk.ready()))
        self._message: ChatMessage | None = None
        self.finish_reason: ChatFinishReason | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended: a stop string is complete, or `finish` was called."""
        return self.finish_reason is not None

    @property
    def message(self) -> ChatMessage:
        """The whole answer, after the end."""
        if self._message is None:
            raise AssertionError("the answer was read before finish() was called")
        return self._message

    def push(self, token_ids: Sequence[int]) -> ChatDelta:
        """Returns what the ids add; may hold text back until it is certain. EOS is not shown."""
        parts, used = _Parts(self._calls_before), 0
        for token in token_ids:  # one by one, so that none behind a stop string is counted
            if self.is_finished:
                break
            used += 1
            if token == self._eos:  # recipe would show it as text
                continue
            self._take(self._processor.push(self._recipe.InferenceChunk.tokens([token])), parts)
            if self._processor.finished:
                self._end("stop", parts)
        return parts.delta(tuple(token_ids[:used]), self.finish_reason)

    def push_text(self, text: str) -> ChatDelta:
        """Returns what a text adds; here `</think>` and tags count by their spelling."""
        parts = _Parts(self._calls_before)
        if not self.is_finished:
            self._take(self._processor.push(self._recipe.InferenceChunk.text(text)), parts)
            if self._processor.finished:
                self._end("stop", parts)
        return parts.delta((), self.finish_reason)

    def finish(self, reason: FinishReason) -> ChatDelta:
        """Returns what was held back. reason: why the completion ended."""
        parts = _Parts(self._calls_before)
        if not self.is_finished:
            kinds = self._recipe.InferenceFinishReason
            kind = kinds.Stop if reason == "stop" else kinds.Length
            self._take(self._processor.push(self._recipe.InferenceChunk.finish(kind)), parts)
            self._end(reason, parts)
        return parts.delta((), self.finish_reason)

    def _end(self, reason: FinishReason, parts: "_Parts") -> None:
        self._take(self._processor.finish(), parts)
        choice = json.loads(self._response.to_json())["choices"][0]
        is_call = reason == "stop" and choice["finish_reason"] == "tool_calls"
        self.finish_reason = "tool_calls" if is_call else reason
        message = choice["message"]
        thinks = self.options.thinking_initial_stage is not None
        self._message = ChatMessage(
            content=message.get("content") or "",
            reasoning=(message.get("reasoning_content") or "") if thinks else None,
            tool_calls=tuple(
                self._tool_call(call_id(self._calls_before, index), call)
                for index, call in enumerate(message.get("tool_calls") or ())
            ),
        )

    def _tool_call(self, id: str, call: dict[str, Any]) -> ToolCall:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        problem = None
        if name not in self._tools:
            problem = f"no tool is named {name!r}"
        else:
            try:
                if not isinstance(json.loads(arguments), dict):
                    problem = "the arguments are no JSON object"
            except ValueError as error:
                problem = f"the arguments are no JSON: {error}"
        return ToolCall(id=id, name=name, arguments=arguments, problem=problem)

    def _take(self, chunks: list[Any], parts: "_Parts | None" = None) -> None:
        for chunk in chunks:
            if parts is not None:
                parts.add(json.loads(chunk.to_json()))
            self._response.accumulate(chunk)  # consumes the chunk


class _Parts:
    """Collects the deltas of several chunks."""

    def __init__(self, calls_before: int) -> None:
        self.calls_before = calls_before
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCallDelta] = []

    def add(self, chunk: dict[str, Any]) -> None:
        delta = chunk["choices"][0]["delta"]
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        self.calls += [
            ToolCallDelta(
                index=call["index"],
                id=call_id(self.calls_before, call["index"]) if "id" in call else None,
                name=call["function"].get("name"),
                arguments=call["function"].get("arguments") or "",
            )
            for call in delta.get("tool_calls") or ()
        ]

    def delta(self, token_ids: tuple[int, ...], reason: ChatFinishReason | None) -> ChatDelta:
        return ChatDelta(
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=tuple(self.calls),
            token_ids=token_ids,
            finish_reason=reason,
        )


def call_id(calls_before: int, index: int) -> str:
    """Returns the id of an answer's call; recipe's own are random."""
    return f"call_{calls_before + index}"


def parsing_options(
    encoder: ChatEncoder, conversation: "Conversation", stop: Sequence[str] = ()
) -> "ParsingOptions":
    """Returns recipe's options for reading the answer to a conversation."""
    recipe = import_recipe()
    stages = recipe.ThinkingInitialStage
    stage = None
    if conversation.thinking_mode:
        last = conversation.messages[-1]
        stage = stages.ReasoningStart
        if last.prefix and last.content:
            stage = stages.ContentContinuation
        elif last.prefix and last.reasoning_content:
            stage = stages.ReasoningContinuation
    return recipe.ParsingOptions(
        parse_tool_calls=bool(conversation.tools) and conversation.tool_choice != "none",
        starts_in_tool_calls=conversation.tool_choice == "required",
        thinking_initial_stage=stage,
        stop_sequences=list(stop),
        special_tokens=encoder.special_tokens,
    )


def parse_ids(
    encoder: ChatEncoder,
    conversation: "Conversation",
    token_ids: Sequence[int],
    *,
    reason: FinishReason = "stop",
    stop: Sequence[str] = (),
) -> ChatMessage:
    """Returns the answer that completion ids spell; EOS may be among them."""
    parser = ChatParser(encoder, conversation, stop)
    parser.push(token_ids)
    parser.finish(reason)
    return parser.message


def parse_text(
    encoder: ChatEncoder,
    conversation: "Conversation",
    text: str,
    *,
    reason: FinishReason = "stop",
    stop: Sequence[str] = (),
) -> ChatMessage:
    """Returns the answer of a completion's text, where tags count by their spelling.

    Use `parse_ids` for what a model produced: a text cannot tell a quoted tag from a real one.
    """
    parser = ChatParser(encoder, conversation, stop)
    parser.push_text(text)
    parser.finish(reason)
    return parser.message
