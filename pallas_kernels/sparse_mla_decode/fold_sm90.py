"""One block of 64 ranks folded into a token's running maximum, denominator and total.

Two multiplying warpgroups own 256 output channels each. Each computes the scores of 32 ranks, and
they tell each other their maxima, sums and probabilities through shared memory.
"""

from collections.abc import Callable
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
#: Channels of an accumulator. One product of 256 takes more registers than a thread of 512 starts
#: with, and ptxas compiles no such instruction, whatever `setmaxnreg` gives later.
PART = 128
#: Layouts of a value a row (head), and of a value a column (rank), beside a product.
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class Blocks(NamedTuple):
    """Shared memory of a token's queries, its key blocks, and what is exchanged about one.

    Attributes:
        q: bfloat16 [2, 64, 256], halves of channels.
        keys: bfloat16 [slots, 2, 64, 256].
        mask: float32 [slots, 64], 0 or minus infinity.
        probabilities: bfloat16 [2, 64, 32], of the ranks of each warpgroup.
        maxima: float32 [2, 64].
        sums: float32 [2, 64].
        both: the barrier where the two warpgroups meet.
    """

    q: Any
    keys: Any
    mask: Any
    probabilities: Any
    maxima: Any
    sums: Any
    both: Any


def over(value: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns a vector along ``axis`` of ``shape``, repeated along the other axis."""
    return lax.broadcast_in_dim(value, shape, (axis,))


def fold(blocks: Blocks, slot: jax.Array, carry: Any, total: Any, interpret: bool) -> Any:
    """Returns ((maximum, denominator), total) after one more block.

    Args:
        blocks: shared memory.
        slot: the place of the block.
        carry: maximum and denominator float32 [64] of the heads.
        total: two accumulators [64, 128] of this warpgroup's channels, changed in place: carried
            as values they would spill. The interpreter cannot store to one, and carries values.
        interpret: whether this is for the interpreter.
    """
    maximum, denominator = carry

    def shrink_total(shrink: jax.Array) -> None:
        for part in () if interpret else total:
            value = part[...]
            part[...] = value * over(shrink, value.shape, 0)

    *sums, shrink, rounded = _weigh(blocks, slot, maximum, denominator, shrink_total, interpret)
    keys = blocks.keys.at[slot, lax.axis_index("wg")]
    if interpret:  # nor does it take an operand in registers
        added = jnp.dot(rounded, keys[...], preferred_element_type=jnp.float32)
        return tuple(sums), tuple(
            part * over(shrink, part.shape, 0) + added[:, i * PART : (i + 1) * PART]
            for i, part in enumerate(total)
        )
    for i, part in enumerate(total):
        plgpu.wgmma(part, rounded, keys.at[:, pl.ds(i * PART, PART)])
    plgpu.wgmma_wait(0)
    return tuple(sums), total


def _scores(blocks: Blocks, slot: jax.Array, first: Any, interpret: bool) -> jax.Array:
    """Returns the scaled scores float32 [64, 32] of a block's ranks from ``first`` on."""
    zero = np.int32(0) if interpret else gather_sm90.opaque_zero()
    mine = pl.ds(first, HALF_RANKS)

    def product(acc: Any) -> jax.Array:
        for half in range(2):
            plgpu.wgmma(acc, blocks.q.at[half + zero], blocks.keys.at[slot, half, mine].T)
        return acc[...]

    scores = pl.run_scoped(product, plgpu.ACC((HEADS, HALF_RANKS), jnp.float32))
    mask = load(blocks.mask, (slot, mine), layout=COLUMNS, optimized=False)
    return scores * np.float32(DIM**-0.5) + over(mask, scores.shape, 1)


def _weigh(
    blocks: Blocks,
    slot: jax.Array,
    maximum: jax.Array,
    denominator: jax.Array,
    between: Callable[[jax.Array], None],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Returns (maximum, denominator, what shrinks the total, BF16 probabilities [64, 64]).

    between: done with what shrinks the total while the other warpgroup gets ready.
    """
    wg = lax.axis_index("wg")

    def of_both(ref: Any, layout: Any, **options: Any) -> list[jax.Array]:
        return [load(ref, (part,), layout=layout, **options) for part in range(2)]

    ranks = pl.multiple_of(wg * HALF_RANKS, HALF_RANKS)
    scores = _scores(blocks, slot, ranks, interpret)
    blocks.maxima[wg] = jnp.max(scores, axis=1)
    plgpu.barrier_arrive(blocks.both)
    plgpu.barrier_wait(blocks.both)
    raised = jnp.maximum(*of_both(blocks.maxima, ROWS, optimized=False))
    raised = jnp.maximum(maximum, raised)
    shrink = jnp.exp(maximum - raised)
    weight = jnp.exp(scores - over(raised, scores.shape, 0))
    blocks.probabilities[wg] = weight.astype(jnp.bfloat16)
    blocks.sums[wg] = jnp.sum(weight, axis=1)
    plgpu.barrier_arrive(blocks.both)
    between(shrink)
    plgpu.barrier_wait(blocks.both)
    first, second = of_both(blocks.sums, ROWS, optimized=False)
    rounded = jnp.concatenate(of_both(blocks.probabilities, plgpu.Layout.WGMMA), axis=1)
    return raised, denominator * shrink + (first + second), shrink, rounded
