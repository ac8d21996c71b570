"""A body of a conversation protocol as something the engine can run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.chat.session import answer_start
from deepinfer_jax.chat.tokenizer import import_recipe
from deepinfer_jax.grammar.aliases import read_constraint
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.random import fresh_seed
from deepinfer_jax.serve.errors import ApiError, bad_field
from deepinfer_jax.serve.fields import checked, sampling_params
from deepinfer_jax.serve.images import ImageRules, read_images
from deepinfer_jax.serve.protocols import CHAT, MESSAGES, Converted, Protocol
from deepinfer_jax.serve.tools import Calls, convert_calls
from deepinfer_jax.vision.image import ImageInput
from deepinfer_jax.vision.prompt import expand_images

if TYPE_CHECKING:
    import deepseek_recipe


_DECODERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What of ours a client wants in the response beside the protocol's own fields."""

    record: bool
    token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTask:
    """One request of a conversation protocol, checked and encoded.

    id, model: as the response names them. converted: recipe's reading of the body. token_ids: with
    one image token for each of `images`; prompt_ids: with one for each of their rows. params: with
    the seed in use and without stop strings, which recipe's parser looks for. is_single: it
    asked for one call of a tool at most. warnings: what was accepted and is not enforced.
    """

    protocol: Protocol
    id: str
    model: str
    converted: Converted
    token_ids: list[int]
    prompt_ids: list[int]
    images: tuple[ImageInput, ...]
    params: SamplingParams
    is_stream: bool
    is_single: bool
    extras: Extras
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What bodies are read with. names: of the model. max_len: longest sequence.

    parity: sampling as DeepSeek's API does it. binds_calls: hold every call of a tool to a grammar.
    rules: of images; gate: lets few be decoded at a
    time (half a gigabyte each, at most).
    """

    encoder: ChatEncoder
    options: "deepseek_recipe.ConversionOptions"
    names: tuple[str, ...]
    max_len: int
    parity: bool = False
    binds_calls: bool = False
    deadline_s: float | None = None
    rules: ImageRules = field(default_factory=ImageRules)
    gate: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(_DECODERS))

    def chat_task(self, protocol: Protocol, body: Mapping[str, Any]) -> ChatTask:
        """Returns the request in a body.

        Raises:
            ApiError: 404 unknown model, 400 anything else; the field is named.
        """
        given = self.fields(body, protocol)
        converted, calls = convert_calls(protocol, given, self.options)
        token_ids, images = self._prompt(converted)
        prompt_ids, _ = expand_images(token_ids, images, self.encoder.config)
        return ChatTask(
            protocol=protocol,
            id=request_name(given, protocol.id_prefix),
            model=given["model"],
            converted=converted,
            token_ids=token_ids,
            prompt_ids=prompt_ids,
            images=images,
            params=self._params(given, converted, calls, len(prompt_ids)),
            is_stream=given.get("stream", False),
            is_single=calls.is_single,
            extras=extras(given),
            warnings=_warnings(protocol, given),
        )

    def chat_ids(self, protocol: Protocol, body: Mapping[str, Any]) -> list[int]:
        """Returns the prompt's token ids of a body, one for every row; errors as `chat_task`."""
        converted, _ = convert_calls(protocol, self.fields(body, protocol), self.options)
        return expand_images(*self._prompt(converted), self.encoder.config)[0]

    def _prompt(self, converted: Converted) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Returns the ids, with one token for each image, and the images."""
        images = read_images(self.encoder, converted.conversation, self.rules, gate=self.gate)
        return list(self.encoder.encode(converted.conversation)), images

    def fields(self, body: Mapping[str, Any], protocol: Protocol) -> dict[str, Any]:
        """Returns the checked fields of a body for this model."""
        given = checked(body, protocol.rules)
        self.check_model(given)
        for name in ("messages",) if protocol in (CHAT, MESSAGES) else ("input",):
            if name not in given:
                raise ApiError(400, f"{name} is missing", param=name)
        return given

    def check_model(self, given: Mapping[str, Any]) -> None:
        """Raises ApiError: 400 without a model, 404 for another one."""
        model = given.get("model")
        if model is None:
            raise ApiError(400, f"model is missing: {self.names[0]!r} runs here", param="model")
        if model not in self.names:
            raise ApiError(
                404,
                f"no model is named {model[:80]!r}, {self.names[0]!r} runs here",
                param="model",
                code="model_not_found",
            )

    def _params(
        self, given: dict[str, Any], converted: Converted, calls: Calls, prompt: int
    ) -> SamplingParams:
        recipe, request = import_recipe(), converted.request
        asked = request.inference_options
        try:
            limit = request.resolve_max_tokens(prompt, self.max_len)
        except recipe.ConversionError as error:
            limit_name = "max_output_tokens" if "max_output_tokens" in given else "max_tokens"
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens, {limit_name} is {asked.max_tokens}, and a "
                f"sequence may have {self.max_len}",
                param=limit_name,
                code="context_length_exceeded",
            ) from error
        fields = dict(given)
        if self.parity:
            fields |= {"temperature": asked.temperature, "top_p": asked.top_p}
        if self.deadline_s is not None:
            fields.setdefault("deadline_s", self.deadline_s)
        fields.setdefault("seed", drawn_seed())
        known: dict[str, Any] = {"max_tokens": limit, "detokenize": False}
        if "n" in given:
            known["n"] = given["n"]
        if asked.logprobs:
            known["logprobs"] = asked.top_logprobs or 0
        known["grammar"] = self._grammar(given, converted, calls)
        return sampling_params(fields, **known)

    def _grammar(self, given: dict[str, Any], converted: Converted, calls: Calls) -> Grammar | None:
        """Returns what binds the answer behind its reasoning."""
        constraint = read_constraint(given)
        if constraint is not None and calls.is_promised:
            raise ApiError(
                400,
                "tools that are strict or required and another constraint each bind the whole "
                "answer: give one",
                param="tools",
            )
        found = constraint or calls.grammar(is_always=self.binds_calls)
        if found is None or found.trigger:
            return found
        return found.after(answer_start(self.encoder, converted.conversation))


def drawn_seed() -> int:
    """Returns a fresh seed that every JSON reader keeps exactly: below 2^53."""
    return fresh_seed() >> 11


def request_name(given: Mapping[str, Any], prefix: str) -> str:
    """Returns the id of a response: the client's `request_id`, or a new one.

    Raises:
        ApiError: 400; it is not a short word.
    """
    name = given.get("request_id")
    if name is None:
        return prefix + uuid4().hex
    if not 0 < len(name) <= 128 or not name.isascii() or not name.isprintable() or " " in name:
        raise bad_field("request_id", "1..128 printable ASCII characters without spaces", name)
    return name if name.startswith(prefix) else prefix + name


def extras(given: Mapping[str, Any]) -> Extras:
    """Returns which of our own fields a response is to have."""
    return Extras(record=given.get("record", False), token_ids=given.get("return_token_ids", False))


def _warnings(protocol: Protocol, given: Mapping[str, Any]) -> tuple[str, ...]:
    thinking = given.get("thinking", {})
    if protocol is MESSAGES and "budget_tokens" in thinking:
        return ("thinking.budget_tokens is not enforced: max_tokens is",)
    return ()
