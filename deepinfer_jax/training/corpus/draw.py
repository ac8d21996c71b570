"""Seeded draws and the split of every entity: the same key gives the same values everywhere."""

import random
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

SPLITS = ("train", "validation", "test")
_SALT = "nano corpus 1:"
_BUCKETS = 20
# Buckets of a split: 80 % train, 10 % validation, 10 % test.
_FIRST_BUCKET = {"train": 0, "validation": 16, "test": 18}


class Draw:
    """A stream of draws named by a key such as ("train", "story", 0, 17).

    Only `random.Random.random` is used, the one method whose values Python promises to keep.
    """

    __slots__ = ("_random",)

    def __init__(self, *key: str | int) -> None:
        self._random = random.Random("/".join(map(str, key))).random

    def below(self, stop: int) -> int:
        """Returns an integer of [0, stop)."""
        return int(self._random() * stop)

    def between(self, low: int, high: int) -> int:
        """Returns an integer of [low, high]."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """Returns True with this probability."""
        return self._random() < probability

    def uniform(self) -> float:
        """Returns a float of [0, 1)."""
        return self._random()

    def pick[T](self, values: Sequence[T]) -> T:
        """Returns one of the values."""
        return values[int(self._random() * len(values))]

    def sample[T](self, values: Sequence[T], count: int) -> list[T]:
        """Returns `count` values of different positions, in drawn order."""
        if 4 * count < len(values):
            chosen: dict[int, None] = {}
            while len(chosen) < count:
                chosen[self.below(len(values))] = None
            return [values[i] for i in chosen]
        return self.shuffled(values)[:count]

    def shuffled[T](self, values: Sequence[T]) -> list[T]:
        """Returns the values in drawn order."""
        out = list(values)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out


@cache
def _first_bucket(split: str) -> tuple[int, int]:
    if split not in _FIRST_BUCKET:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}.")
    first = _FIRST_BUCKET[split]
    return first, min([b for b in _FIRST_BUCKET.values() if b > first], default=_BUCKETS)


def in_split(split: str, kind: str, text: str) -> bool:
    """Says whether an entity (a name, a code, an operand pair, ...) belongs to a split."""
    first, stop = _first_bucket(split)
    digest = blake2b(f"{_SALT}{kind}:{text}".encode(), digest_size=4).digest()
    return first <= int.from_bytes(digest, "little") % _BUCKETS < stop
