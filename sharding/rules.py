"""Which mesh axes split which logical axis of a tensor (parallelism.md 1.2)."""

from collections.abc import Mapping, Sequence
from math import ceil

from jax.sharding import PartitionSpec

from sharding.errors import ShardingError
from sharding.mesh import AXES, DATA_AXES, EXPERT_AXES, ROW_AXES, MeshSizes

#: Logical axis -> mesh axes. A name that is not here is replicated: attention weights, norms, the
#: router, mHC, compressors, index heads (splitting them would need a float sum) and the vocabulary.
RULES: Mapping[str, tuple[str, ...]] = {
    "experts": EXPERT_AXES,
    "engram_rows": AXES,
    "heads": ("tp",),
    "o_groups": ("tp",),
    "slots": DATA_AXES,
    "pages": DATA_AXES,
    "rows": ROW_AXES,
}


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """Returns the partition of a tensor whose logical axes have these names."""
    entries = [RULES.get(axis) if axis else None for axis in axes]
    entries = [entry[0] if entry and len(entry) == 1 else entry for entry in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def shard_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: MeshSizes, name: str = "tensor"
) -> tuple[int, ...]:
    """Returns the shape of what one device holds of a tensor.

    Raises:
        ShardingError: a split axis does not divide by the devices it is split over.
    """
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    parts = []
    for place, (length, entry) in enumerate(zip(shape, entries, strict=True)):
        split = () if entry is None else (entry,) if isinstance(entry, str) else entry
        count = sizes.of(split)
        if length % count:
            raise ShardingError(
                f"axis {place} of {name} is split over {'*'.join(split)} = {count} devices and "
                "divides by them",
                f"length {length} of shape {tuple(shape)}",
                f"take sizes whose product divides {length}, or pad it to {padded(length, count)}",
            )
        parts.append(length // count)
    return tuple(parts)


def padded(count: int, parts: int) -> int:
    """Returns the smallest multiple of `parts` that is not below `count`."""
    return ceil(count / parts) * parts
