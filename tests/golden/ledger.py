"""Golden files whose keys are counted: each is an input, compared by exactly one assertion, or left
to a named later issue."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.safetensors import read_header
from tests.golden import compare

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@lru_cache(maxsize=16)
def _arrays(path: Path) -> dict[str, np.ndarray]:
    arrays = {name: entry.read() for name, entry in read_header(path).items()}
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


class Fixture:
    """One golden file and what a case has used of it."""

    def __init__(self, path: str) -> None:
        """path: below tests/fixtures, without the suffix."""
        self.arrays = _arrays(FIXTURES / f"{path}.safetensors")
        self.inputs: set[str] = set()
        self.outputs: set[str] = set()

    def input(self, key: str) -> np.ndarray:
        """Returns an input as stored and records it."""
        self.inputs.add(key)
        return self.arrays[key]

    def value(self, key: str) -> np.ndarray:
        """Returns a BF16 or float32 input as float32."""
        return _float32(self.input(key))

    def take(self, key: str) -> np.ndarray:
        """Returns an expected output, BF16 as float32; no second assertion may compare it."""
        if key in self.outputs:
            raise AssertionError(f"{key} is compared by two assertions")
        self.outputs.add(key)
        return _float32(self.arrays[key])


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


@dataclass(frozen=True)
class Left:
    """Keys that a later issue owns."""

    issue: int
    reason: str
    keys: tuple[str, ...]


@dataclass
class Suite:
    """All cases of one golden file.

    A case runs once per process: its own test and the coverage test share the result, and either
    works alone.
    """

    path: str
    cases: Mapping[str, Callable[[Fixture], None]]
    left: Iterable[Left] = ()
    worst: dict[str, float] = field(default_factory=dict)
    _done: dict[str, Fixture] = field(default_factory=dict)

    def run(self, name: str) -> Fixture:
        """Runs a case and returns what it used.

        Raises:
            AssertionError: a comparison failed.
        """
        if name not in self._done:
            fixture = Fixture(self.path)
            with compare.measuring(self.worst):
                self.cases[name](fixture)
            self._done[name] = fixture
        return self._done[name]

    def coverage(self) -> str:
        """Returns `consumed / left / total` of the file.

        Raises:
            AssertionError: a key is unused, compared twice, or left although absent or compared.
        """
        total = set(Fixture(self.path).arrays)
        inputs: set[str] = set()
        owner: dict[str, str] = {}
        for name in self.cases:
            used = self.run(name)
            inputs |= used.inputs
            for key in used.outputs:
                if key in owner:
                    raise AssertionError(f"{key} is compared by {owner[key]} and {name}")
                owner[key] = name
        left = [key for entry in self.left for key in entry.keys]
        compared = set(owner)
        remainder = sorted(total - inputs - compared - set(left))
        problems = {
            "neither used nor left": remainder,
            "left but absent": sorted(set(left) - total),
            "left but used": sorted(set(left) & (inputs | compared)),
            "left twice": sorted({key for key in left if left.count(key) > 1}),
        }
        for problem, keys in problems.items():
            if keys:
                raise AssertionError(f"{self.path}: {len(keys)} keys {problem}: {keys[:8]}")
        only_inputs = inputs - compared
        later = "".join(
            f" / left to issue {entry.issue} of 14: {len(entry.keys)} ({entry.reason})"
            for entry in self.left
        )
        return (
            f"{self.path}: consumed {len(compared) + len(only_inputs)} = {len(compared)} compared"
            f" + {len(only_inputs)} inputs{later} / total {len(total)}"
        )

    def report(self, record: Callable[[str, str], None]) -> None:
        """Prints and records the coverage and the largest errors measured.

        Raises:
            AssertionError: as `coverage`.
        """
        line = self.coverage()
        worst = ", ".join(f"{label} {value:.3g}" for label, value in self.worst.items())
        print(f"{line}\n  largest errors: {worst or 'none, all exact'}")
        record("coverage", line)
        record("worst", worst)
