"""How one request wants its tokens (io.md 3)."""

import difflib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from deepinfer_jax.errors import InputError
from deepinfer_jax.grammar.spec import Grammar

Verify = Literal["exact", "rejection", "block"]
GREEDY_BELOW = 1e-5  # temperatures below this are greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; checked on construction, immutable afterwards.

    Greedy is `temperature=0`; `top_p`, `top_k` and `min_p` are then without effect by definition.
    `seed=None` draws a fresh seed, reported in the output. Names and defaults: architecture.md 4.

    Raises:
        InputError: a value outside its documented range, or of another type.
        TypeError: a keyword that does not exist; the message names the nearest one.

    Examples:
        >>> di.SamplingParams(temperature=0, max_tokens=8).is_greedy
        True
        >>> di.SamplingParams(top_p=2)
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.InputError: top_p must be a number in (0, 1], got 2
    """

    __no_type_check__: ClassVar[bool] = True  # `__post_init__` checks, and says what is legal

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: Grammar | None = None
    max_draft: int | None = None
    verify: Verify = "exact"
    deadline_s: float | None = None
    priority: int = 0
    logprobs_mode: Literal["raw", "processed"] = "raw"
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    cache_salt: str = ""
    bypass_prefix_cache: bool = False

    def __new__(cls, *args: Any, **fields: Any) -> "SamplingParams":
        """Rejects unknown keywords by name; the generated `__init__` does the rest."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, 1)
                hint = _OTHER_NAMES.get(name, near[0] if near else "")
                raise TypeError(
                    f"SamplingParams has no field {name!r}"
                    + (f"; did you mean {hint!r}?" if hint else "")
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (is_legal, rule) in _RULES.items():
            value = getattr(self, name)
            if not is_legal(value):
                raise InputError(f"{name} must be {rule}, got {value!r}")
        if self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}"
            )
        if self.grammar is not None and self.ignore_eos:
            raise InputError(
                "grammar and ignore_eos exclude each other: a text that is complete must end. "
                "Leave ignore_eos out"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken."""
        return bool(self.temperature < GREEDY_BELOW)  # NumPy numbers are floats too


def _integer(low: int | float, high: int | float = math.inf) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _number(is_inside: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda v: (
        isinstance(v, int | float)
        and not isinstance(v, bool)
        and abs(v) <= sys.float_info.max  # false for NaN; an int may be too large for a float
        and is_inside(float(v))
    )


def _optional(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or rule(v)


def _tuple_of(rule: Callable[[Any], bool], most: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, tuple) and len(v) <= most and all(map(rule, v))


def _is_unicode(value: Any) -> bool:
    """Whether it is a text without lone surrogates, which nothing downstream can encode."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_bias(value: Any) -> bool:
    inside = _number(lambda x: -100 <= x <= 100)
    return (
        isinstance(value, Mapping)
        and len(value) <= 300
        and all(_integer(0)(k) and inside(v) for k, v in value.items())
    )


# What other systems call these fields.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "first_n_token_no_eos": "min_tokens",
    "seq_seed": "seed",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "stop_ids": "stop_token_ids",
    "so_args": "grammar",
}

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_number(lambda x: x >= 0), "a finite number >= 0 (0 is greedy)"),
    "top_p": (_number(lambda x: 0 < x <= 1), "a number in (0, 1]"),
    "top_k": (_integer(-1), "an integer: -1 or 0 for off, otherwise >= 1"),
    "min_p": (_number(lambda x: 0 <= x <= 1), "a number in [0, 1]"),
    "max_tokens": (_integer(0), "an integer >= 0"),
    "min_tokens": (_integer(0), "an integer >= 0"),
    "seed": (_optional(_integer(0, 2**64 - 1)), "None or an integer in 0..2^64-1"),
    "stop": (
        _tuple_of(lambda s: _is_unicode(s) and s != "", 16),
        "a tuple of at most 16 non-empty strings",
    ),
    "stop_token_ids": (_tuple_of(_integer(0), 2**16), "a tuple of token ids"),
    "ignore_eos": (lambda v: isinstance(v, bool), "True or False"),
    "logprobs": (_optional(_integer(0, 1000)), "None or an integer in 0..1000"),
    "prompt_logprobs": (_optional(_integer(0, 1000)), "None or an integer in 0..1000"),
    "n": (_integer(1, 16), "an integer in 1..16"),
    "logit_bias": (_optional(_is_bias), "None or at most 300 pairs {token id: number in +-100}"),
    "presence_penalty": (_number(lambda x: -2 <= x <= 2), "a number in [-2, 2]"),
    "frequency_penalty": (_number(lambda x: -2 <= x <= 2), "a number in [-2, 2]"),
    "repetition_penalty": (_number(lambda x: 0 < x <= 2), "a number in (0, 2]"),
    "grammar": (
        _optional(lambda v: isinstance(v, Grammar)),
        "None or a deepinfer_jax.Grammar, such as Grammar.json_schema(...)",
    ),
    "max_draft": (_optional(_integer(0)), "None or an integer >= 0"),
    "verify": (lambda v: v in ("exact", "rejection", "block"), '"exact", "rejection" or "block"'),
    "deadline_s": (_optional(_number(lambda x: x > 0)), "None or a number of seconds > 0"),
    "priority": (_integer(-math.inf), "an integer"),
    "logprobs_mode": (lambda v: v in ("raw", "processed"), '"raw" or "processed"'),
    "allowed_token_ids": (
        _optional(lambda v: _tuple_of(_integer(0), 2**18)(v) and v),
        "None or a tuple of at least one token id",
    ),
    "bad_words": (
        _tuple_of(lambda s: _is_unicode(s) and s != "", 256),
        "a tuple of at most 256 non-empty strings",
    ),
    "cache_salt": (_is_unicode, "a string of valid Unicode"),
    **{
        name: (lambda v: isinstance(v, bool), "True or False")
        for name in (
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
            "bypass_prefix_cache",
        )
    },
}
