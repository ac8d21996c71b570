"""The output file of a job: appended by one writer, never rewritten, read again to resume.

Beside it, NAME.job says which input and which options the answers belong to. Every line is written
whole, so a kill leaves whole lines and at most the beginning of one more, which is cut off.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import InputError
from deepinfer_jax.jobs.lines import Record, dump
from deepinfer_jax.sampling.random import fresh_seed

_SYNC_S = 1.0  # what a power failure may take; a kill takes nothing that was written


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """What identifies an input: SHA-256, all its lines, those that are not blank."""

    sha256: str
    lines: int
    filled: int


def read_facts(path: Path) -> InputFacts:
    """Returns the facts of an input, in one pass.

    Raises:
        InputError: it cannot be read.
    """
    whole, lines, filled = hashlib.sha256(), 0, 0
    try:
        with path.open("rb") as file:
            for text in file:
                whole.update(text)
                lines += 1
                filled += bool(text.strip())
    except OSError as error:
        raise InputError(f"the input must be a readable file: {error}") from error
    return InputFacts(sha256=whole.hexdigest(), lines=lines, filled=filled)


class JobOutput:
    """An output that is open for appending. seed: of the job. done: lines answered so far."""

    def __init__(self, descriptor: int, seed: int, answered: bytearray) -> None:
        """Takes a locked file whose answers have been read."""
        self.seed = seed
        self.done = sum(answered)
        self._descriptor, self._answered = descriptor, answered
        self._synced = time.monotonic()

    def has(self, number: int) -> bool:
        """Returns whether line `number` is answered."""
        return bool(self._answered[number])

    def append(self, records: Sequence[Record]) -> None:
        """Writes answers in one write, whole lines.

        Raises:
            OSError: the file cannot be written; a line that was cut is removed at the next start.
        """
        data = b"".join(map(dump, records))
        while data:
            data = data[os.write(self._descriptor, data) :]
        for record in records:
            self._answered[record["line"]] = 1
        self.done += len(records)
        if time.monotonic() - self._synced >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Waits until everything is on the disk."""
        os.fsync(self._descriptor)
        self._synced = time.monotonic()


@contextmanager
def open_output(
    path: Path, facts: InputFacts, options: dict[str, Any], seed: int | None
) -> Iterator[JobOutput]:
    """Opens an output, new or begun before, for this process alone.

    Args:
        path: of the output.
        facts: of the input.
        options: what else the answers depend on, JSON values.
        seed: of the job. None takes that of an old output and draws one for a new output.

    Raises:
        InputError: another process writes to it, it belongs to another input or to other options,
            or it is no output of a job.
    """
    import fcntl  # not on Windows, where only this command is absent

    header = {"format": 1, "input_sha256": facts.sha256, "seed": seed, "options": options}
    side = path.with_name(path.name + ".job")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise InputError(f"the output must be a writable file: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            raise InputError(
                f"another process is writing to {path}: wait for it, or choose another output"
            ) from None
        if os.fstat(descriptor).st_size == 0:
            seed = fresh_seed() if seed is None else seed
            _write_side(side, header | {"seed": seed})
        else:
            seed = _same_job(path, side, header)
        output = JobOutput(descriptor, seed, _read_answers(path, descriptor, facts.lines))
        yield output
        output.sync()
    finally:
        os.close(descriptor)


def _write_side(side: Path, header: dict[str, Any]) -> None:
    """Writes the file beside the output; it is there whole before the first answer is."""
    new = side.with_name(side.name + ".new")
    with new.open("w", encoding="ascii") as file:
        file.write(json.dumps(header, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(side)
    folder = os.open(side.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _same_job(path: Path, side: Path, header: dict[str, Any]) -> int:
    """Returns the seed of a job begun before.

    Raises:
        InputError: it is not this job.
    """
    try:
        old = json.loads(side.read_text(encoding="ascii"))
        form, sha256 = old["format"], old["input_sha256"]
        then, seed = old["options"], int(old["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} has text and {side} does not say of which job ({error!r}): choose another "
            "output"
        ) from error
    if form != header["format"]:
        raise InputError(f"{side} has format {form}, this version writes {header['format']}")
    if sha256 != header["input_sha256"]:
        raise InputError(
            f"{path} has answers to another input: give the input it was begun with, unchanged, or "
            "choose another output"
        )
    then, now = then | {"seed": seed}, header["options"] | {"seed": header["seed"]}
    if now["seed"] is None:
        now["seed"] = seed
    changed = [
        f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(now.keys() | then.keys())
        if now.get(name) != then.get(name)
    ]
    if changed:
        raise InputError(
            f"{path} was begun with other options: {'; '.join(changed)}. Give the same, or choose "
            "another output"
        )
    return seed


def _read_answers(path: Path, descriptor: int, lines: int) -> bytearray:
    """Returns 1 for every answered line, and cuts off a line that was not written to its end."""
    answered, end = bytearray(lines + 1), 0
    with path.open("rb") as file:
        for place, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                os.ftruncate(descriptor, end)
                os.fsync(descriptor)
                break
            end += len(text)
            try:
                number = json.loads(text)["line"]
                is_new = 0 < number <= lines and not answered[number]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"line {place} of {path} is damaged: {error!r}") from error
            if not is_new:
                raise InputError(f"line {place} of {path} answers line {number} again, or none")
            answered[number] = 1
    return answered
