"""Which fields a body of each protocol may have, and what they ask of the sampler (io.md 3).

A field that nothing would honour is refused by name, not ignored. `null` is the same as absent.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.errors import InputError
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.serve.errors import ApiError, bad_field

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field may hold: a test, and the same in words."""

    is_legal: Callable[[Any], bool]
    text: str


def _is_integer(value: Any, low: int | float = -math.inf, high: int | float = math.inf) -> bool:
    return type(value) is int and low <= value <= high


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    )


ANY = Rule(lambda v: True, "anything")
BOOLEAN = Rule(lambda v: isinstance(v, bool), "true or false")
TEXT = Rule(lambda v: isinstance(v, str), "a text")
OBJECT = Rule(lambda v: isinstance(v, dict), "an object")
LIST = Rule(lambda v: isinstance(v, list), "a list")
TEXTS = Rule(_texts, "a text or a list of texts")
COUNT = Rule(lambda v: _is_integer(v, 1), "an integer >= 1")
TOP = Rule(lambda v: _is_integer(v, 0, 20), "an integer in 0..20")
NAMED = Rule(lambda v: isinstance(v, str | dict), "a text or an object")
TEMPERATURE = Rule(
    lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 2,
    "a number in [0, 2]",
)
IDS = Rule(
    lambda v: isinstance(v, list) and all(map(_is_integer, v)),
    "a list of token ids",
)


def _only(value: Any, why: str) -> Rule:
    return Rule(lambda v: v == value, f"{json.dumps(value)} or absent ({why})")


def _never(why: str) -> Rule:
    return Rule(lambda v: False, f"absent ({why})")


#: Fields of `SamplingParams` that every protocol takes under their own names.
SAMPLING: dict[str, Rule] = {
    "temperature": TEMPERATURE,
    **{
        name: ANY  # `SamplingParams` checks them
        for name in (
            *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "min_tokens", "ignore_eos", "max_draft", "verify"),
            *("deadline_s", "priority", "cache_salt", "bypass_prefix_cache", "logprobs_mode"),
        )
    },
    "logit_bias": OBJECT,
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "bad_words": TEXTS,
}
#: What else every protocol takes. Constraints: grammar/aliases.py.
COMMON: dict[str, Rule] = {
    **SAMPLING,
    "model": TEXT,
    "stream": BOOLEAN,
    "user": TEXT,
    "metadata": OBJECT,
    "service_tier": Rule(
        lambda v: v in ("auto", "default", "standard_only"), 'one of "auto", "default"'
    ),
    "request_id": TEXT,
    "record": BOOLEAN,
    "return_token_ids": BOOLEAN,
    "strict": BOOLEAN,
    **{
        name: ANY
        for name in (
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "regex", "ebnf", "json_schema", "so_args"),
        )
    },
    "best_of": _never("not offered: use n"),
    "stop_regex": _never("not offered: use stop"),
    "structural_tag": _never("not offered"),
}
_NOT_STORED = _only(False, "nothing is stored here")
_SPEECH = {
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "parallel_tool_calls": BOOLEAN,
    "store": _NOT_STORED,
    "reasoning_effort": TEXT,
}
CHAT: dict[str, Rule] = {
    **COMMON,
    **_SPEECH,
    "messages": LIST,
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "stop": TEXTS,
    "n": Rule(lambda v: _is_integer(v, 1, 16), "an integer in 1..16"),
    "stream_options": OBJECT,
    "tools": LIST,
    "tool_choice": NAMED,
    "response_format": OBJECT,
    "thinking": OBJECT,
    "chat_template_kwargs": OBJECT,
    "logprobs": BOOLEAN,
    "top_logprobs": TOP,
    "modalities": _only(["text"], "answers are text"),
}
RESPONSES: dict[str, Rule] = {
    **COMMON,
    **_SPEECH,
    "input": Rule(lambda v: isinstance(v, str | list), "a text or a list"),
    "instructions": TEXT,
    "max_output_tokens": COUNT,
    "tools": LIST,
    "tool_choice": NAMED,
    "text": OBJECT,
    "reasoning": OBJECT,
    "include": LIST,
    "top_logprobs": TOP,
    "stream_options": OBJECT,
    "truncation": _only("disabled", "a prompt is never cut"),
    "background": _only(False, "nothing runs in the background"),
    "max_tool_calls": _never("tools are called by the client"),
    "previous_response_id": _never("nothing is stored here: send the whole conversation"),
    "conversation": _never("nothing is stored here: send the whole conversation"),
    "prompt": _never("prompt templates are not stored here"),
}
MESSAGES: dict[str, Rule] = {
    **COMMON,
    "messages": LIST,
    "system": Rule(lambda v: isinstance(v, str | list), "a text or a list of text blocks"),
    "max_tokens": COUNT,
    "stop_sequences": Rule(lambda v: isinstance(v, list) and _texts(v), "a list of texts"),
    "tools": LIST,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "cache_control": ANY,
}
COMPLETIONS: dict[str, Rule] = {
    **COMMON,
    "prompt": Rule(lambda v: isinstance(v, str | list), "a text, token ids, or a list of either"),
    "max_tokens": Rule(lambda v: _is_integer(v, 0), "an integer >= 0"),
    "n": Rule(lambda v: _is_integer(v, 1, 16), "an integer in 1..16"),
    "stop": TEXTS,
    "stream_options": OBJECT,
    "logprobs": TOP,
    "echo": BOOLEAN,
    "suffix": _never("this checkpoint documents no way to fill a gap"),
    "include_stop_str_in_output": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "add_special_tokens": BOOLEAN,
}


def checked(body: Body, allowed: Mapping[str, Rule]) -> dict[str, Any]:
    """Returns the fields of a body that are not null.

    Raises:
        ApiError: 400; one is not allowed, or holds something else than it may.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        rule = allowed.get(name)
        if rule is None:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise ApiError(400, f"the body has no field {name[:80]!r}: {hint}", param=name[:80])
        if not rule.is_legal(value):
            raise bad_field(name, rule.text, value)
    return given


def sampling_params(fields: Body, **known: Any) -> SamplingParams:
    """Returns what the sampling fields of a checked body ask for; known: fields already decided.

    Raises:
        ApiError: 400; a value outside its range.
    """
    found: dict[str, Any] = {name: fields[name] for name in SAMPLING if name in fields}
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if name in found:
            found[name] = as_texts(found[name])
    if "logit_bias" in found:
        found["logit_bias"] = _bias(found["logit_bias"])
    if "max_tokens" in known and "min_tokens" in found:
        most = known["max_tokens"]
        if _is_integer(found["min_tokens"], most + 1):
            rule = f"at most the {most} tokens there is room for"
            raise bad_field("min_tokens", rule, found["min_tokens"])
    try:
        return SamplingParams(**found | known)
    except InputError as error:
        message = str(error)
        raise ApiError(400, message, param=message.partition(" ")[0]) from error


def as_texts(value: Any) -> tuple[Any, ...]:
    """Returns the entries of a list, or a single text, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def _bias(value: Mapping[str, Any]) -> dict[int, Any]:
    bad = [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if bad:
        raise bad_field("logit_bias", "an object whose keys are token ids", bad[0])
    return {int(key): one for key, one in value.items()}
