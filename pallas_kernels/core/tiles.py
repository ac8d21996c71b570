"""Fixed-shape row tiles: the loop that makes a row's bits independent of the number of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.errors import KernelError

ROW_TILE = 8  # part of the arithmetic: heights 1, 8 and 16 give different bits (determinism.md 12)
K_CHUNK = 512


def map_row_tiles(fn: Callable[..., Any], *arrays: jax.Array, tile: int = ROW_TILE) -> Any:
    """Returns ``fn`` applied to blocks of ``tile`` rows, for any number of rows m.

    Rows are padded with zeros to a multiple of ``tile`` and to at least two tiles, because a loop
    of one trip is inlined and its body then fuses with its surroundings (determinism.md 12,
    trap 1). With exactly m == tile the caller is taken to be inside the network's own tile loop:
    ``fn`` runs directly, at no cost.

    That direct body has the bits of the looped one for every primitive of this folder (measured on
    jax 0.11.2, x86: jitted alone, eager, and inside a loop body between other operations, with
    inputs of mixed magnitude and cancelling pairs). No barrier was needed. What
    did differ was ``x * x`` followed by a sum, fused or not, and ``pin`` cures it.

    Args:
        fn: function of the blocks [tile, ...]; returns a pytree of arrays [tile, ...]. It must
            treat rows independently.
        *arrays: arrays [m, ...] with one common m.
        tile: rows a block.

    Returns:
        The pytree of ``fn`` with m rows.
    """
    if not arrays or len({np.shape(a)[:1] for a in arrays}) != 1 or not np.ndim(arrays[0]):
        raise KernelError(
            f"map_row_tiles needs arrays with one common number of rows, got shapes "
            f"{[np.shape(a) for a in arrays]}"
        )
    arrays = tuple(jnp.asarray(a) for a in arrays)
    rows = arrays[0].shape[0]
    if rows == tile:
        return fn(*arrays)
    if rows == 0:
        blocks = [jax.ShapeDtypeStruct((tile, *a.shape[1:]), a.dtype) for a in arrays]
        shapes = jax.eval_shape(fn, *blocks)
        return jax.tree.map(lambda s: jnp.zeros((0, *s.shape[1:]), s.dtype), shapes)
    count = max(2, -(-rows // tile))

    def to_tiles(a: jax.Array) -> jax.Array:
        padding = [(0, count * tile - rows)] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, padding).reshape(count, tile, *a.shape[1:])

    out = lax.map(lambda blocks: fn(*blocks), tuple(to_tiles(a) for a in arrays))
    return jax.tree.map(lambda o: o.reshape(count * tile, *o.shape[2:])[:rows], out)
