"""How devices share the rows of a tile: each computes some, all write all (parallelism.md 2).

At level "batch" the network runs tile after tile, and a rank's share of a tile is as high as the
tile of one device, so that no product changes shape; otherwise the tile is the whole step. Either
way a rank takes one early and one late block of the tile.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.model.tile import Rows
from sharding.context import split_context
from sharding.mesh import ROW_AXES, mesh_sizes


@dataclass(frozen=True, eq=False)
class Share:
    """take: int32 [c, rows], which rows of a tile each rank computes. back: where each row is.

    axes: of the mesh, along which the ranks lie.
    """

    take: np.ndarray
    back: np.ndarray
    axes: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows of a tile on one rank."""
        return self.take.shape[1]

    def own(self, tile: Rows) -> Rows:
        """Returns the rows of this rank, which know those of all."""
        if len(self.take) == 1:
            return tile
        rank = lax.axis_index(self.axes)
        whole = jax.tree.map(lambda leaf: leaf[self.take.reshape(-1)], tile)
        mine = jax.tree.map(lambda leaf: leaf[jnp.asarray(self.take)[rank]], tile)
        return replace(mine, whole=whole, axes=self.axes)

    def joined(self, value: Array, axis: int) -> Array:
        """Returns the values of all rows of the tile in its order, from those of every rank."""
        if len(self.take) == 1:
            return value
        found = lax.all_gather(value, self.axes, axis=axis, tiled=True)
        return jnp.take(found, self.back, axis=axis)


@lru_cache(maxsize=64)
def share_of(rows: int, ranks: int, axes: tuple[str, ...]) -> Share:
    """Returns how `ranks` ranks along some axes share a tile of `rows` rows each."""
    split = split_context([rows * ranks], [0], ranks, align=1, whole_below=1)
    if split.rows != rows:  # an odd number of rows: ranks in turn take as many
        take = np.arange(rows * ranks, dtype=np.int32).reshape(ranks, rows)
        return Share(take, take.reshape(-1), axes)
    return Share(split.take, split.back, axes)


def rows_before_read(execution: ExecutionConfig, axes: tuple[str, ...] = ROW_AXES) -> int:
    """Returns the rows of a sequence that level "batch" writes before it reads any of them.

    A tile of all devices that share rows: a ring of the cache has to hold as many more.
    """
    if execution.mesh is None:
        return execution.row_tile
    return execution.row_tile * mesh_sizes(execution.mesh).of(axes)
