"""A body of `/v1/completions` as something the engine can run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_jax.grammar.aliases import read_constraint
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.serve.errors import ApiError, bad_field
from deepinfer_jax.serve.fields import COMPLETIONS, as_texts, checked, sampling_params
from deepinfer_jax.serve.service import Service
from deepinfer_jax.serve.tasks import Extras, drawn_seed, extras, request_name

#: OpenAI's default, and most prompts of a request.
_MAX_TOKENS, _MOST_PROMPTS = 16, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTask:
    """One request. prompts: token ids of each; every one is a request of the engine with its own
    params, which differ in the seed alone, if none was given. echo: put the prompt before the
    completion."""

    id: str
    model: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    echo: bool
    is_stream: bool
    has_usage: bool
    extras: Extras


def read_task(service: Service, body: Mapping[str, Any]) -> CompletionTask:
    """Returns the request in a body.

    Raises:
        ApiError: 404 unknown model, 400 anything else; the field is named.
        InputError: 400; a prompt cannot be honoured.
    """
    given = checked(body, COMPLETIONS)
    service.reader.check_model(given)
    prompts = _prompts(service, given)
    echo, is_stream = given.get("echo", False), given.get("stream", False)
    most = given.get("max_tokens", _MAX_TOKENS)
    if most == 0 and not echo:
        raise bad_field("max_tokens", "at least 1 without echo", most)
    room = service.llm.max_len - max(map(len, prompts))
    if most > room:
        if "max_tokens" in given:
            raise ApiError(
                400,
                f"max_tokens must leave room for the prompt: {service.llm.max_len} tokens in all, "
                f"{service.llm.max_len - room} of them the prompt's, got {most}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        most = max(room, 1)
    known: dict[str, Any] = {"max_tokens": most, "n": given.get("n", 1)}
    known["stop"] = as_texts(given.get("stop", ()))
    known["grammar"] = read_constraint(given)
    for name in ("include_stop_str_in_output", "skip_special_tokens"):
        if name in given:
            known[name] = given[name]
    if "logprobs" in given:
        known["logprobs"] = given["logprobs"]
    if echo and ("logprobs" in given or most == 0):
        known["prompt_logprobs"] = given.get("logprobs", 0)
        if is_stream:
            raise bad_field("stream", "false", True, "log-probabilities of a prompt come at once")
    fields = dict(given)
    if service.config.deadline_s is not None:
        fields.setdefault("deadline_s", service.config.deadline_s)
    params = sampling_params(fields, **known)
    if params.seed is None:  # equal prompts are to have different completions
        first = drawn_seed()
        each = [replace(params, seed=(first + number) % 2**53) for number in range(len(prompts))]
    else:
        each = [params] * len(prompts)
    return CompletionTask(
        id=request_name(given, "cmpl-"),
        model=given["model"],
        prompts=prompts,
        params=each,
        echo=echo,
        is_stream=is_stream,
        has_usage=bool(given.get("stream_options", {}).get("include_usage")),
        extras=extras(given),
    )


def _prompts(service: Service, given: Mapping[str, Any]) -> list[list[int]]:
    prompt = given.get("prompt")
    if prompt is None:
        raise ApiError(400, "prompt is missing", param="prompt")
    many = prompt if isinstance(prompt, list) else [prompt]
    if many and all(type(one) is int for one in many):
        many = [many]
    if not 0 < len(many) <= _MOST_PROMPTS:
        raise bad_field("prompt", f"1..{_MOST_PROMPTS} prompts", prompt)
    return [prompt_ids(service, one, given.get("add_special_tokens", True)) for one in many]


def prompt_ids(service: Service, prompt: object, adds_bos: bool) -> list[int]:
    """Returns the token ids of one prompt, a text or a list of ids; spellings of special tokens in
    a text are those tokens.

    Raises:
        ApiError: 400; it is neither.
    """
    if isinstance(prompt, str):
        bos = service.llm.model.config.bos_token_id
        return [bos] * adds_bos + service.llm.encode(prompt)
    vocab = service.llm.model.config.vocab_size
    if isinstance(prompt, list) and all(type(one) is int and 0 <= one < vocab for one in prompt):
        return prompt
    raise bad_field("prompt", f"a text or token ids in 0..{vocab - 1}", prompt)
