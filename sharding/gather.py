"""Arrays of a mesh as one device would hold them, on the host, a part at a time.

No process holds all of an array that a mesh of several processes splits, and no device has room for
it. Parts travel as integers of their bits, so that they are what is stored.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

#: Bytes of a part: what a device holds twice for a moment.
PART_BYTES = 2**26


def is_here(leaf: Any) -> bool:
    """Says whether this process holds all of an array."""
    return not isinstance(leaf, Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def host_parts(leaf: Any, kept: Sequence[int]) -> Iterator[np.ndarray]:
    """Yields the first `kept` elements of an array along its axes, in C order, in parts.

    All processes that hold a part of the array take all parts, alike.

    Args:
        leaf: of which at most one axis is split, its first or its second.
        kept: for each axis; fewer than the array has where a mesh has padded it.
    """
    cut = tuple(slice(count) for count in kept)
    if is_here(leaf):
        yield np.ascontiguousarray(np.asarray(jax.device_get(leaf))[cut])
        return
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    if spec[0] is None:  # layers of experts: one after the other
        for layer in range(kept[0]):
            found = _of_layer(mesh, spec)(leaf, np.int32(layer))
            yield np.ascontiguousarray(np.asarray(found).view(leaf.dtype)[cut[1:]])
        return
    axes = (spec[0],) if isinstance(spec[0], str) else tuple(spec[0])
    ranks = int(np.prod([mesh.shape[axis] for axis in axes]))
    held = leaf.shape[0] // ranks
    rows = max(1, min(held, PART_BYTES // max(leaf.nbytes // leaf.shape[0], 1)))
    for start in range(0, kept[0], held):
        for first in range(0, min(held, kept[0] - start), rows):
            # the last part begins earlier, so that all are equally long
            begin = min(first, held - rows)
            words = np.int32(start // held), np.int32(begin)
            found = np.asarray(_of_rank(mesh, axes, spec, rows)(leaf, *words)).view(leaf.dtype)
            stop = min(first + rows, held, kept[0] - start)
            yield np.ascontiguousarray(found[first - begin : stop - begin][(slice(None), *cut[1:])])


def _bits(value: Array) -> Array:
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint8)
    return lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")


@lru_cache(maxsize=64)
def _of_layer(mesh: Mesh, spec: PartitionSpec) -> Any:
    axes = spec[1]

    def body(leaf: Array, layer: Array) -> Array:
        return lax.all_gather(_bits(leaf[layer]), axes, axis=0, tiled=True)

    return _program(mesh, spec, body, 1)


@lru_cache(maxsize=64)
def _of_rank(mesh: Mesh, axes: tuple[str, ...], spec: PartitionSpec, rows: int) -> Any:
    def body(leaf: Array, rank: Array, begin: Array) -> Array:
        own = _bits(lax.dynamic_slice_in_dim(leaf, begin, rows))
        return lax.psum(jnp.where(lax.axis_index(axes) == rank, own, 0), axes)

    return _program(mesh, spec, body, 2)


def _program(mesh: Mesh, spec: PartitionSpec, body: Any, words: int) -> Any:
    whole = PartitionSpec()
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, *(whole,) * words), out_specs=whole, check_vma=False
    )
    return jax.jit(run)
