"""`RunRecord`: one request, everything its output depends on, and that output, as canonical JSON.

Canonical: keys sorted, no spaces, UTF-8, floats in their shortest exact form, one newline at the
end. Equal records are equal bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import InputError

FORMAT = "deepinfer-jax run record"
FORMAT_VERSION = 1
Section = dict[str, Any]
#: Sections, and what a reader needs of each.
_FIELDS: dict[str, tuple[str, ...]] = {
    "environment": (),
    "model": ("source", "config", "weights_sha256"),
    "execution": ("numerics", "determinism", "kernels"),
    "promises": (),
    "options": (),
    "runtime": (),
    "request": ("prompt_token_ids", "params"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutput:
    """One completion: what `Completion` holds of it, without the text.

    logit_hashes: of the raw logits that gave each token (`record.logit_hash`), 16 hexadecimal
    digits; None unless they were recorded.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logit_hashes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Sections of a run record; plain JSON values.

    environment: code, versions, device and flags: bits may differ where it does (D6).
    model: source, config, its hash, and the Merkle root of the weights.
    execution: numerics, level, kernels, and the tiles that are part of the arithmetic.
    promises: `determinism_report` as lists [held, reason].
    options: of the engine, as far as the output depends on them at level "batch".
    runtime: its other options.
    request: prompt_token_ids, and params with the seed in use; images, where there are any.
    outputs: one for each completion; none if they were taken out, to be regenerated.
    `RequestOutput.record` makes it and says what it raises.

    Examples:
        >>> record = llm.generate("Mara", di.SamplingParams(seed=7, max_tokens=2))[0].record
        >>> record.execution["determinism"], len(record.outputs[0].token_ids)
        ('batch', 2)
    """

    environment: Section
    model: Section
    execution: Section
    promises: Section
    options: Section
    runtime: Section
    request: Section
    outputs: tuple[RecordedOutput, ...]

    def to_json(self) -> str:
        """Returns the record as canonical JSON."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        return canonical_json(head | asdict(self)) + "\n"

    def write(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8", newline="\n")

    @property
    def has_logit_hashes(self) -> bool:
        """Whether the logits of every token were recorded."""
        return bool(self.outputs) and all(o.logit_hashes is not None for o in self.outputs)


def read_record(path: str | Path) -> RunRecord:
    """Returns the record of a file; its outputs may be missing.

    Raises:
        InputError: the file cannot be read, is no run record, or is of a newer format.

    Examples:
        >>> di.read_record("no such file")
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.InputError: a run record is a JSON file, ...
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"a run record is a JSON file, {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(
            f'a run record has "format": "{FORMAT}", {path} has not: give a file that '
            "RunRecord.write made"
        )
    version = found.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise InputError(
            f"this version reads run records up to format {FORMAT_VERSION}, {path} has "
            f"{version!r}: upgrade deepinfer-jax"
        )
    try:
        sections = {name: dict(found[name]) for name in _FIELDS}
        for name, fields in _FIELDS.items():
            missing = [field for field in fields if field not in sections[name]]
            if missing:
                raise ValueError(f"{name} has no {missing[0]}")
        outputs = tuple(map(_read_output, found.get("outputs") or ()))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is damaged: a run record has the objects {', '.join(_FIELDS)} and a list "
            f"of outputs ({type(error).__name__}: {error})"
        ) from error
    return RunRecord(**sections, outputs=outputs)


def _read_output(found: Mapping[str, Any]) -> RecordedOutput:
    tokens, hashes = found["token_ids"], found.get("logit_hashes")
    if hashes is not None and len(hashes) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens with {len(hashes)} logit hashes")
    return RecordedOutput(
        token_ids=tuple(int(token) for token in tokens),
        finish_reason=str(found["finish_reason"]),
        stop_reason=found["stop_reason"],
        logit_hashes=None if hashes is None else tuple(str(one) for one in hashes),
    )


def canonical_json(value: Any) -> str:
    """Returns a value as canonical JSON; tuples are lists, and keys are texts.

    Raises:
        InputError: it holds something JSON has no form for.
    """
    try:
        return json.dumps(
            plain(value),
            sort_keys=True,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"a run record holds JSON values only: {error}") from error


def json_hash(value: Any) -> str:
    """Returns the SHA-256 of a value's canonical JSON, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Returns a value as JSON gives it back: lists for tuples, texts for keys."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
