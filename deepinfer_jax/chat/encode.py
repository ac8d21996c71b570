"""Messages to prompt text and token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from deepinfer_jax.chat.messages import Messages, build_conversation
from deepinfer_jax.chat.tokenizer import import_recipe, recipe_tokenizer, special_tokens
from deepinfer_jax.errors import InputError, TokenizerError

if TYPE_CHECKING:
    import deepseek_recipe
    import tokenizers

    from deepinfer_jax.config.model import ModelConfig

SpecialRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedText:
    """A prompt as text. `text[start:end]` of each range is one special token.

    Outside the ranges everything is plain text, also where it is spelled like a special token.
    """

    text: str
    special_ranges: SpecialRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation and its token ids; `ChatParser` needs the former to read the answer."""

    conversation: "deepseek_recipe.Conversation"
    token_ids: tuple[int, ...]


class ChatEncoder:
    """The prompt encoding of one checkpoint: V4.1 or V4 by `config.model_type`.

    Special tokens get the ids they have in the checkpoint's tokenizer.json. Texts of messages are
    encoded without them: no text can produce the id of a special token.

    Raises:
        TokenizerError: The tokenizer lacks a special token, or is not that of the config.
        ConfigError: deepseek-recipe is absent or has another version.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer | None", config: "ModelConfig") -> None:
        """Looks up the special tokens; `recipe_tokenizer` is made when ids are first needed."""
        if tokenizer is None:
            raise TokenizerError(
                "chat needs tokenizer.json, and the checkpoint has none: copy the one published "
                "with it"
            )
        recipe = import_recipe()
        self.tokenizer = tokenizer
        self.config = config
        self.special_tokens = special_tokens(tokenizer, config)
        if config.model_type == "deepseek_v4":
            self.version, encoding = recipe.ModelVersion.DeepseekV4Pro, recipe.DeepseekV4Encoding()
        else:
            self.version = recipe.ModelVersion.DeepseekV41Flash
            encoding = recipe.DeepseekV41Encoding()
        self._encoding = encoding.with_special_tokens(self.special_tokens)

    @cached_property
    def recipe_tokenizer(self) -> "deepseek_recipe.Tokenizer":
        """The same tokenizer for recipe's encoding and parsing."""
        return recipe_tokenizer(self.tokenizer)

    @cached_property
    def _id_encoding(self) -> Any:
        """The encoding with its tokenizer, kept: recipe 0.2.0 leaks 5 kB for each that encoded."""
        return self._encoding.with_tokenizer(self.recipe_tokenizer)

    def prepare(
        self,
        messages: Messages,
        *,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        response_format: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Returns the prompt of a conversation. Arguments: `build_conversation`.

        Raises:
            InputError: A message, tool or option is not valid.
            TokenizerError: The tokenizer lacks a special token that this prompt needs.
        """
        conversation = build_conversation(
            messages,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        return ChatPrompt(conversation=conversation, token_ids=self.encode(conversation))

    def render(self, conversation: "deepseek_recipe.Conversation") -> RenderedText:
        """Returns the prompt as text."""
        rendered = self._encoding.render_conversation(conversation)
        return RenderedText(text=rendered.prompt, special_ranges=tuple(rendered.special_ranges))

    def encode(self, conversation: "deepseek_recipe.Conversation") -> tuple[int, ...]:
        """Returns the token ids of the prompt.

        Raises:
            InputError: Images are attached.
            TokenizerError: The tokenizer lacks a special token that this prompt needs.
        """
        images = sum(len(message.image_sources) for message in conversation.messages)
        if images:
            raise InputError(
                f"messages must be text: {images} images are attached, and images are not "
                "supported yet. Remove them"
            )
        try:
            return tuple(self._id_encoding.encode(conversation))
        except RuntimeError as error:
            raise TokenizerError(
                f"tokenizer.json must hold every special token of the prompt: {error}. Use the "
                "one published with the checkpoint"
            ) from error
