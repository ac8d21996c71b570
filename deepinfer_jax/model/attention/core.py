"""Softmax attention with a sink over one key list per row (model.md 3.6).

The list is a function of the row's position and the config alone, and it is folded in blocks of 64
ranks: block maximum, rescale, BF16 probabilities, value product. That partition is part of the
arithmetic, in prefill, decode and verification alike.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Shaped

from deepinfer_jax.numerics.ops import Ops

KeyList = tuple[Float[Array, "t _ c"], Bool[Array, "t _"]]  # keys, which of them are valid

#: Running maximum and denominator [t, h], and weighted values [t, h, c].
Fold = tuple[Array, Array, Array]

BLOCK = 64
_LOWEST = -1e30  # start of the running maximum; finite, so that an empty row stays free of NaN


def pad_keys(
    keys: Float[Array, "t s c"], valid: Bool[Array, "t s"]
) -> tuple[Float[Array, "t s2 c"], Bool[Array, "t s2"]]:
    """Returns the list padded at its end to a multiple of 64 ranks, invalid rows zeroed."""
    missing = -keys.shape[1] % BLOCK
    keys = jnp.where(valid[:, :, None], keys, 0.0)  # 0 * NaN of an unused row would poison the sum
    return (
        jnp.pad(keys, ((0, 0), (0, missing), (0, 0))),
        jnp.pad(valid, ((0, 0), (0, missing))),
    )


def attend(
    ops: Ops,
    q: Float[Array, "t h c"],
    keys: Float[Array, "t s c"],
    valid: Bool[Array, "t s"],
    sink: Float[Array, " h"],
) -> Float[Array, "t h c"]:
    """Returns attention of every head over its row's keys, which are also the values.

    keys, valid: the key list; invalid ranks have probability 0. The sink is an unscaled logit that
    joins the denominator once, after the last block. A row without keys gives zeros.
    """
    keys, valid = pad_keys(keys, valid)
    blocks = keys.reshape(keys.shape[0], -1, BLOCK, keys.shape[2]).swapaxes(0, 1)
    return attend_blocks(ops, q, blocks, valid, lambda block, mask: block, sink)


def attend_blocks(
    ops: Ops,
    q: Float[Array, "t h c"],
    blocks: Shaped[Array, "n ..."],
    valid: Bool[Array, "t s"],
    read: Callable[[Array, Array], Array],
    sink: Float[Array, " h"],
) -> Float[Array, "t h c"]:
    """Returns the same over a list of n blocks that are read one by one.

    read: entry of `blocks` and its mask [t, 64] -> keys [t, 64, c], zeroed where the mask is false.
    """
    rows, heads, dim = q.shape
    scale = dim**-0.5
    masks = valid.reshape(rows, -1, BLOCK).swapaxes(0, 1)
    start = (
        jnp.full((rows, heads), _LOWEST),
        jnp.zeros((rows, heads)),
        jnp.zeros((rows, heads, dim)),
    )
    if ops.static:
        return _finish(_fold_at_once(ops, q, blocks, masks, read, start), sink)

    def fold(carry: tuple, block: tuple) -> tuple[tuple, None]:
        listed, mask = block

        def visit(carry: tuple) -> tuple:
            maximum, denominator, total = carry
            key = read(listed, mask)
            scores = jnp.where(mask[:, None, :], ops.contract_pairs(q, key) * scale, -jnp.inf)
            raised = jnp.maximum(maximum, scores.max(axis=-1))
            shrink = jnp.exp(maximum - raised)
            weight = jnp.exp(scores - raised[:, :, None])
            value = ops.contract_values(ops.bf16(weight), key)
            return (
                raised,
                denominator * shrink + ops.tree_sum(weight),
                total * shrink[:, :, None] + value,
            )

        # A block of only -1 ranks changes nothing, so skipping it changes no bit.
        return lax.cond(mask.any(), visit, lambda c: c, carry), None

    return _finish(lax.scan(fold, start, (blocks, masks))[0], sink)


def _fold_at_once(
    ops: Ops,
    q: Float[Array, "t h c"],
    blocks: Shaped[Array, "n ..."],
    masks: Bool[Array, "n t 64"],
    read: Callable[[Array, Array], Array],
    start: Fold,
) -> Fold:
    """Returns the fold over all blocks with the same roundings, its products formed at once."""
    rows, heads, dim = q.shape
    count = blocks.shape[0]
    keys = jnp.stack([read(blocks[n], masks[n]) for n in range(count)], axis=1)  # [t, n, 64, c]
    scores = ops.contract_pairs(q, keys.reshape(rows, -1, dim)) * dim**-0.5
    visible = masks.swapaxes(0, 1).reshape(rows, 1, -1)
    scores = jnp.where(visible, scores, -jnp.inf).reshape(rows, heads, count, BLOCK)
    maximum, denominator, total = start
    highest, raised = scores.max(axis=-1), [maximum]
    for n in range(count):
        raised.append(jnp.maximum(raised[-1], highest[:, :, n]))
    weight = jnp.exp(scores - jnp.stack(raised[1:], axis=2)[..., None])
    rounded = ops.bf16(weight).swapaxes(1, 2)
    values = jax.vmap(ops.contract_values, in_axes=1, out_axes=1)(rounded, keys)
    sums = ops.tree_sum(weight)
    for n in range(count):
        shrink = jnp.exp(raised[n] - raised[n + 1])
        denominator = denominator * shrink + sums[:, :, n]
        total = total * shrink[:, :, None] + values[:, n]
    return raised[-1], denominator, total


def _finish(folded: Fold, sink: Float[Array, " h"]) -> Float[Array, "t h c"]:
    """Returns the weighted mean of the values; the sink joins the denominator."""
    maximum, denominator, total = folded
    final = jnp.maximum(maximum, sink)
    shrink = jnp.exp(maximum - final)
    denominator = denominator * shrink + jnp.exp(sink - final)
    return total * shrink[:, :, None] / denominator[:, :, None]
