"""Scores of the lightning indexer by named implementation (kernels.md 4.3, model.md 3.8)."""

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError, KernelUnsupported, require_named
from pallas_kernels.indexer_logits import reference
from pallas_kernels.indexer_logits.configs import CHANNELS, HEAD_STEP, MOST_HEADS, TILE_KEYS

OP = "indexer_logits"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "mosaic_sm90")
#: Most query rows that may share one list of pages.
MOST_ROWS = 8


def indexer_logits(
    query_codes: jax.Array,
    query_scale: jax.Array,
    weight: jax.Array,
    key_codes: jax.Array,
    key_scale: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    *,
    implementation: str = "xla",
) -> jax.Array:
    """Returns ``bf16(sum_h bf16(relu(bf16(q_h . k)) * weight_h))`` of every row and visible key.

    Heads are added in ascending order in FP32. Rows are cut into tiles of up to eight neighbours
    that share a sequence, hence a list of pages. Bits of a row do not depend on its tile.

    Args:
        query_codes: uint8 [t, h, c / 2], packed E2M1 of Q4m, even channel in the low nibble.
        query_scale: uint8 [t, h, c / 32], E8M0.
        weight: bfloat16 [t, h], the constant included.
        key_codes: uint8 [p, s, c / 2], all pages of the index cache, s keys each.
        key_scale: uint8 [p, s, c / 32].
        pages: int32 [tiles, l], the pages of each tile's sequence in order; t is 1 to 8 times
            tiles. Entries behind the visible keys must still be pages.
        length: int32 [t], visible keys of each row; 0 <= length <= l * s.
        implementation: "xla", "pallas_interpret" or "mosaic_sm90".

    Returns:
        bfloat16 [t, l * s]; -inf at indices >= length. A NaN scale gives a NaN score.

    Raises:
        KernelError: shapes or dtypes do not fit.
        KernelUnsupported: no such implementation, or one that does not take these shapes.
    """
    require_named(OP, implementation, IMPLEMENTATIONS)
    arguments = (query_codes, query_scale, weight, key_codes, key_scale, pages, length)
    _check(*arguments)
    if 0 in (query_codes.shape[0], pages.shape[1], key_codes.shape[1]):
        return jnp.zeros((query_codes.shape[0], pages.shape[1] * key_codes.shape[1]), jnp.bfloat16)
    if implementation == "xla":
        return reference.indexer_logits(*arguments)
    heads, channels, keys = query_codes.shape[1], 2 * key_codes.shape[2], key_codes.shape[1]
    if channels != CHANNELS or keys % TILE_KEYS or heads % HEAD_STEP or heads > MOST_HEADS:
        raise KernelUnsupported(
            OP,
            implementation,
            f"it takes keys of {CHANNELS} channels, pages of a multiple of {TILE_KEYS} keys and "
            f"{HEAD_STEP} to {MOST_HEADS} heads in steps of {HEAD_STEP}",
            f"{channels} channels, {keys} keys, {heads} heads",
            'name "xla"',
        )
    from pallas_kernels.indexer_logits import launch_sm90

    return launch_sm90.indexer_logits(*arguments, interpret=implementation == "pallas_interpret")


def _check(
    query_codes: jax.Array,
    query_scale: jax.Array,
    weight: jax.Array,
    key_codes: jax.Array,
    key_scale: jax.Array,
    pages: jax.Array,
    length: jax.Array,
) -> None:
    """Checks ranks, sizes and dtypes of what api.indexer_logits takes."""
    bytes_ = (query_codes, query_scale, key_codes, key_scale)
    ranks = tuple(x.ndim for x in (*bytes_, weight, pages, length))
    if ranks != (3, 3, 3, 3, 2, 2, 1) or key_codes.shape[2] % 16:
        raise KernelError(
            f"{OP} needs codes [.., .., c / 2] and scales [.., .., c / 32] with c a multiple of "
            f"32, weight [t h], pages [tiles l] and length [t], got ranks {ranks} and "
            f"{key_codes.shape}"
        )
    rows, heads, packed = query_codes.shape
    tiles = pages.shape[0]
    sizes = (query_scale.shape, weight.shape, key_codes.shape[2], key_scale.shape, length.shape)
    groups = packed // 16
    wanted = ((rows, heads, groups), (rows, heads), packed, (*key_codes.shape[:2], groups), (rows,))
    if sizes != wanted:
        raise KernelError(
            f"{OP}: query scales, weight, key bytes, key scales and length need {wanted}, got "
            f"{sizes}"
        )
    if rows % max(tiles, 1) or not tiles <= rows <= MOST_ROWS * tiles:
        raise KernelError(
            f"{OP}: {tiles} lists of pages serve {tiles} to {MOST_ROWS * tiles} rows, a multiple "
            f"of {tiles}, got {rows}: repeat a list or pad the rows"
        )
    dtypes = tuple(x.dtype.name for x in (*bytes_, weight, pages, length))
    if dtypes != (*("uint8",) * 4, "bfloat16", "int32", "int32"):
        raise KernelError(
            f"{OP} needs uint8 codes and scales, bfloat16 weight, int32 pages and length, got "
            f"{dtypes}"
        )
