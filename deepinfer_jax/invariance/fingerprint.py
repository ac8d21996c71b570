"""Fingerprints of lone runs, and what two people's reports have in common (determinism.md 7)."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.errors import InputError
from deepinfer_jax.record.compare import differences

DIGITS = 16  # hexadecimal ones kept of a hash
#: Sections of a report: what was run, and where.
RUN, PLACE = "run", "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """One sequence's lone run. chain: a hash per position that stands for all logits up to it."""

    ids: tuple[int, ...]
    chain: tuple[str, ...]


def fingerprint(ids: Sequence[int], logits: np.ndarray) -> Fingerprint:
    """Returns the chained hashes of a run: SHA-256 of (hash before, position, id, logits).

    Args:
        ids: the sequence.
        logits: float32 [len(ids), v]; hashed little endian.
    """
    before, chain = b"", []
    for position, (token, row) in enumerate(zip(ids, logits, strict=True)):
        head = before + struct.pack("<II", position, token)
        before = hashlib.sha256(head + row.astype("<f4").tobytes()).digest()
        chain.append(before.hex()[:DIGITS])
    return Fingerprint(ids=tuple(ids), chain=tuple(chain))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two reports say of each other.

    run: where they differ in what was run; such reports compare different things. environment:
    where they differ in device, versions, flags or code, so that equal bits are not promised.
    positions: compared; differing: sequences whose bits differ, each with its first position.
    """

    run: tuple[str, ...]
    environment: tuple[str, ...]
    positions: int
    differing: tuple[str, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether equal bits are promised between the two."""
        return not self.run and not self.environment

    @property
    def is_broken(self) -> bool:
        """Whether bits differ that are promised to be equal."""
        return self.is_comparable and bool(self.differing)

    def lines(self) -> list[str]:
        """Returns the findings in words: comparable or not, then whether bits match, then where."""
        found = []
        for what, fields in (("what was run", self.run), ("the environment", self.environment)):
            found += [f"not comparable, {what} differs: {field}" for field in fields]
        if self.is_comparable:
            found.append("comparable: the same weights, options, device, versions, flags and code")
        if not self.differing:
            return [*found, f"bits of all {self.positions} positions match"]
        return [*found, *(f"bits do not match: {one}" for one in self.differing)]


def read_report(path: Path) -> dict[str, Any]:
    """Returns a report that `verify --json` wrote.

    Raises:
        InputError: it cannot be read, or it is no report that holds fingerprints.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no readable report: {error}") from error
    wanted = ("seed", RUN, PLACE, "fingerprints")
    if not isinstance(found, dict) or any(name not in found for name in wanted):
        raise InputError(
            f"a report to compare with has the fields {', '.join(wanted)}, {path} has not: write "
            "it with `deepinfer-jax verify --json FILE` of this version"
        )
    return found


def compare_reports(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Comparison:
    """Returns where two reports differ, given as JSON values.

    Raises:
        InputError: no sequence is in both.
    """
    here = {tuple(one["ids"]): one["chain"] for one in ours["fingerprints"]}
    there = {tuple(one["ids"]): one["chain"] for one in theirs["fingerprints"]}
    common = [ids for ids in there if ids in here]
    if not common:
        raise InputError(
            f"the reports have no sequence in common (seeds {theirs['seed']} and {ours['seed']}, "
            f"{len(there)} and {len(here)} fingerprints): run the same cases with the same --seed"
        )
    differing = []
    for number, ids in enumerate(common):
        pairs = zip(there[ids], here[ids], strict=True)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if place is not None:
            differing.append(
                f"sequence {number}, first at position {place} (id {ids[place]}): they have "
                f"{there[ids][place]}, here it is {here[ids][place]}"
            )
    return Comparison(
        run=tuple(differences(theirs[RUN], ours[RUN])),
        environment=tuple(differences(theirs[PLACE], ours[PLACE])),
        positions=sum(map(len, common)),
        differing=tuple(differing),
    )
