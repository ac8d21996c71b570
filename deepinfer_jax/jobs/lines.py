"""Lines of a job: input lines to requests, finished requests to output lines.

An input line is a JSON object with one of `prompt` (text), `token_ids` and `messages` (with the
other fields of a Chat Completions prompt beside it), an optional `id`, fields of `SamplingParams`,
and a constraint under one of the names that the server takes (`grammar.aliases`). Blank lines are
skipped; line numbers count from 1 and include them.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from deepinfer_jax.chat.encode import ChatPrompt
from deepinfer_jax.chat.request import prompt_arguments
from deepinfer_jax.chat.session import prepare_answer, read_chat
from deepinfer_jax.engine.output import Completion, RequestOutput, TopLogprobs
from deepinfer_jax.errors import DeepInferError, InputError
from deepinfer_jax.grammar.aliases import ALIASES, read_constraint
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.llm import LLM
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.random import child_seed

Record = dict[str, Any]
#: Seeds of lines are children that no request has: those of one request are 0..15.
_FIRST_LINE = 2**31
_PROMPTS = ("prompt", "token_ids", "messages")
_CHAT_OPTIONS = ("tools", "tool_choice", "reasoning_effort", "thinking", "response_format")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the input that is not blank."""

    number: int
    text: bytes

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the line without its end."""
        return hashlib.sha256(self.text).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A line that can be run. chat: its prompt, if it is a conversation, whose stop strings are
    matched in the answer alone and so are not in `params`."""

    line: Line
    name: str | int | None
    token_ids: list[int]
    params: SamplingParams
    chat: ChatPrompt | None = None
    stop: tuple[str, ...] = ()


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a file that are not blank."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            stripped = text.strip()
            if stripped:
                yield Line(number=number, text=stripped)


def line_seed(seed: int, number: int) -> int:
    """Returns the seed of line `number` (1, 2, ...) that gives none of its own."""
    return child_seed(seed, _FIRST_LINE + number)


def parse_line(
    llm: LLM, line: Line, params: SamplingParams, *, bos: bool, is_fixed: bool = False
) -> Task | Record:
    """Returns what a line asks for, or the output line that says why it cannot be had.

    Args:
        llm: whose tokenizer and limits count.
        line: of the input.
        params: of fields that the line leaves out; `seed` is that of the job.
        bos: put the begin-of-text token before a text.
        is_fixed: the line may give no fields of its own.
    """
    name = None
    try:
        fields = _read_object(line.text)
        name = _take_name(fields)
        kind, prompt = _take_prompt(fields)
        names = _CHAT_OPTIONS if kind == "messages" else ()
        options = {name: fields.pop(name) for name in names if name in fields}
        if is_fixed and fields:
            raise InputError(f"these lines take no sampling parameters, got {sorted(fields)}")
        assert params.seed is not None
        asked = _asked(fields, replace(params, seed=line_seed(params.seed, line.number)))
        stop, chat = asked.stop, None
        if kind == "messages":
            chat, asked = _conversation(llm, prompt, options, asked)
            ids = list(chat.token_ids)
            if is_fixed and asked.grammar is not None:
                raise InputError("these lines have no answer that a format or tool could bind")
        else:
            ids = _prompt_ids(llm, kind, prompt, bos)
        llm.engine.check(ids, asked, f"of line {line.number}")
    except DeepInferError as error:
        return _head(line, name) | {"error": _describe(error)}
    return Task(line=line, name=name, token_ids=ids, params=asked, chat=chat, stop=stop)


def params_from_json(fields: Mapping[str, Any], usual: SamplingParams) -> SamplingParams:
    """Returns `usual` with the fields of a JSON object, where lists stand for tuples.

    Raises:
        InputError: a field that does not exist, or a value outside its range.
    """
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if isinstance(found.get("stop"), str):
        found["stop"] = (found["stop"],)
    bias = found.get("logit_bias")
    if isinstance(bias, dict):
        bad = [key for key in bias if not (key.isascii() and key.isdigit())]
        if bad:
            raise InputError(f"keys of logit_bias must be token ids, got {bad}")
        found["logit_bias"] = {int(key): value for key, value in bias.items()}
    if isinstance(found.get("grammar"), dict):
        found["grammar"] = Grammar.from_fields(found["grammar"])
    try:
        return replace(usual, **found)
    except TypeError as error:  # names the field, and the nearest one that exists
        raise InputError(str(error)) from error


def answer(llm: LLM, task: Task, output: RequestOutput, error: BaseException | None) -> Record:
    """Returns the output line of a finished task; error: what ended its request, if anything.

    Nothing in it depends on when or beside what the request ran.
    """
    record = _head(task.line, task.name) | describe_output(output)
    if task.chat is not None:
        read = read_chat(llm.chat_encoder, task.chat, task.stop, output)
        record |= {
            "text": read.text,
            "message": read.message.as_dict(),
            "token_ids": list(read.token_ids),
            "finish_reason": read.finish_reason,
            "stop_reason": read.stop_reason,
        }
        if read.logprobs is not None:
            record["logprobs"] = _numbers(read.logprobs)
        if "top_logprobs" in record:
            record["top_logprobs"] = record["top_logprobs"][: len(read.token_ids)]
    if error is not None:
        record["error"] = _describe(error)
    return record


def score_line(task: Task, output: RequestOutput) -> Record:
    """Returns the output line of a task whose prompt was scored."""
    return _head(task.line, task.name) | describe_score(output)


def describe_score(output: RequestOutput) -> Record:
    """Returns what is known of a scored prompt: log-probabilities of its ids after the first."""
    found = output.score()
    record: Record = {
        "token_ids": list(found.prompt_token_ids),
        "logprobs": _numbers(found.logprobs),
        "total": math.fsum(found.logprobs.tolist()),
    }
    if any(found.top_logprobs):
        record["top_logprobs"] = _pairs(found.top_logprobs)
    return record


def describe_output(output: RequestOutput) -> Record:
    """Returns seed, usage and completions of a request; `outputs` lists them if they are many."""
    counts = [len(completion.token_ids) for completion in output.outputs]
    record: Record = {"seed": output.seed}
    record["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(counts),
    }
    completions = [_completion(one) for one in output.outputs]
    if len(completions) == 1:
        record |= completions[0]
    else:
        record["outputs"] = completions
    if output.warnings:
        record["warnings"] = list(output.warnings)
    if output.prompt_logprobs is not None:
        assert output.prompt_top_logprobs is not None
        record["prompt_logprobs"] = _numbers(output.prompt_logprobs)
        if any(output.prompt_top_logprobs):
            record["prompt_top_logprobs"] = _pairs(output.prompt_top_logprobs)
    return record


def dump(record: Record) -> bytes:
    """Returns a record as one line: ASCII, so that no reader splits it at another line end."""
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _completion(one: Completion) -> Record:
    record: Record = {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if one.logprobs is not None:
        record["logprobs"] = _numbers(one.logprobs)
        if one.top_logprobs and any(one.top_logprobs):
            record["top_logprobs"] = _pairs(one.top_logprobs)
    return record


def _numbers(values: np.ndarray) -> list[float | None]:
    """Returns float32 values exactly; JSON has no -inf, so that is null."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _pairs(rows: tuple[TopLogprobs, ...]) -> list[list[tuple[int, float | None]]]:
    return [[(i, x if math.isfinite(x) else None) for i, x in row] for row in rows]


def _head(line: Line, name: str | int | None) -> Record:
    return {"line": line.number, "sha256": line.digest, "id": name}


def _describe(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


def _read_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"a line must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"a line must be a JSON object, got a {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _take_name(fields: dict[str, Any]) -> str | int | None:
    name = fields.pop("id", None)
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise InputError(f"id must be a string or an integer, got {name!r}")
    return name


def _take_prompt(fields: dict[str, Any]) -> tuple[str, Any]:
    given = [name for name in _PROMPTS if name in fields]
    if len(given) != 1:
        raise InputError(f"a line has exactly one of {', '.join(_PROMPTS)}; got {given or 'none'}")
    return given[0], fields.pop(given[0])


def _asked(fields: dict[str, Any], usual: SamplingParams) -> SamplingParams:
    """Returns the parameters of a line, whatever name its constraint has."""
    constraint = read_constraint(fields)
    if constraint is not None and fields.get("grammar") is not None:
        raise InputError("grammar and another constraint both bind the text: give one")
    rest = {name: value for name, value in fields.items() if name not in (*ALIASES, "strict")}
    asked = params_from_json(rest, usual)
    return asked if constraint is None else replace(asked, grammar=constraint)


def _conversation(
    llm: LLM, messages: Any, options: dict[str, Any], asked: SamplingParams
) -> tuple[ChatPrompt, SamplingParams]:
    if not isinstance(messages, list):
        raise InputError(f"messages must be a list, got a {type(messages).__name__}")
    if asked.n > 1:
        raise InputError(f"messages are answered once, got n={asked.n}: leave n at 1")
    arguments = prompt_arguments(options | {"messages": messages})
    chat, asked = prepare_answer(llm.chat_encoder, arguments.pop("messages"), asked, arguments)
    if chat.images:
        raise InputError(
            f"messages must be text here, got {len(chat.images)} images: ask one conversation at "
            "a time with `chat`"
        )
    return chat, replace(asked, stop=())


def _prompt_ids(llm: LLM, kind: str, value: Any, bos: bool) -> list[int]:
    if kind == "prompt":
        if not isinstance(value, str):
            raise InputError(f"prompt must be a text, got a {type(value).__name__}")
        return [llm.model.config.bos_token_id] * bos + llm.encode(value)
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise InputError("token_ids must be a list of integers")
    too_large = [token for token in value if abs(token) >= 2**31]
    if too_large:
        raise InputError(f"token_ids must be ids of the vocabulary, got {too_large[:3]}")
    return value
