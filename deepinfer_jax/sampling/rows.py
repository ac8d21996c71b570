"""Per-row sampling parameters as device arrays, built on the host from requests (engine.md 2.6)."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from flax import struct
from jax import Array

from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.params import SamplingParams

Leaf = Any  # an array, or whatever jax.tree puts in its place
_LARGEST = float(np.finfo(np.float32).max)


@struct.dataclass
class RowParams:
    """Sampling parameters of b rows. A row of zeros is greedy and has no effect on other rows.

    `temperature` 0 is greedy. `top_k` -1 is off; 0 keeps nothing, so the host never sends it.
    `key` is the request's (child's) Threefry key.
    """

    temperature: Leaf  # float32 [b]
    top_p: Leaf  # float32 [b]
    top_k: Leaf  # int32 [b]
    min_p: Leaf  # float32 [b]
    presence_penalty: Leaf  # float32 [b]
    frequency_penalty: Leaf  # float32 [b]
    repetition_penalty: Leaf  # float32 [b]
    key: Leaf  # uint32 [b, 2]

    def take(self, rows: Any) -> "RowParams":
        """Returns the parameters of the given rows, repeats allowed."""
        return jax.tree.map(lambda leaf: leaf[rows], self)


_NULL = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
_DTYPES = {"top_k": np.int32}


def row_params(
    params: Sequence[SamplingParams], seeds: Sequence[int], *, size: int | None = None
) -> RowParams:
    """Returns the device parameters of requests, one row each, padded to `size` greedy rows.

    Args:
        params: of each row.
        seeds: the seed in use of each row (`random.child_seed` for completions beyond the first).
        size: number of rows of the result; None is as many as there are requests.

    Raises:
        ValueError: lengths differ, or there are more requests than rows.
    """
    size = len(params) if size is None else size
    if len(params) != len(seeds) or size < len(params):
        raise ValueError(
            f"row_params needs one seed per request and room for all, got {len(params)} requests, "
            f"{len(seeds)} seeds and {size} rows"
        )
    columns: dict[str, np.ndarray] = {}
    for name in (field.name for field in fields(RowParams) if field.name != "key"):
        column = np.full(size, _NULL.get(name, 0), _DTYPES.get(name, np.float32))
        column[: len(params)] = [_VALUES.get(name, getattr)(one, name) for one in params]
        columns[name] = column
    key = np.zeros((size, 2), np.uint32)
    for row, seed in enumerate(seeds):
        key[row] = random.seed_key(seed)
    return jax.tree.map(jax.numpy.asarray, RowParams(key=key, **columns))


def _temperature(params: SamplingParams, name: str) -> float:
    return 0.0 if params.is_greedy else min(float(params.temperature), _LARGEST)


def _top_k(params: SamplingParams, name: str) -> int:
    return -1 if params.top_k <= 0 else min(params.top_k, 2**31 - 1)


_VALUES = {"temperature": _temperature, "top_k": _top_k}


def bias_rows(
    biases: Sequence[Mapping[int, float] | None], width: int, *, size: int | None = None
) -> tuple[Array, Array]:
    """Returns sparse logit biases as (ids int32, values float32) [size, width].

    Unused places have id -1.

    Raises:
        ValueError: a mapping has more than `width` entries, or there are more rows than `size`.
    """
    size = len(biases) if size is None else size
    ids = np.full((size, width), -1, np.int32)
    values = np.zeros((size, width), np.float32)
    if size < len(biases) or any(len(bias or {}) > width for bias in biases):
        raise ValueError(f"bias_rows: {len(biases)} biases do not fit into [{size}, {width}]")
    for row, bias in enumerate(biases):
        for place, (token, value) in enumerate(sorted((bias or {}).items())):
            ids[row, place], values[row, place] = token, value
    return jax.numpy.asarray(ids), jax.numpy.asarray(values)
