"""Edits of logits before the temperature, in the order of engine.md 5.2 and io.md 3.

never-emit row, logit_bias (-100 is a mask), penalties, hard masks with the grammar last. Every step
is exact or a single rounding per element, so a row's bits do not depend on tiles; `edit_logits` is
row-tiled all the same, as part of the whole-row body of the sampler.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from deepinfer_jax.sampling.rows import Leaf, RowParams
from pallas_kernels import core
from pallas_kernels.core.pin import pin

OK = 0
NUMERICAL = 1  # NaN or +inf, or nothing left without a grammar: finish reason "numerical"
GRAMMAR = 2  # the grammar mask left nothing: finish reason "grammar"

BIAS_MASK = -100.0


@struct.dataclass
class Edits:
    """Optional inputs of `edit_logits`, each with one row per logit row; None is without effect.

    Counts and masks of a verified row include the drafts before it (engine.md 5.2).
    """

    bias_ids: Leaf = None  # int32 [b, m], -1 unused, no id twice in a row
    bias_values: Leaf = None  # float32 [b, m]
    output_counts: Leaf = None  # int32 [b, v] occurrences in the output
    in_prompt: Leaf = None  # bool [b, v], for the repetition penalty
    allowed: Leaf = None  # bool [b, v]: allowed_token_ids, bad_words
    banned_ids: Leaf = None  # int32 [b, m], -1 unused: stop ids while below min_tokens
    grammar: Leaf = None  # bool [b, v]


def add_bias(
    logits: Float[Array, "b v"], ids: Int[Array, "b m"], values: Float[Array, "b m"]
) -> Float[Array, "b v"]:
    """Returns logits with biases added; -100 and below set -inf; ids outside 0..v-1 are unused."""
    size = logits.shape[-1]
    is_used = (ids >= 0) & (ids < size)
    old = jnp.take_along_axis(logits, jnp.where(is_used, ids, 0), axis=-1)
    new = jnp.where(values <= BIAS_MASK, -jnp.inf, old + values)
    row = jnp.arange(ids.shape[0])[:, None]
    return logits.at[row, jnp.where(is_used, ids, size)].set(new, mode="drop")


def apply_penalties(
    logits: Float[Array, "b v"],
    output_counts: Int[Array, "b v"],
    in_prompt: Bool[Array, "b v"] | None,
    repetition: Float[Array, " b"],
    frequency: Float[Array, " b"],
    presence: Float[Array, " b"],
) -> Float[Array, "b v"]:
    """Returns logits after the repetition, frequency and presence penalties.

    Repetition divides positive and multiplies negative logits of ids in the prompt or the output;
    frequency times the count and presence are then subtracted, from ids of the output only.
    """
    in_output = output_counts > 0
    seen = in_output if in_prompt is None else in_output | in_prompt
    factor = jnp.where(seen, repetition[:, None], np.float32(1))
    logits = pin(jnp.where(logits > 0, logits / factor, logits * factor))
    logits = logits - pin(frequency[:, None] * output_counts.astype(jnp.float32))
    return logits - jnp.where(in_output, presence[:, None], np.float32(0))


def mask_ids(logits: Float[Array, "b v"], ids: Int[Array, "b m"]) -> Float[Array, "b v"]:
    """Returns logits with -inf at the given ids of each row; ids outside 0..v-1 are unused."""
    size = logits.shape[-1]
    row = jnp.arange(ids.shape[0])[:, None]
    place = jnp.where((ids >= 0) & (ids < size), ids, size)
    return logits.at[row, place].set(-jnp.inf, mode="drop")


def unpack_bitmask(words: Int[Array, "b w"], size: int) -> Bool[Array, "b v"]:
    """Returns bits 0..size-1 of each row as booleans; id i is bit i % 32 of word i // 32."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=words.dtype)
    return (bits.reshape(words.shape[0], -1)[:, :size] & 1) == 1


def edit_logits(
    logits: Float[Array, "b v"],
    rows: RowParams,
    edits: Edits | None = None,
    never_emit: Bool[Array, " v"] | None = None,
) -> tuple[Float[Array, "b v"], Int[Array, " b"]]:
    """Returns the edited logits and the status of every row.

    A row with a NaN or +inf, before or after the edits, or with nothing left, is all -inf and has
    the status `NUMERICAL` or `GRAMMAR`. Zeros and subnormals become +0.0, so that equality of
    values and of bits is one thing. Columns are token ids; vocabulary padding is cut off or in
    `never_emit`.
    """
    body = partial(edit_tile, never_emit=never_emit)
    return tile_rows(body, logits, rows, edits or Edits())


def tile_rows(body: Any, *trees: Any) -> Any:
    """Returns `core.map_row_tiles` of a function of pytrees whose leaves all have b rows."""
    leaves, structure = jax.tree.flatten(trees)
    return core.map_row_tiles(lambda *parts: body(*jax.tree.unflatten(structure, parts)), *leaves)


def edit_tile(
    logits: Array, rows: RowParams, edits: Edits, never_emit: Array | None
) -> tuple[Array, Array]:
    """The body of `edit_logits` for one tile of rows."""
    is_numerical = ~_is_sound(logits)
    if never_emit is not None:
        logits = jnp.where(never_emit, -jnp.inf, logits)
    if edits.bias_ids is not None:
        logits = add_bias(logits, edits.bias_ids, edits.bias_values)
    if edits.output_counts is not None:
        logits = apply_penalties(
            logits,
            edits.output_counts,
            edits.in_prompt,
            # a padding row of zeros is greedy and unused; 0 would only make its -inf a NaN
            jnp.where(rows.repetition_penalty > 0, rows.repetition_penalty, np.float32(1)),
            rows.frequency_penalty,
            rows.presence_penalty,
        )
    if edits.allowed is not None:
        logits = jnp.where(edits.allowed, logits, -jnp.inf)
    if edits.banned_ids is not None:
        logits = mask_ids(logits, edits.banned_ids)
    is_numerical |= ~_is_sound(logits) | ~jnp.any(logits > -jnp.inf, axis=-1)
    if edits.grammar is not None:
        logits = jnp.where(edits.grammar, logits, -jnp.inf)
    has_choice = jnp.any(logits > -jnp.inf, axis=-1)
    status = jnp.where(is_numerical, NUMERICAL, jnp.where(has_choice, OK, GRAMMAR))
    logits = jnp.where((status == OK)[:, None], canonical_zeros(logits), -jnp.inf)
    return logits, status.astype(jnp.int32)


def canonical_zeros(scores: Float[Array, "b v"]) -> Float[Array, "b v"]:
    """Returns scores whose zeros and subnormals are +0.0, whatever the device flushes."""
    exponent = jax.lax.bitcast_convert_type(scores, jnp.uint32) & np.uint32(0x7F800000)
    return jnp.where(exponent == 0, np.float32(0), scores)


def _is_sound(logits: Array) -> Array:
    return jnp.all(logits < jnp.inf, axis=-1)  # false for NaN as well
