"""Bytes that every device holds, from shapes alone: nothing is allocated (parallelism.md 1.2)."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from sharding.mesh import MeshSizes, describe_sizes
from sharding.rules import shard_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafBytes:
    """One array: its name, global shape, partition, shape on a device, and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    shard: tuple[int, ...]
    total: int  # bytes of the global array, counted once
    device: int  # bytes on every device


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What `describe` found: every array, in the order of the tree."""

    sizes: MeshSizes
    leaves: tuple[LeafBytes, ...]

    @property
    def device(self) -> int:
        """Bytes on every device."""
        return sum(leaf.device for leaf in self.leaves)

    @property
    def total(self) -> int:
        """Bytes of all arrays, each counted once however often it is replicated."""
        return sum(leaf.total for leaf in self.leaves)

    def groups(self, depth: int = 2) -> dict[str, tuple[int, int]]:
        """Returns (bytes on a device, bytes in all) by the first `depth` parts of the names."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for leaf in self.leaves:
            key = ".".join(leaf.name.split(".")[:depth])
            sums[key][0] += leaf.device
            sums[key][1] += leaf.total
        return {key: (device, total) for key, (device, total) in sums.items()}

    def matching(self, part: str) -> tuple[int, int]:
        """Returns (bytes on a device, bytes in all) of the arrays that have a part of that name."""
        found = [leaf for leaf in self.leaves if part in leaf.name.split(".")]
        return sum(leaf.device for leaf in found), sum(leaf.total for leaf in found)

    def table(self, depth: int = 2) -> str:
        """Returns the groups as lines of text, GB per device and in all."""
        lines = [f"{'group':<28}{'GB a device':>14}{'GB in all':>14}"]
        rows = [*self.groups(depth).items(), ("sum", (self.device, self.total))]
        lines += [f"{name:<28}{d / 1e9:>14.3f}{t / 1e9:>14.3f}" for name, (d, t) in rows]
        return "\n".join([f"mesh: {describe_sizes(self.sizes)}", *lines])


def describe(tree: Any, specs: Any, sizes: MeshSizes, prefix: str = "") -> Footprint:
    """Returns the bytes per device of a tree of arrays or of `jax.ShapeDtypeStruct`.

    Args:
        tree: anything with `shape` and `dtype` at its leaves.
        specs: partitions; a tree of which that of `tree` is a refinement.
        sizes: of the mesh.
        prefix: put before every name.

    Raises:
        ShardingError: an array does not divide.
    """
    found = []
    for path, leaf, spec in zip_specs(tree, specs):
        name = prefix + path
        shape, itemsize = tuple(leaf.shape), np.dtype(leaf.dtype).itemsize
        shard = shard_shape(shape, spec, sizes, name)
        found.append(
            LeafBytes(
                name=name,
                shape=shape,
                dtype=str(np.dtype(leaf.dtype)),
                spec=spec,
                shard=shard,
                total=prod(shape) * itemsize,
                device=prod(shard) * itemsize,
            )
        )
    return Footprint(sizes=sizes, leaves=tuple(found))


def zip_specs(tree: Any, specs: Any) -> list[tuple[str, Any, PartitionSpec]]:
    """Returns (name, leaf, partition) of every array; names are joined by points."""
    spread = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = jax.tree.leaves(spread, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf, spec)
        for (path, leaf), spec in zip(flat, leaves, strict=True)
    ]
