"""Reads safetensors files lazily: headers are parsed and checked, payloads are read by row range.

The parser is our own because a checkpoint holds `F8_E8M0`, which not every release of the
safetensors library reads. `TensorStore` joins the shards of one folder (model.md 2.1).
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.errors import CheckpointError

#: NumPy type of every safetensors dtype that is read. E8M0 scales stay bytes.
NUMPY_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}

#: Longest header that is parsed; the same limit as the safetensors library.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: file, stored name, dtype, shape, absolute offset of its bytes."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Returns a copy of the tensor, or of a range of its first axis (step 1)."""
        dtype = NUMPY_DTYPES[self.dtype]
        if rows is None:
            start, shape = 0, self.shape
        else:
            first, stop, step = rows.indices(self.shape[0])
            if step != 1:
                raise ValueError(f"row ranges have step 1, got {rows}")
            row_bytes = prod(self.shape[1:]) * dtype.itemsize
            start, shape = first * row_bytes, (max(0, stop - first), *self.shape[1:])
        out = np.empty(shape, dtype)
        self._read_bytes(out.reshape(-1).view(np.uint8), self.offset + start)
        return out

    def mapped(self) -> np.ndarray:
        """Returns the tensor as a read-only view of the file; pages are read when touched."""
        dtype = NUMPY_DTYPES[self.dtype]
        if not prod(self.shape):
            return np.empty(self.shape, dtype)
        raw = np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=(self.nbytes,))
        return raw.view(dtype).reshape(self.shape)

    def _read_bytes(self, out: np.ndarray, offset: int) -> None:
        with open(self.path, "rb", buffering=0) as file:
            file.seek(offset)
            view = memoryview(out)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(
                        f"a shard must not shrink while it is read: {len(view)} bytes of "
                        f"{self.name} are missing, in {self.path}. Keep the checkpoint unchanged "
                        "while it is loaded."
                    )
                view = view[count:]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of one safetensors file by stored name; reads only its header.

    Raises:
        CheckpointError: The file is absent, truncated or malformed.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"a safetensors file starts with the length of its header and the header: the "
                    f"file has {size} bytes, its header claims {length}, in {path}. The shard is "
                    "truncated or not a safetensors file: download it again."
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"every shard must be a readable file: {error}, at {path}. Download the missing shard."
        ) from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise _malformed(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _malformed(path, "its header is not an object")
    header.pop("__metadata__", None)
    base = 8 + length
    spans = []
    entries = {}
    for name, record in header.items():
        entry, stop = _entry(path, name, record, base)
        entries[name] = entry
        spans.append((entry.offset - base, stop, name))
    _check_spans(path, sorted(spans), size - base)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs more than once")
    return result


def _malformed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"a shard must be a well-formed safetensors file: {what}, in {path}. Download it again."
    )


def _entry(path: Path, name: str, record: Any, base: int) -> tuple[TensorEntry, int]:
    fields: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    dtype = fields.get("dtype")
    shape, offsets = _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise _malformed(path, f"tensor {name!r} lacks a dtype, a shape or data_offsets")
    if dtype not in NUMPY_DTYPES:
        raise _malformed(path, f"tensor {name!r} has dtype {dtype}, not one of {[*NUMPY_DTYPES]}")
    entry = TensorEntry(path, name, dtype, tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        what = f"tensor {name!r} of {dtype} {shape} needs {entry.nbytes} bytes, has {offsets}"
        raise _malformed(path, what)
    return entry, offsets[1]


def _naturals(value: Any) -> list[int] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return value
    return None


def _check_spans(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    position = 0
    for start, stop, name in spans:
        if start != position:
            raise _malformed(
                path, f"tensor {name!r} starts at {start}, the one before ends at {position}"
            )
        position = stop
    if position > available:
        raise CheckpointError(
            f"a shard must hold every byte that its header lists: {position} bytes are listed, "
            f"{available} are there, in {path}. The shard is truncated: download it again."
        )
    if position < available:
        raise _malformed(path, f"{available - position} bytes follow the last tensor")


class TensorStore(Mapping[str, TensorEntry]):
    """The tensors of one checkpoint folder by canonical name (without a leading `model.`)."""

    def __init__(
        self, folder: Path, entries: dict[str, TensorEntry], problems: tuple[str, ...] = ()
    ) -> None:
        """Holds entries of `folder`; `problems` are disagreements between index and shards."""
        self.folder = folder
        self.problems = problems
        self._entries = entries

    def __getitem__(self, name: str) -> TensorEntry:
        """Returns the entry of a tensor."""
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the canonical names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self._entries)


def open_store(folder: str | Path) -> TensorStore:
    """Returns the tensors of a folder with an index file, or with a single `model.safetensors`.

    Disagreements between the index and its shards are kept in `problems`, so that the coverage
    check reports them with everything else.

    Raises:
        CheckpointError: Neither file exists, or one is malformed, or a shard is absent or damaged.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        weight_map = _read_index(index)
        shards = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
        problems = tuple(_index_problems(weight_map, shards))
        stored = {
            name: shards[shard][name] for name, shard in weight_map.items() if name in shards[shard]
        }
    elif single.is_file():
        problems = ()
        stored = read_header(single)
    else:
        raise CheckpointError(
            f"a checkpoint folder holds model.safetensors.index.json or model.safetensors: neither "
            f"is there, in {folder}. Name a folder in Hugging Face layout."
        )
    return TensorStore(folder, _canonical(stored, folder), problems)


def _read_index(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the index must be valid JSON with unique names: {error}, in {path}. "
            "Download it again."
        ) from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"the index must hold a weight_map from tensor names to files: none is there, in "
            f"{path}. Download it again."
        )
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(
                f"the index may name only files of its own folder: received {shard!r}, in {path}. "
                "Put every shard beside the index."
            )
        if not (path.parent / shard).is_file():
            count = sum(1 for value in weight_map.values() if value == shard)
            raise CheckpointError(
                f"every file that the index names must exist: {shard} ({count} tensors) is absent, "
                f"in {path.parent}. Download the missing shard."
            )
    return weight_map


def _index_problems(
    weight_map: dict[str, str], shards: dict[str, dict[str, TensorEntry]]
) -> Iterator[str]:
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            yield f"{name}: the index puts it in {shard}, which does not hold it"
    for shard, entries in shards.items():
        for name in entries:
            if weight_map.get(name) != shard:
                yield f"{name}: {shard} holds it, the index does not list it there"


def _canonical(stored: dict[str, TensorEntry], folder: Path) -> dict[str, TensorEntry]:
    result: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        canonical = name.removeprefix("model.")
        if canonical in result:
            raise CheckpointError(
                f"names must differ after the optional leading 'model.' is stripped: "
                f"{result[canonical].name!r} and {name!r} collide, in {folder}. Remove one of them."
            )
        result[canonical] = entry
    return result
