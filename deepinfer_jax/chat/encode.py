"""Messages to prompt text and token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from deepinfer_jax.chat.messages import Messages, build_conversation, message_images
from deepinfer_jax.chat.tokenizer import import_recipe, recipe_tokenizer, special_tokens
from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.vision.image import ImageInput, ImageOptions, ImageSource, read_image

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
    """A conversation and its token ids; `ChatParser` needs the former to read the answer.

    token_ids: with one image token for each image. images: in their order in the prompt.
    """

    conversation: "deepseek_recipe.Conversation"
    token_ids: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()


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
            image_token=self.image_token,
        )
        images = tuple(self.read(where, one) for where, one in message_images(messages))
        ids = self.encode(conversation)
        return ChatPrompt(conversation=conversation, token_ids=ids, images=images)

    @property
    def image_token(self) -> str:
        """Spelling of the token that stands for an image."""
        return self.special_tokens.token(import_recipe().SpecialToken.Image)

    def read(
        self, where: str, source: ImageSource, options: ImageOptions | None = None
    ) -> ImageInput:
        """Returns an image of a message (`read_image`); errors begin with `where` it stands.

        Raises:
            InputError: The model has no image encoder, or the image cannot be read.
        """
        if self.config.vision is None:
            raise InputError(
                f"{where} must be text: this model has no image encoder (vision_config). Leave "
                "images out, or run a checkpoint that sees"
            )
        try:
            return read_image(source, self.config.vision, options=options)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    def image_sources(
        self, conversation: "deepseek_recipe.Conversation"
    ) -> "list[deepseek_recipe.ImageSource]":
        """Returns what the image tokens of the prompt stand for, in their order."""
        return self._encoding.render_conversation(conversation).image_sources

    def render(self, conversation: "deepseek_recipe.Conversation") -> RenderedText:
        """Returns the prompt as text."""
        rendered = self._encoding.render_conversation(conversation)
        return RenderedText(text=rendered.prompt, special_ranges=tuple(rendered.special_ranges))

    def encode(self, conversation: "deepseek_recipe.Conversation") -> tuple[int, ...]:
        """Returns the token ids of the prompt, one image token for each image.

        Raises:
            TokenizerError: The tokenizer lacks a special token that this prompt needs.
        """
        try:
            return tuple(self._id_encoding.encode(conversation))
        except RuntimeError as error:
            raise TokenizerError(
                f"tokenizer.json must hold every special token of the prompt: {error}. Use the "
                "one published with the checkpoint"
            ) from error
