"""Golden fixture files whose keys are counted: every key is taken by a test or excused."""

from pathlib import Path

import numpy as np
from safetensors.flax import load_file

MODULES = Path(__file__).parents[2] / "fixtures" / "modules"


class Fixture:
    """A fixture file that remembers which of its keys were taken."""

    def __init__(self, name: str) -> None:
        """Reads ``tests/fixtures/modules/<name>.safetensors``."""
        self._arrays = {
            key: np.asarray(value)
            for key, value in load_file(MODULES / f"{name}.safetensors").items()
        }
        self.taken: set[str] = set()

    def keys(self) -> list[str]:
        """Returns all keys of the file, sorted."""
        return sorted(self._arrays)

    def take(self, key: str) -> np.ndarray:
        """Returns one tensor (BF16 as ml_dtypes.bfloat16) and records that a test uses it."""
        self.taken.add(key)
        return self._arrays[key]


def load_fixture(name: str) -> Fixture:
    """Returns the fixture file ``modules/<name>.safetensors``."""
    return Fixture(name)
