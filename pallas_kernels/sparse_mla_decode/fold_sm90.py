"""One block of 64 ranks folded into a token's running maximum, denominator and total.

Two multiplying warpgroups own 256 output channels each. Either both compute the scores of all 64
ranks, or each those of 32, and they tell each other their maxima, sums and probabilities through
shared memory. Both ways add the same numbers in the same order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._mosaic import load, pl, plgpu
from pallas_kernels.sparse_mla_decode import gather_sm90
from pallas_kernels.sparse_mla_decode.gather_sm90 import BLOCK, DIM

HEADS = 64
HALF_RANKS = BLOCK // 2
#: Layouts of a value a row (head), and of a value a column (rank), beside a product.
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class Blocks(NamedTuple):
    """Shared memory of a token's queries, its key blocks, and what is exchanged about one.

    Attributes:
        q: bfloat16 [2, 64, 256], halves of channels.
        keys: bfloat16 [slots, 2, 64, 256].
        mask: float32 [slots, 64], 0 or minus infinity.
        probabilities: bfloat16 [2, 64, 32], of the ranks of each warpgroup; None where nothing is
            exchanged, as the three behind it.
        maxima: float32 [2, 64].
        sums: float32 [2, 64].
        both: the barrier where the two warpgroups meet.
    """

    q: Any
    keys: Any
    mask: Any
    probabilities: Any = None
    maxima: Any = None
    sums: Any = None
    both: Any = None


def over(value: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns a vector along ``axis`` of ``shape``, repeated along the other axis."""
    return lax.broadcast_in_dim(value, shape, (axis,))


def fold(blocks: Blocks, slot: jax.Array, carry: Any, total: Any, interpret: bool) -> Any:
    """Returns ((maximum, denominator), total) after one more block.

    Args:
        blocks: shared memory.
        slot: the place of the block.
        carry: maximum and denominator float32 [64] of the heads.
        total: the accumulator [64, 256] of this warpgroup's channels, changed in place: carried as
            a value it would spill. The interpreter cannot store to one, and carries the value.
        interpret: whether this is for the interpreter.
    """
    weigh = _weigh_all if blocks.both is None else _weigh_half
    maximum, denominator = carry
    *sums, shrink, rounded = weigh(blocks, slot, maximum, denominator, interpret)
    keys = blocks.keys.at[slot, lax.axis_index("wg")]
    if interpret:  # nor does it take an operand in registers
        added = jnp.dot(rounded, keys[...], preferred_element_type=jnp.float32)
        return tuple(sums), total * over(shrink, total.shape, 0) + added
    value = total[...]
    total[...] = value * over(shrink, value.shape, 0)
    plgpu.wgmma(total, rounded, keys)
    plgpu.wgmma_wait(0)
    return tuple(sums), total


def _scores(blocks: Blocks, slot: jax.Array, first: Any, ranks: int, interpret: bool) -> jax.Array:
    """Returns the scaled scores float32 [64, ranks] of a block's ranks from ``first`` on."""
    zero = np.int32(0) if interpret else gather_sm90.opaque_zero()
    mine = pl.ds(first, ranks)

    def product(acc: Any) -> jax.Array:
        for half in range(2):
            plgpu.wgmma(acc, blocks.q.at[half + zero], blocks.keys.at[slot, half, mine].T)
        return acc[...]

    scores = pl.run_scoped(product, plgpu.ACC((HEADS, ranks), jnp.float32))
    mask = load(blocks.mask, (slot, mine), layout=COLUMNS, optimized=False)
    return scores * np.float32(DIM**-0.5) + over(mask, scores.shape, 1)


def _weigh_all(
    blocks: Blocks, slot: jax.Array, maximum: jax.Array, denominator: jax.Array, interpret: bool
) -> tuple[jax.Array, ...]:
    """Returns (maximum, denominator, what shrinks the total, BF16 probabilities [64, 64])."""
    scores = _scores(blocks, slot, 0, BLOCK, interpret)
    raised = jnp.maximum(maximum, jnp.max(scores, axis=1))
    shrink = jnp.exp(maximum - raised)
    weight = jnp.exp(scores - over(raised, scores.shape, 0))
    first, second = weight[:, :HALF_RANKS], weight[:, HALF_RANKS:]
    denominator = denominator * shrink + (jnp.sum(first, axis=1) + jnp.sum(second, axis=1))
    return raised, denominator, shrink, weight.astype(jnp.bfloat16)


def _weigh_half(
    blocks: Blocks, slot: jax.Array, maximum: jax.Array, denominator: jax.Array, interpret: bool
) -> tuple[jax.Array, ...]:
    """Returns the same; each warpgroup computes half of the ranks."""
    wg = lax.axis_index("wg")

    def meet() -> None:
        plgpu.barrier_arrive(blocks.both)
        plgpu.barrier_wait(blocks.both)

    def of_both(ref: Any, layout: Any, **options: Any) -> list[jax.Array]:
        return [load(ref, (part,), layout=layout, **options) for part in range(2)]

    ranks = pl.multiple_of(wg * HALF_RANKS, HALF_RANKS)
    scores = _scores(blocks, slot, ranks, HALF_RANKS, interpret)
    blocks.maxima[wg] = jnp.max(scores, axis=1)
    meet()
    raised = jnp.maximum(*of_both(blocks.maxima, ROWS, optimized=False))
    raised = jnp.maximum(maximum, raised)
    shrink = jnp.exp(maximum - raised)
    weight = jnp.exp(scores - over(raised, scores.shape, 0))
    blocks.probabilities[wg] = weight.astype(jnp.bfloat16)
    blocks.sums[wg] = jnp.sum(weight, axis=1)
    meet()
    first, second = of_both(blocks.sums, ROWS, optimized=False)
    rounded = jnp.concatenate(of_both(blocks.probabilities, plgpu.Layout.WGMMA), axis=1)
    return raised, denominator * shrink + (first + second), shrink, rounded
