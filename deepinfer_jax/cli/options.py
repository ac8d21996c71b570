"""Options of the command line that are fields of `SamplingParams` and `RuntimeConfig`.

Names, types and defaults are those of the fields, so that flag and field cannot drift apart.
"""

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM

ModelOption = Annotated[
    str, typer.Option(help='A checkpoint folder, a hub id, or "nano" (embedded).')
]
ModelArgument = Annotated[
    str, typer.Argument(help='A checkpoint folder, a hub id, or "nano" (embedded).')
]
NumericsOption = Annotated[
    Literal["checkpoint", "float32"],
    typer.Option(help="The checkpoint's rounding points, or plain float32."),
]
DeterminismOption = Annotated[
    Literal["off", "run", "batch"], typer.Option(help="Which bits are promised.")
]
BosOption = Annotated[bool, typer.Option(help="Put the begin-of-text token first, as in training.")]
SAMPLING = {
    "temperature": "0 takes the likeliest token.",
    "top_p": "Probability mass to sample from.",
    "top_k": "Sample from that many of the likeliest tokens; -1 for all.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "No end before that many tokens.",
    "seed": "Random seed; drawn and shown if not given.",
    "stop": "End before this text; may be given several times.",
    "stop_token_ids": "End at this token id; may be given several times.",
    "ignore_eos": "Go on after the end-of-text token.",
    "n": "Completions of the prompt.",
    "logprobs": "Log-probabilities of the tokens (0), and of that many best ones at each place.",
    "prompt_logprobs": "The same for the tokens of the prompt.",
    "logprobs_mode": "Before or after penalties, temperature and truncation.",
    "presence_penalty": "Subtracted from logits of tokens that were generated.",
    "frequency_penalty": "The same, times how often they were.",
    "repetition_penalty": "Weakens tokens of prompt and output, above 1.",
    "logit_bias": "ID=NUMBER, added to a token's logit; may be given several times.",
    "allowed_token_ids": "Generate these token ids alone; may be given several times.",
    "bad_words": "Never generate this token's text; may be given several times.",
    "max_draft": "Most drafts of a round that are verified.",
    "verify": "How drafts are judged.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}
RUNTIME = {
    "max_seqs": "Sequences that run together.",
    "max_len": "Longest sequence, prompt and completion together.",
    "max_tokens_per_step": "Rows of one step.",
    "cache_bytes": "Memory of the cache on the device.",
    "block_tokens": "Tokens of a cache block.",
    "prefix_cache": "Reuse the cache rows of equal prompt beginnings.",
    "prefix_restore": "How windows are rebuilt after such a hit.",
    "replay": "Limit what late layers see of a prompt to its end.",
    "replay_keep_tokens": "To how many tokens.",
    "async_depth": "Steps in flight before a result is read.",
    "drafting": "Speculative decoding; on if the checkpoint has draft stages.",
    "draft_policy": "How many drafts are verified.",
    "draft_length": 'Of every round, with the policy "fixed".',
    "draft_threshold": 'Least chance of survival, with the policy "threshold".',
}
#: Of commands that run on a mesh.
ON_MESH = {
    "rebalance_steps": "Place busy experts on other devices after so many steps.",
    "rebalance_gain": "Least share of the busiest device's rows that this must save.",
    "redundant_experts": "Places of a layer for second copies of busy experts.",
}


def with_fields(
    *groups: Mapping[str, str], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command the options of such groups as `SAMPLING`.

    The command takes them as `**fields`; `sampling_params` and `runtime_config` read them back.

    Args:
        groups: field -> help.
        defaults: where the command line's differ from the fields'.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [
            _parameter(name, text, defaults)
            for group in groups
            for name, text in group.items()
            if name not in signature.parameters
        ]
        whole = signature.replace(parameters=[*own, *added])
        function.__signature__ = whole  # pyright: ignore[reportFunctionMemberAccess]
        function.__annotations__ |= {p.name: p.annotation for p in added}
        function.__annotations__.pop("fields")
        return function

    return decorate


def sampling_params(fields: Mapping[str, Any], **more: Any) -> SamplingParams:
    """Returns the parameters that the options of `SAMPLING` give.

    Raises:
        InputError: a value outside its range.
    """
    found = {name: fields[name] for name in SAMPLING if name in fields}
    for name, value in found.items():
        if isinstance(value, list):  # an option that was not given is an empty list
            found[name] = tuple(value) or SamplingParams.__dataclass_fields__[name].default
    if found.get("logit_bias"):
        found["logit_bias"] = dict(map(_read_bias, found["logit_bias"]))
    return SamplingParams(**found | more)


def runtime_config(fields: Mapping[str, Any]) -> RuntimeConfig:
    """Returns the runtime that the options of `RUNTIME` and `ON_MESH` give.

    Raises:
        ConfigError: a value outside its range.
    """
    return RuntimeConfig(**{name: fields[name] for name in RUNTIME | ON_MESH if name in fields})


@contextmanager
def observed(
    llm: "LLM", *, stats: bool, profile: Path | None, trace: Path | None
) -> Iterator[None]:
    """Watches what runs inside, and writes what was asked for, also if it fails.

    Args:
        llm: whose engine is watched.
        stats: print its counters and gauges on stderr.
        profile: folder of a JAX profile and of `engine_trace.json`.
        trace: file of the engine's spans alone.
    """
    from contextlib import nullcontext

    import jax

    if profile is not None or trace is not None:
        llm.engine.trace.is_on = True  # warmed up first: programs that compile would fill it
    try:
        with nullcontext() if profile is None else jax.profiler.trace(profile):
            yield
    finally:
        if profile is not None:
            llm.engine.trace.write(profile / "engine_trace.json")
        if trace is not None:
            llm.engine.trace.write(trace)
        if stats:
            sys.stderr.write(llm.stats().prometheus())


def _parameter(name: str, text: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    record = SamplingParams if name in SAMPLING else RuntimeConfig
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    default = defaults.get(name, field.default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if isinstance(default, tuple) else default,
        annotation=Annotated[_option_type(field.type), typer.Option(help=text)],
    )


def _option_type(hint: Any) -> Any:
    """Returns what Typer knows for a field's type: a list for a tuple, texts for a mapping."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [one for one in get_args(hint) if one is not type(None)]
        return _option_type(inner) | None
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]
    return list[str] if get_origin(hint) is Mapping else hint


def _read_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise InputError(f"--logit-bias takes ID=NUMBER, got {text!r}") from error
