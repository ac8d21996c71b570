"""Loads a checkpoint into its parameter tree, leaf by leaf and straight into the shards of a mesh.

Host memory holds at most one leaf's local shards at a time. Nothing is converted except `wo_a`,
which becomes BF16 exactly (model.md 2.7), and `tid2eid`, which becomes int32 (JAX has no int64).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.coverage import check_coverage
from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.checkpoint.safetensors import NUMPY_DTYPES, TensorEntry, TensorStore, open_store
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.model.spec import ParamSpec, scale_name
from deepinfer_jax.numerics.formats import BLOCKS, E8M0
from pallas_kernels.core.quant_array import QuantArray

Progress = Callable[[int, int, str], None]
EngramPlace = Literal["device", "host", "mapped"]
#: Decides where an array of a leaf goes: its spec and its shape (payload or scale, stacked).
Placement = Callable[[ParamSpec, tuple[int, ...]], jax.sharding.Sharding]
#: Returns (axis, length) up to which an array of a leaf is padded, None to leave it as it is.
Padding = Callable[[ParamSpec, tuple[int, ...]], tuple[int, int] | None]
Index = tuple[slice, ...]


def load_params(
    folder: str | Path,
    config: ModelConfig,
    *,
    progress: Progress | None = None,
    engram: EngramPlace = "device",
    placement: Placement | None = None,
    padding: Padding | None = None,
    expand_limit_bytes: int = 64 * 2**20,
) -> Any:
    """Returns the parameters of a checkpoint: `Params` for V4.1, `V4Params` for V4.

    Args:
        folder: Folder in Hugging Face layout.
        config: Its config; every tensor it implies must be there, and no other.
        progress: Called as `(done_bytes, total_bytes, name)` after every tensor that was read.
        engram: Where Engram tables live: on the device, in host memory, or mapped from the file
            (`HostTable` for the last two).
        placement: Sharding of each array; None puts everything on the default device.
        padding: Longer axes of some arrays, so that they divide over a mesh; they are filled by
            repetition from the start.
        expand_limit_bytes: Largest float32 buffer used while `wo_a` is dequantised.

    Raises:
        CheckpointError: A file is absent or damaged, or tensors do not match the config. Nothing
            loaded so far is kept.
    """
    store = open_store(folder)
    check_coverage(store, config)
    tree = spec_tree(config)
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    total = sum(tensor.nbytes for spec in leaves for tensor in spec.tensors())
    place = placement or _default_placement
    loader = _Loader(store, place, padding, expand_limit_bytes, progress, total)
    loaded: list[Any] = []
    try:
        for spec in leaves:
            if spec.format == "fp8_row32" and engram != "device":
                loaded.append(loader.host_table(spec, is_mapped=engram == "mapped"))
            else:
                loaded.append(loader.leaf(spec, config))
    except BaseException:
        loaded.clear()  # the traceback would keep the arrays alive
        raise
    return jax.tree.unflatten(structure, loaded)


def _default_placement(spec: ParamSpec, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


@dataclass(slots=True)
class _Loader:
    """Reads the leaves of one store."""

    store: TensorStore
    placement: Placement
    padding: Padding | None
    expand_limit_bytes: int
    progress: Progress | None
    total: int
    done: int = 0

    def leaf(self, spec: ParamSpec, config: ModelConfig) -> Any:
        """Returns one leaf: a plain array, a BF16 array or a quantised array."""
        if spec.load_as_bf16:
            shape = (*spec.stack, *spec.shape)
            array = self.place(spec, shape, lambda index: self.expand(spec, index))
            self.count(spec.names, with_scales=True)
            return array
        if spec.dtype == "I64":
            return self.expert_ids(spec, config)
        payload = self.stacked(spec, spec.names, spec.payload_shape)
        if spec.scale_shape is None:
            return payload
        scale = self.stacked(spec, tuple(map(scale_name, spec.names)), spec.scale_shape)
        return QuantArray(payload, scale, spec.format)

    def stacked(self, spec: ParamSpec, names: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
        """Returns the tensors `names`, stacked, in their stored dtype."""
        entries = [self.store[name] for name in names]
        full = (*spec.stack, *shape)
        array = self.place(spec, full, lambda index: _gather(entries, spec.stack, full, index))
        self.count(names)
        return array

    def expert_ids(self, spec: ParamSpec, config: ModelConfig) -> jax.Array:
        """Returns hash-routing tables as int32.

        Raises:
            CheckpointError: An id names no expert.
        """
        entries, shape = [self.store[name] for name in spec.names], (*spec.stack, *spec.shape)
        limit = config.moe.n_routed_experts

        def read(index: Index) -> np.ndarray:
            ids = _gather(entries, spec.stack, shape, index)
            if ids.size and (ids.min() < 0 or ids.max() >= limit):
                raise CheckpointError(
                    f"hash routing names experts in [0, {limit}): received {ids.min()} to "
                    f"{ids.max()}, in {', '.join(spec.names)}. The tables belong to another config "
                    "or are damaged: download the shard again."
                )
            return ids.astype(np.int32)

        array = self.place(spec, shape, read)
        self.count(spec.names)
        return array

    def place(
        self, spec: ParamSpec, shape: tuple[int, ...], read: Callable[[Index], np.ndarray]
    ) -> jax.Array:
        """Returns the array whose local shards `read` delivers; a padded axis repeats."""
        longer = self.padding(spec, shape) if self.padding else None
        full = list(shape)
        if longer is not None:
            full[longer[0]] = longer[1]
        target = self.placement(spec, tuple(full))

        def deliver(index: Index | None) -> np.ndarray:
            wanted = _full(index or (), tuple(full))
            if longer is None:
                return read(wanted)
            axis, length = longer[0], shape[longer[0]]
            parts = _repeated(wanted[axis], length)
            read_parts = [read((*wanted[:axis], part, *wanted[axis + 1 :])) for part in parts]
            return np.concatenate(read_parts, axis=axis)

        array = jax.make_array_from_callback(tuple(full), target, deliver)
        return array.block_until_ready()

    def expand(self, spec: ParamSpec, index: Index) -> np.ndarray:
        """Returns a part of a block-scaled FP8 leaf as BF16, one range of rows at a time."""
        depth = len(spec.stack)
        chosen = _positions(spec.stack, index[:depth])
        rows, columns = index[depth:]
        side = BLOCKS[spec.format][0]
        extent = _extent(index)
        out = np.empty((len(chosen), *extent[depth:]), ml_dtypes.bfloat16)
        for slot, position in enumerate(chosen):
            self.expand_one(spec.names[position], rows, columns, side, out[slot])
        # Two FP4 codes a byte are stored as I8; the kernels take unsigned bytes.
        return out.reshape(extent)

    def expand_one(
        self, name: str, rows: slice, columns: slice, side: int, out: np.ndarray
    ) -> None:
        """Writes rows and columns of one FP8 matrix to `out` as BF16.

        Raises:
            CheckpointError: A product is not representable in BF16 (a scale out of range).
        """
        weight, scales = self.store[name], self.store[scale_name(name)]
        factors = E8M0[scales.read()]
        step = max(1, self.expand_limit_bytes // (4 * max(1, weight.shape[1])))
        column_blocks = np.arange(columns.start, columns.stop) // side
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            codes = weight.read(slice(start, stop))[:, columns].astype(np.float32)
            row_blocks = np.arange(start, stop) // side
            with np.errstate(over="ignore"):
                values = codes * factors[row_blocks][:, column_blocks]
            rounded = values.astype(ml_dtypes.bfloat16)
            exact = np.array_equal(rounded.astype(np.float32), values)
            if not (exact and np.isfinite(values).all()):
                raise CheckpointError(
                    f"{name} must be exact in BF16: rows {start} to {stop - 1} hold values outside "
                    f"its range or NaN, in {weight.path}. The weights or their scales are damaged: "
                    "download the shard again."
                )
            out[start - rows.start : stop - rows.start] = rounded

    def host_table(self, spec: ParamSpec, *, is_mapped: bool) -> HostTable:
        """Returns an Engram table that stays on the host."""
        (name,) = spec.names
        entries = (self.store[name], self.store[scale_name(name)])
        payload, scale = (e.mapped() if is_mapped else e.read() for e in entries)
        self.count(spec.names, with_scales=True)
        return HostTable(payload, scale, is_mapped=is_mapped)

    def count(self, names: tuple[str, ...], *, with_scales: bool = False) -> None:
        """Adds the bytes of tensors to the total done and reports each."""
        for name in names:
            for one in (name, scale_name(name)) if with_scales else (name,):
                self.done += self.store[one].nbytes
                if self.progress is not None:
                    self.progress(self.done, self.total, one)


def _full(index: Index, shape: tuple[int, ...]) -> Index:
    """Returns the index with every axis and every bound filled in."""
    whole = (slice(None),) * (len(shape) - len(index))
    parts = zip((*index, *whole), shape, strict=True)
    return tuple(slice(*part.indices(size)) for part, size in parts)


def _repeated(wanted: slice, length: int) -> list[slice]:
    """Returns the ranges of an axis of `length` that fill `wanted` of its endless repetition."""
    parts, start = [], wanted.start
    while start < wanted.stop:
        first = start % length
        stop = min(length, first + wanted.stop - start)
        parts.append(slice(first, stop))
        start += stop - first
    return parts


def _extent(index: Index) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


def _positions(stack: tuple[int, ...], index: Index) -> list[int]:
    """Returns the row-major positions in the stack that an index selects."""
    if not stack:
        return [0]
    grid = np.arange(int(np.prod(stack))).reshape(stack)
    return [int(position) for position in grid[index].reshape(-1)]


def _gather(
    entries: list[TensorEntry], stack: tuple[int, ...], shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """Returns a part of stacked tensors; reads only the rows it needs."""
    depth = len(stack)
    inner = index[depth:]
    extent = _extent(index)
    dtype = NUMPY_DTYPES[entries[0].dtype]
    out = np.empty((int(np.prod(extent[:depth])), *extent[depth:]), dtype)
    for slot, position in enumerate(_positions(stack, index[:depth])):
        part = entries[position].read(inner[0])
        out[slot] = part[(slice(None), *inner[1:])]
    # Two FP4 codes a byte are stored as I8; the kernels take unsigned bytes.
    return (out.view(np.uint8) if dtype == np.int8 else out).reshape(extent)
