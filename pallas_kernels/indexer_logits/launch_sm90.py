"""From the op's arrays to the Hopper body: queries decoded and reordered, rows of a tile padded."""

import jax
import jax.numpy as jnp

from pallas_kernels import core
from pallas_kernels.indexer_logits import pallas_sm90
from pallas_kernels.indexer_logits.configs import TABLE
from pallas_kernels.indexer_logits.decode_sm90 import key_order


def indexer_logits(
    query_codes: jax.Array,
    query_scale: jax.Array,
    weight: jax.Array,
    key_codes: jax.Array,
    key_scale: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns bfloat16 [t, n]; arguments as in api.indexer_logits."""
    rows, tiles = query_codes.shape[0], pages.shape[0]
    keys = pages.shape[1] * key_codes.shape[1]
    shared = rows // tiles
    padded = 1 if shared == 1 else pallas_sm90.ROWS

    def tiled(x: jax.Array) -> jax.Array:
        """Returns [t, ...] as [tiles, padded, ...], missing rows zero."""
        grouped = x.reshape(tiles, shared, *x.shape[1:])
        return jnp.pad(grouped, [(0, 0), (0, padded - shared), *[(0, 0)] * (x.ndim - 1)])

    # exact: E2M1 times a power of two
    query = core.dequantize_q4m(query_codes, query_scale).astype(jnp.bfloat16)
    # head by head, the rows of a tile side by side
    query = tiled(key_order(query)).swapaxes(1, 2)
    config = TABLE["one row" if shared == 1 else "rows"]
    run = pallas_sm90.build(config, rows=padded, interpret=interpret)
    out = run(
        query.reshape(-1, query.shape[-1]),
        tiled(weight).swapaxes(1, 2).reshape(tiles, -1),
        key_codes,
        key_scale,
        pages,
        jnp.max(length.reshape(tiles, shared), axis=1),
        tiled(length).reshape(-1),
    )
    return out.reshape(tiles, padded, -1)[:, :shared, :keys].reshape(rows, keys)
