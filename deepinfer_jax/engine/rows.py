"""Which rows a step runs: the plan's prompt rows, then a round of every sequence that decodes.

A round is the newest token (the anchor) and the drafts after it that are verified. How many those
are is decided here, on the device, from confidences the host has not seen (engine.md 2.8).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Int

from deepinfer_jax.engine.layout import PlanLayout, PlanParts, header_word
from deepinfer_jax.engine.slots import SlotState
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.step import Plan
from deepinfer_jax.speculative.confidence import survival
from deepinfer_jax.speculative.schedule import fill_by_rank
from pallas_kernels import core

TILE = core.ROW_TILE
#: Elements up to which a table of rows and token ids is worked out whether it is wanted or not, by
#: a program without conditions on data.
SMALL_TABLE = 2**23


@struct.dataclass
class Emitters:
    """The s sequences that may emit tokens in a step: those of rounds, then ended prompts.

    slot: 0 where unused. is_live: in the plan, and not stopped on the device. rows: rows that
    choose a token; 0 unless live. row: the first of them in the plan. first: the first of them
    among all rows that choose. base: position of row `row`. is_round: has an anchor and drafts.
    """

    slot: Leaf  # int32 [s]
    is_live: Leaf  # bool [s]
    rows: Leaf  # int32 [s]
    row: Leaf  # int32 [s]
    first: Leaf  # int32 [s]
    base: Leaf  # int32 [s]
    is_round: Leaf  # bool [s]


def step_rows(
    layout: PlanLayout, parts: PlanParts, slots: SlotState, length: Int[Array, " s"]
) -> tuple[Plan, Emitters]:
    """Returns the rows of a step and who emits.

    Args:
        layout: of the plan.
        parts: of the plan.
        slots: after admissions.
        length: of every slot's cache; a round begins there.
    """
    prompt_rows, rounds = header_word(parts, "prompt_rows"), header_word(parts, "rounds")
    place = jnp.arange(layout.slots, dtype=jnp.int32)
    is_round = place < rounds
    is_end = ~is_round & (place < rounds + header_word(parts, "ends"))
    end = parts.ends[jnp.maximum(place - rounds, 0)]
    slot = jnp.where(is_round, parts.rounds, jnp.where(is_end, parts.slot[end], 0))
    is_live = (is_round | is_end) & slots.alive[slot]
    count = jnp.where(is_live & is_round, 1, 0)
    count += round_drafts(parts, slots, slot, is_live & is_round)
    last = jnp.cumsum(count)
    start = prompt_rows + last - count
    row = jnp.arange(layout.rows, dtype=jnp.int32)
    owner = jnp.searchsorted(last, row - prompt_rows, side="right", method="compare_all")
    owner = jnp.minimum(owner, layout.slots - 1).astype(jnp.int32)
    offset = row - start[owner]
    token = slots.last[slot[owner]]
    if slots.drafting is not None:
        drafts = slots.drafting.token
        draft = drafts[slot[owner], jnp.clip(offset - 1, 0, drafts.shape[1] - 1)]
        token = jnp.where(offset == 0, token, draft)
    is_prompt = row < prompt_rows
    plan = Plan(
        ids=jnp.where(is_prompt, parts.ids, token),
        position=jnp.where(is_prompt, parts.position, length[slot[owner]] + offset),
        slot=jnp.where(is_prompt, parts.slot, slot[owner]),
        count=prompt_rows + last[-1],
        # A sequence that stopped on the device has rows in plans made before the host knew.
        valid=~is_prompt | slots.alive[parts.slot],
    )
    rows = jnp.where(is_end & is_live, 1, count)
    where = jnp.where(is_end, end, start)
    emitters = Emitters(
        slot=slot,
        is_live=is_live,
        rows=rows,
        row=where,
        first=jnp.cumsum(rows) - rows,
        base=jnp.where(is_end, parts.position[end], length[slot]),
        is_round=is_round,
    )
    return plan, emitters


def by_tiles(body: Callable[..., Any], *trees: Any) -> Any:
    """Returns a function of tiles of `TILE` rows for all rows at once, as one batch of tiles.

    Conditions of the tiles become selections then, which is what `branches="static"` wants: the
    rows of a tile never depend on what the others make unnecessary.

    Args:
        body: from pytrees with leaves [TILE, ...] to one.
        *trees: pytrees with leaves [n, ...] of one n.
    """
    rows = jax.tree.leaves(trees)[0].shape[0]
    tiles = -(-rows // TILE)

    def cut(leaf: Array) -> Array:
        padding = [(0, tiles * TILE - rows)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(tiles, TILE, *leaf.shape[1:])

    def joined(leaf: Array) -> Array:
        return leaf.reshape(tiles * TILE, *leaf.shape[2:])[:rows]

    return jax.tree.map(joined, jax.vmap(body)(*jax.tree.map(cut, trees)))


def round_drafts(
    parts: PlanParts, slots: SlotState, slot: Int[Array, " s"], decodes: Bool[Array, " s"]
) -> Int[Array, " s"]:
    """Returns how many drafts of each round are verified.

    At most those there are, those its request and the policy allow, and as many as tokens are
    still due after one; of these the likeliest to survive, until `verify_rows` rows are full.
    """
    drafting = slots.drafting
    if drafting is None:
        return jnp.zeros_like(slot)
    threshold = lax.bitcast_convert_type(header_word(parts, "threshold"), jnp.float32)
    alive = survival(drafting.confidence[slot])
    most = jnp.minimum(drafting.most[slot], header_word(parts, "most_drafts"))
    most = jnp.minimum(most, slots.most[slot] - slots.produced[slot] - 1)
    most = jnp.where(decodes & drafting.is_made[slot], most, 0)
    place = jnp.arange(alive.shape[1], dtype=jnp.int32)
    # Survivals do not increase along a row, so what is allowed is a prefix.
    is_allowed = (place < most[:, None]) & (alive >= threshold)
    key = jnp.where(is_allowed, alive, jnp.float32(-1))
    return fill_by_rank(key, header_word(parts, "verify_rows") - jnp.sum(decodes, dtype=jnp.int32))
