"""Sequential heads of the draft stages, one row per block position (model.md 3.12, engine.md 3.2).

The parallel stages give every position of a block its base logits. A head then adds what depends on
the drafts before it, one position after the other:

    "markov"  W2 . W1[x], x the token before
    "rnn"     W2 . output, of a gated memory that has seen every token since the anchor
    "none"    nothing

The confidence of a draft is read from its hidden row and W1[x]. Rows are of any sequences.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.core import Tracer
from jaxtyping import Float, Int

from deepinfer_jax.config.model import DraftConfig, ModelConfig
from deepinfer_jax.model.params import DraftParams, Leaf, Params
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels.core.pin import pin

#: Chooses the drafts of one tile: (sequence of each row [t], position in the block from 0 [],
#: scores [t, v]) -> (token ids int32 [t], their log-probabilities float32 [t, v] or None).
Choose = Callable[
    [Int[Array, " t"], Int[Array, ""], Float[Array, "t v"]], tuple[Array, Array | None]
]


@struct.dataclass
class DraftOutput:
    """`block` proposals after the anchor, without it; `draft_blocks` adds a leading axis s.

    token_ids: int32 [block]. confidence: float32 [block], estimated acceptance probability of every
    draft, given that the ones before it were accepted; confidence_logit: before the sigmoid.
    logits: float32 [block, v], after the head. log_q: float32 [block, v], what the drafts were
    drawn from; None unless they were sampled. Made by `draft`, which says what it raises.

    Examples:
        >>> found = di.draft(model.params, model.config, [368, 440, 557])
        >>> found.token_ids.dtype, found.confidence.dtype, found.log_q
        (dtype('int32'), dtype('float32'), None)
    """

    token_ids: Leaf  # int32 [block]
    confidence: Leaf  # float32 [block]
    confidence_logit: Leaf  # float32 [block]
    logits: Leaf = None  # float32 [block, v], if asked for
    log_q: Leaf = None  # float32 [block, v], if the choice gave it


def highest(
    sequence: Int[Array, " t"], place: Int[Array, ""], scores: Float[Array, "t v"]
) -> tuple[Int[Array, " t"], None]:
    """Returns the id of the highest score of each row, the lowest id among equals."""
    return jnp.argmax(scores, axis=1).astype(jnp.int32), None


def empty_memory(settings: DraftConfig, rows: int) -> Float[Array, "t m"]:
    """Returns the memory at the anchor: zeros, of width 0 for a head that has none."""
    width = settings.dspark_markov_rank if settings.dspark_head == "rnn" else 0
    return jnp.zeros((rows, width), jnp.float32)


def embed_previous(
    settings: DraftConfig, draft: DraftParams, previous: Int[Array, " t"]
) -> Float[Array, "t r"]:
    """Returns W1[x] of the token before each row; of width 0 for the head "none"."""
    if settings.dspark_head == "none":
        return jnp.zeros((previous.shape[0], 0), jnp.float32)
    return draft.markov_embed[previous].astype(jnp.float32)


def head_output(
    ops: Ops,
    settings: DraftConfig,
    draft: DraftParams,
    memory: Float[Array, "t m"],
    embedded: Float[Array, "t r"],
    hidden: Float[Array, "t d"],
) -> tuple[Float[Array, "t m"], Float[Array, "t r"]]:
    """Returns (memory after this position, what W2 projects to logits).

    The recurrent head projects [memory; W1[x]; hidden] to a gate g, a candidate c and an output o:
    the new memory is m' = sigmoid(g) m + (1 - sigmoid(g)) tanh(c), its output o + m'. With o =
    W1[x] and no memory it is the Markov head. `hidden` is taken before the final norm.
    """
    if settings.dspark_head != "rnn":
        return memory, embedded
    joined = jnp.concatenate([memory, embedded, hidden], axis=1)
    gate, candidate, output = jnp.split(ops.contract_float32(joined, draft.rnn_joint), 3, axis=1)
    keep = jax.nn.sigmoid(gate)
    # Pinned: a contracted product would round differently in another fusion.
    memory = pin(keep * memory) + pin((1.0 - keep) * jnp.tanh(candidate))
    return memory, output + memory


def head_scores(
    ops: Ops,
    settings: DraftConfig,
    draft: DraftParams,
    base: Float[Array, "t v"],
    output: Float[Array, "t r"],
) -> Float[Array, "t v"]:
    """Returns the logits of the drafts: those of the parallel stages plus the head's part."""
    if settings.dspark_head == "none":
        return base
    return base + ops.contract_float32(output, draft.markov_head)


def confidence_logits(
    ops: Ops, draft: DraftParams, hidden: Float[Array, "t d"], embedded: Float[Array, "t r"]
) -> Float[Array, " t"]:
    """Returns w . [hidden; W1[x]] of every row; `hidden` is taken before the final norm."""
    return ops.contract_float32(jnp.concatenate([hidden, embedded], axis=1), draft.confidence)[:, 0]


def probability(logit: Float[Array, " t"]) -> Float[Array, " t"]:
    """Returns the confidence of a logit, clamped to +-60."""
    return jax.nn.sigmoid(jnp.clip(logit, -60.0, 60.0))


def for_tiles(
    ops: Ops,
    height: int,
    count: Int[Array, ""] | int,
    body: Callable[[Int[Array, ""] | int, Any], Any],
    carry: Any,
) -> Any:
    """Returns the carry after body(first sequence, carry) of all tiles of `height` sequences.

    A bound that is known is at least two: a loop of one trip would be inlined (`plan_length`).
    """
    if not ops.is_tiled:
        return body(0, carry)
    tiles = -(-count // height)
    tiles = tiles if isinstance(tiles, Tracer) else max(2, int(tiles))
    return lax.fori_loop(0, tiles, lambda index, carry: body(index * height, carry), carry)


def propose(
    ops: Ops,
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "s k d"],
    anchor: Int[Array, " s"],
    sequences: Int[Array, " s"],
    count: Int[Array, ""] | int,
    choose: Choose,
    with_logits: bool,
) -> DraftOutput:
    """Returns the drafts of blocks from their hidden rows, in tiles of one row per sequence."""
    settings, draft = config.draft, params.draft
    assert settings is not None  # `draft_blocks` has checked both
    assert draft is not None
    total, size, _ = hidden.shape
    rows = config.execution.row_tile if ops.is_tiled else total

    def draft_one(
        sequence: Array, place: Array, hidden: Array, previous: Array, memory: Array
    ) -> tuple[DraftOutput, Array]:
        """Returns (what one position of a tile proposes, the head's memory after it)."""
        base = ops.contract(ops.norm(hidden, draft.norm, config.rms_norm_eps), params.head)
        embedded = embed_previous(settings, draft, previous)
        raw = confidence_logits(ops, draft, hidden, embedded)
        memory, output = head_output(ops, settings, draft, memory, embedded, hidden)
        scores = head_scores(ops, settings, draft, base, output)
        token, log_q = choose(sequence, place, scores)
        one = DraftOutput(
            token_ids=token,
            confidence=probability(raw),
            confidence_logit=raw,
            logits=scores if with_logits else None,
            log_q=log_q,
        )
        return one, memory

    def tile(first: Int[Array, ""] | int, found: DraftOutput) -> DraftOutput:
        cut = [lax.dynamic_slice_in_dim(a, first, rows) for a in (sequences, anchor, hidden)]
        sequence, previous, own = lax.optimization_barrier(cut)

        def position(place: Int[Array, ""], carry: tuple) -> tuple:
            found, previous, memory = carry
            row = lax.dynamic_index_in_dim(own, place, axis=1, keepdims=False)
            one, memory = draft_one(sequence, place, row, previous, memory)

            def put(all_: Array, new: Array) -> Array:
                start = (first, place, *[0] * (new.ndim - 1))
                return lax.dynamic_update_slice(all_, new[:, None], start)

            return jax.tree.map(put, found, one), one.token_ids, memory

        start = (found, previous, empty_memory(settings, rows))
        return lax.fori_loop(0, size, position, start)[0]

    ids = jnp.zeros((rows,), jnp.int32)
    memory = empty_memory(settings, rows)
    shapes = jax.eval_shape(draft_one, ids, ids[0], hidden[:rows, 0], ids, memory)[0]
    found = jax.tree.map(lambda s: jnp.zeros((total, size, *s.shape[1:]), s.dtype), shapes)
    return for_tiles(ops, rows, count, tile, found)
