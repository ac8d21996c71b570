"""Chat over anything that generates and streams as `LLM` does."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deepinfer_jax.chat.encode import ChatEncoder, ChatPrompt
from deepinfer_jax.chat.messages import Messages, build_conversation
from deepinfer_jax.chat.parse import (
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    ChatParser,
    ToolCall,
    parsing_options,
)
from deepinfer_jax.chat.tokenizer import import_recipe
from deepinfer_jax.chat.tools import call_grammar
from deepinfer_jax.errors import InputError
from deepinfer_jax.grammar.spec import Begin, Grammar
from deepinfer_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from deepseek_recipe import Conversation

    from deepinfer_jax.engine.output import RequestMetrics, RequestOutput, StreamDelta

Conversations = Messages | Sequence[Messages]


@runtime_checkable
class Generator(Protocol):
    """What chat needs of an `LLM`."""

    def generate(
        self, prompts: Any, params: Any = None, *, progress: bool = True, images: Any = None
    ) -> "list[RequestOutput]":
        """Returns one output per prompt; images: some for each."""
        ...

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, images: Any = None
    ) -> "Iterator[StreamDelta]":
        """Yields the completion of one prompt as it grows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """The answer to one conversation. `text` is its content, without reasoning and tool calls.

    token_ids: all that was read of the completion, up to the one that completes a stop string.
    stop_reason: the stop string, or the id that ended the completion.
    request: the completion as `generate` returned it; it may go on behind a stop string.
    `LLM.chat` makes it and says what it raises.

    Examples:
        >>> short = di.SamplingParams(temperature=0, max_tokens=4)
        >>> answer = llm.chat("What is 17 + 25?", short)[0]
        >>> answer.finish_reason, len(answer.token_ids)
        ('length', 4)
    """

    message: ChatMessage
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: tuple[int, ...]
    request: "RequestOutput"

    @property
    def text(self) -> str:
        """The content of the answer."""
        return self.message.content

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the answer; None without thinking."""
        return self.message.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls the model asks for."""
        return self.message.tool_calls

    @property
    def logprobs(self) -> "np.ndarray | None":
        """Log-probabilities of `token_ids`, float32; None unless asked for."""
        values = self.request.logprobs
        return None if values is None else values[: len(self.token_ids)]

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the rendered conversation."""
        return self.request.prompt_token_ids

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self.request.seed

    @property
    def metrics(self) -> "RequestMetrics":
        """Times of the request."""
        return self.request.metrics


def chat(
    llm: Generator,
    encoder: ChatEncoder,
    conversations: Conversations,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> list[ChatOutput]:
    """Returns one answer per conversation, in order.

    Args:
        llm: Generates the completions.
        encoder: The prompt encoding of its checkpoint.
        conversations: Messages, a text (one user message), or a list of conversations.
        params: One for all or one per conversation. `stop` is matched in the content alone.
        progress: Show a progress bar on stderr if it is a terminal.
        options: `thinking`, `reasoning_effort`, `tools`, `tool_choice`, `response_format` of
            `ChatEncoder.prepare`.

    Raises:
        InputError: A message, option or parameter that cannot be honoured. Nothing has run then.
    """
    many = _as_list(conversations)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(many)
    each = list(params)
    if len(each) != len(many):
        raise InputError(
            f"params must be one SamplingParams or one per conversation, got {len(each)} for "
            f"{len(many)} conversations"
        )
    pairs = [
        prepare_answer(encoder, messages, one, options)
        for messages, one in zip(many, each, strict=True)
    ]
    prompts, each = [prompt for prompt, _ in pairs], [one for _, one in pairs]
    more: dict[str, Any] = {}
    if any(prompt.images for prompt in prompts):
        more["images"] = [prompt.images for prompt in prompts]
    outputs = llm.generate(
        [list(prompt.token_ids) for prompt in prompts],
        [replace(one, stop=()) for one in each],
        progress=progress,
        **more,
    )
    return [
        read_chat(encoder, prompt, one.stop, output)
        for prompt, one, output in zip(prompts, each, outputs, strict=True)
    ]


def stream_chat(
    llm: Generator,
    encoder: ChatEncoder,
    messages: Messages,
    params: SamplingParams | None = None,
    **options: Any,
) -> Iterator[ChatDelta]:
    """Yields the answer to one conversation as it grows; arguments as `chat`.

    Ends the completion as soon as a stop string is complete.

    Raises:
        InputError: as `chat`, before anything runs.
    """
    params = params or SamplingParams()
    prompt, asked = prepare_answer(encoder, messages, stream_params(params), options)
    parser = ChatParser(encoder, prompt.conversation, params.stop)
    more: dict[str, Any] = {"images": prompt.images} if prompt.images else {}
    source = llm.stream(list(prompt.token_ids), asked, **more)
    return _read_stream(parser, source)


def stream_params(params: SamplingParams) -> SamplingParams:
    """Returns the parameters of a streamed answer's completion; the parser looks for `stop`.

    Raises:
        InputError: `n` is above 1.
    """
    if params.n > 1:
        raise InputError(f"a streamed answer is one completion, got n={params.n}: leave n at 1")
    return replace(params, stop=())


def _read_stream(parser: ChatParser, source: "Iterator[StreamDelta]") -> Iterator[ChatDelta]:
    for raw in source:
        yield read_delta(parser, raw)
        if parser.is_finished:
            return


async def read_chat_stream(
    parser: ChatParser, source: "AsyncGenerator[StreamDelta, None]"
) -> AsyncGenerator[ChatDelta, None]:
    """Yields the answer in a completion that arrives; closes the source at the answer's end."""
    try:
        async for raw in source:
            yield read_delta(parser, raw)
            if parser.is_finished:
                return
    finally:
        await source.aclose()


def read_delta(parser: ChatParser, raw: "StreamDelta") -> ChatDelta:
    """Returns what the answer grew by; `parser.is_finished` is true after the last one."""
    delta = parser.push(raw.token_ids)
    if raw.logprobs is not None:
        delta = replace(delta, logprobs=raw.logprobs[: len(delta.token_ids)])
    if raw.finish_reason is None or parser.is_finished:
        return delta
    end = parser.finish(raw.finish_reason)
    return replace(
        delta,
        content=delta.content + end.content,
        reasoning=delta.reasoning + end.reasoning,
        tool_calls=delta.tool_calls + end.tool_calls,
        finish_reason=end.finish_reason,
    )


def read_chat(
    encoder: ChatEncoder, prompt: ChatPrompt, stop: tuple[str, ...], output: "RequestOutput"
) -> ChatOutput:
    """Returns the answer in the first completion of a prompt; `stop` ends its content."""
    parser = ChatParser(encoder, prompt.conversation, stop)
    read = parser.push(output.token_ids).token_ids
    stop_reason = output.stop_reason
    if parser.is_finished:
        stop_reason = _matched(encoder, read, parser.message.content, stop)
    else:
        parser.finish(output.finish_reason)
    if parser.finish_reason is None:
        raise AssertionError("the parser was finished and has no finish reason")
    return ChatOutput(
        message=parser.message,
        finish_reason=parser.finish_reason,
        stop_reason=stop_reason,
        token_ids=read,
        request=output,
    )


def _matched(
    encoder: ChatEncoder, token_ids: Sequence[int], content: str, stop: tuple[str, ...]
) -> str | None:
    """Returns the stop string that follows the content."""
    written = encoder.tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return next((text for text in stop if content + text in written), None)


def prepare_answer(
    encoder: ChatEncoder, messages: Messages, params: SamplingParams, options: Mapping[str, Any]
) -> tuple[ChatPrompt, SamplingParams]:
    """Returns the prompt of a conversation, and parameters that keep its formats.

    A grammar binds the answer: reasoning before it is free. It is that of the response format, or
    of the calls of tools that are strict or required.

    Raises:
        InputError: Something is illegal, or can be rendered but not honoured.
    """
    prompt, begin = _with_calls(encoder, messages, options)
    tools = prompt.conversation.tools if prompt.conversation.tool_choice != "none" else []
    strict = {tool.name: tool.parameters or {} for tool in tools if tool.strict}
    asked = (
        params.grammar,
        answer_grammar(prompt.conversation),
        call_grammar(tools, begin=begin, strict=strict),
    )
    given = [grammar for grammar in asked if grammar is not None]
    if len(given) > 1:
        raise InputError(
            "a grammar, response_format, and tools that are strict or required all constrain the "
            "whole answer: give one"
        )
    grammar = given[0] if given else None
    if grammar is not None and not grammar.start_after and not grammar.trigger:
        grammar = grammar.after(answer_start(encoder, prompt.conversation))
    return prompt, replace(params, grammar=grammar)


def _with_calls(
    encoder: ChatEncoder, messages: Messages, options: Mapping[str, Any]
) -> tuple[ChatPrompt, Begin]:
    """Returns the prompt, and where calls may come in its answer.

    A prompt that opens the calls leaves no place for reasoning. With reasoning the tools that may
    be called are declared as usual, and the grammar alone requires a call.
    """
    choice = options.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return encoder.prepare(messages, **options), "auto"
    if not options.get("thinking", True):
        return encoder.prepare(messages, **options), "opened"
    named = {tool.name for tool in build_conversation(messages, **options).tools}
    tools = [tool for tool in options["tools"] if tool["function"]["name"] in named]
    usual = {**options, "tools": tools, "tool_choice": "auto"}
    return encoder.prepare(messages, **usual), "required"


def answer_grammar(conversation: "Conversation") -> Grammar | None:
    """Returns the grammar of a conversation's response format, None for text."""
    if conversation.response_format == "json_object":
        return Grammar.json_object()
    if conversation.response_schema is not None:
        return Grammar.json_schema(conversation.response_schema)
    if conversation.response_regex is not None:
        return Grammar.regex(conversation.response_regex)
    return None


def answer_start(encoder: ChatEncoder, conversation: "Conversation") -> str | None:
    """Returns the token that ends the reasoning before an answer; None if there is none."""
    stage = parsing_options(encoder, conversation).thinking_initial_stage
    if stage is None or not stage.starts_in_reasoning():
        return None
    return encoder.special_tokens.token(import_recipe().SpecialToken.ThinkingEnd)


def _as_list(conversations: Conversations) -> list[Any]:
    if isinstance(conversations, str) or not isinstance(conversations, Sequence):
        return [conversations]  # what is no sequence, `prepare` refuses
    if any(isinstance(item, Mapping) for item in conversations):
        return [conversations]
    return list(conversations) or [conversations]
