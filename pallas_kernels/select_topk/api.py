"""Exact selection by named implementation (kernels.md 4.4, model.md 3.8 and 3.9)."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError, KernelUnsupported, require_named
from pallas_kernels.select_topk import reference
from pallas_kernels.select_topk.configs import TABLE

OP = "select_topk"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "triton")


def select_topk(
    scores: jax.Array, k: int, *, length: jax.Array | None = None, implementation: str = "xla"
) -> jax.Array:
    """Returns the indices of the k largest visible scores of each row, ascending, then -1.

    The order is total: score descending, equal scores lower index first, zeros of both signs and
    float32 subnormals equal. NaN and -inf are never chosen. Equals ``core.select_topk`` of the
    scores with -inf at indices >= length.

    Args:
        scores: [m, n] bfloat16 or float32 ("xla": any float dtype).
        k: static, >= 0; may exceed n.
        length: None, or int [m], the visible entries of each row; what lies behind is not read.
        implementation: "xla", "pallas_interpret" or "triton".

    Returns:
        int32 [m, k].

    Raises:
        KernelError: shapes do not fit or k is negative.
        KernelUnsupported: no such implementation, or one that does not take this dtype.
    """
    if k < 0:
        raise KernelError(f"{OP} needs k >= 0, got {k}")
    _check(scores, length, implementation)
    if implementation == "xla":
        return reference.select_topk(scores, k, length)
    rows, size = scores.shape
    if rows == 0 or size == 0 or k == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    count = jnp.full((rows,), size, jnp.int32) if length is None else _clip(length, size)
    return _build(implementation).topk(scores, count, k)


def select_blocks(
    scores: jax.Array,
    length: jax.Array,
    block_size: int,
    topk_blocks: int,
    *,
    implementation: str = "xla",
) -> jax.Array:
    """Returns which blocks of positions each row keeps as candidates; equals core.select_blocks.

    A block's score is its largest visible score; the last visible block is always kept; ties go to
    the lower block; blocks without a visible position are never kept.

    Args:
        scores: [m, n] bfloat16 or float32 ("xla": any float dtype).
        length: int [m], visible positions of each row, >= 0.
        block_size: positions a block, counted from position 0.
        topk_blocks: most blocks to keep, the forced one included.
        implementation: "xla", "pallas_interpret" or "triton".

    Returns:
        bool [m, ceil(n / block_size)].

    Raises:
        KernelError: shapes do not fit, or a size is not positive.
        KernelUnsupported: no such implementation, or one that does not take this dtype.
    """
    if block_size < 1 or topk_blocks < 1:
        raise KernelError(
            f"select_blocks needs block_size and topk_blocks >= 1, got {block_size} and "
            f"{topk_blocks}"
        )
    _check(scores, length, implementation)
    if implementation == "xla":
        return reference.select_blocks(scores, length, block_size, topk_blocks)
    rows, size = scores.shape
    if rows == 0 or size == 0:
        return jnp.zeros((rows, -(-size // block_size)), bool)
    length = _clip(length, size)
    maxima = reference.block_maxima(scores, length, block_size)
    visible = (length + block_size - 1) // block_size
    return _build(implementation).blocks(maxima, visible, topk_blocks)


def _clip(length: jax.Array, size: int) -> jax.Array:
    return jnp.clip(length, 0, size).astype(jnp.int32)


def _check(scores: jax.Array, length: jax.Array | None, implementation: str) -> None:
    if scores.ndim != 2 or (length is not None and length.shape != scores.shape[:1]):
        shape = None if length is None else length.shape
        raise KernelError(f"{OP} needs scores [m, n] and length [m], got {scores.shape}, {shape}")
    require_named(OP, implementation, IMPLEMENTATIONS)
    if implementation != "xla" and scores.dtype not in (jnp.bfloat16, jnp.float32):
        raise KernelUnsupported(
            OP,
            implementation,
            "keys are made of bfloat16 or float32 scores",
            str(scores.dtype),
            "cast the scores, or use implementation='xla'",
        )


def _build(implementation: str) -> Any:
    from pallas_kernels.select_topk import pallas_triton

    return pallas_triton.build(TABLE["row"], interpret=implementation == "pallas_interpret")
