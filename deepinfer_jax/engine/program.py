"""One step on the device: admissions, the network over the plan's rows, one token per emitting row.

A pure function of (parameters, state, packed plan), jitted with the state donated. At level "batch"
one program serves every step: prefill, decode and mixtures, one request or many, since only loop
bounds change. Otherwise there is one program per power of four of rows.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.layout import ANCHOR, PlanLayout, PlanParts, unpack
from deepinfer_jax.engine.slots import SlotState, admit, advance, ids_before, row_edits
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.registry import AnyParams, AnyState
from deepinfer_jax.model.slots import look_back, open_slots
from deepinfer_jax.model.step import Plan, step
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.sampling.logprobs import TokenLogprobs, pick_tile
from deepinfer_jax.sampling.sample import NO_TOKEN, sample_tile
from pallas_kernels import core

TILE = core.ROW_TILE


@struct.dataclass
class EngineState:
    """Everything that stays on the device between steps."""

    cache: AnyState
    slots: SlotState


@struct.dataclass
class StepResult:
    """What the host reads of a step; B = emitting rows, T = plan rows, k = alternatives.

    tokens [B, 5]: slot, generation, token, stop code, sampler status. chosen: log-probabilities of
    the chosen tokens; prompt: of the prompt rows' next ids; both are zeros unless asked for.
    """

    tokens: Leaf  # int32 [B, 5]
    chosen: TokenLogprobs
    prompt: TokenLogprobs


@partial(
    jax.jit,
    static_argnames=("trees", "config", "layout", "alternatives"),
    donate_argnames="state",
)
def run_step(
    params: tuple[Array, ...],
    state: tuple[Array, ...],
    vector: Int[Array, " n"],
    *,
    trees: tuple[Any, Any],
    config: ModelConfig,
    layout: PlanLayout,
    alternatives: int,
) -> tuple[tuple[Array, ...], StepResult]:
    """Returns (leaves of the state after the step, what the host will read).

    Leaves rather than trees: taking records apart in Python at every call costs more than the rest
    of the dispatch.

    Args:
        params: leaves of the model's parameters.
        state: leaves of an `EngineState`; consumed.
        vector: a packed plan.
        trees: the structures of the two.
        config: of the model.
        layout: of the plan.
        alternatives: k of the log-probabilities.
    """
    after, result = engine_step(
        jax.tree.unflatten(trees[0], params),
        jax.tree.unflatten(trees[1], state),
        vector,
        config=config,
        layout=layout,
        alternatives=alternatives,
    )
    return tuple(jax.tree.leaves(after)), result


def engine_step(
    params: AnyParams,
    state: EngineState,
    vector: Int[Array, " n"],
    *,
    config: ModelConfig,
    layout: PlanLayout,
    alternatives: int,
) -> tuple[EngineState, StepResult]:
    """Returns (state after the step, what the host will read). Pure; arguments as `run_step`."""
    parts = unpack(layout, vector)
    state, plan = _prepare(params, config, state, parts)
    drafting = config.draft is not None
    cache, hidden, _ = step(params, config, state.cache, plan, drafting=drafting)
    state = replace(state, cache=cache)
    prompt = _score_prompt(params, config, layout, parts, hidden, alternatives)
    state, tokens, chosen = _choose(
        params, config, state, layout, parts, plan, hidden, alternatives
    )
    return state, StepResult(tokens=tokens, chosen=chosen, prompt=prompt)


def _prepare(
    params: AnyParams, config: ModelConfig, state: EngineState, parts: PlanParts
) -> tuple[EngineState, Plan]:
    """Applies admissions and block-table entries; resolves rows that only the device knows."""
    slots, admitted = admit(state.slots, parts.admits)
    cache = state.cache
    where, place, block = parts.deltas.T
    where = jnp.where(where > 0, where, cache.block_table.shape[0])
    cache = open_slots(
        params,
        config,
        cache,
        admitted["slot"],
        length=admitted["length"],
        first=admitted["first"],
        floor=admitted["floor"],
        ids_before=ids_before(admitted, look_back(config)),
    )
    table = cache.block_table.at[where, place].set(block, mode="drop")
    cache = replace(cache, block_table=table)
    is_anchor = parts.ids == ANCHOR
    plan = Plan(
        ids=jnp.where(is_anchor, slots.last[parts.slot], parts.ids),
        position=jnp.where(is_anchor, cache.length[parts.slot], parts.position),
        slot=parts.slot,
        count=parts.header[0],
        # A sequence that stopped on the device has rows in plans made before the host knew.
        valid=slots.alive[parts.slot],
    )
    return EngineState(cache=cache, slots=slots), plan


def _choose(
    params: AnyParams,
    config: ModelConfig,
    state: EngineState,
    layout: PlanLayout,
    parts: PlanParts,
    plan: Plan,
    hidden: Float[Array, "t d"],
    alternatives: int,
) -> tuple[EngineState, Array, TokenLogprobs]:
    """Chooses one token for every emitting row, in tiles of rows; dead rows choose nothing."""
    slots, count = state.slots, parts.header[1]
    size = -(-layout.slots // TILE) * TILE
    emit = jnp.pad(parts.emit, (0, size - layout.slots))
    wants = parts.header[2] > 0
    image = config.image_token_id  # stands for pixels: no text has it
    never = None if image is None else jnp.arange(config.vocab_size) == image
    ops = ops_for(config.execution)

    def tile(index: Int[Array, ""] | int, found: tuple) -> tuple:
        start = index * TILE
        row = lax.dynamic_slice_in_dim(emit, start, TILE)
        slot = plan.slot[row]
        row, slot = lax.optimization_barrier((row, slot))
        logits = ops.contract(hidden[row], params.head)
        rules, place = slots.rules.take(slot), plan.position[row] + 1

        def pick(full: bool) -> tuple[Array, Array, Array]:
            edits = row_edits(slots, slot, full=full)
            return sample_tile(logits, rules, place, edits, never_emit=never)

        token, status, log_p = lax.cond(
            slots.edited[slot].any(), lambda: pick(True), lambda: pick(False)
        )
        record = lax.cond(
            wants,
            lambda: _record(logits, log_p, slots.processed[slot], token, alternatives),
            lambda: _no_record(TILE, alternatives),
        )
        new = (jnp.stack([token, status], axis=1), record)
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0), found, new
        )

    start = (jnp.full((size, 2), NO_TOKEN, jnp.int32), _no_record(size, alternatives))
    (sampled, chosen) = lax.fori_loop(0, -(-count // TILE), tile, start)
    token, status = sampled[: layout.slots].T
    slot = plan.slot[parts.emit]
    is_real = (jnp.arange(layout.slots) < count) & slots.alive[slot]
    generation = slots.generation[slot]
    slots, code = advance(slots, slot, token, is_real)
    code = jnp.where(is_real, code, -1)
    tokens = jnp.stack([slot, generation, token, code, status], axis=1)
    chosen = jax.tree.map(lambda leaf: leaf[: layout.slots], chosen)
    return replace(state, slots=slots), tokens, chosen


def _score_prompt(
    params: AnyParams,
    config: ModelConfig,
    layout: PlanLayout,
    parts: PlanParts,
    hidden: Float[Array, "t d"],
    alternatives: int,
) -> TokenLogprobs:
    """Returns raw log-probabilities of the next prompt ids, where the plan asks for them."""
    ops = ops_for(config.execution)

    def tile(index: Int[Array, ""] | int, found: TokenLogprobs) -> TokenLogprobs:
        start = index * TILE
        rows = lax.dynamic_slice_in_dim(hidden, start, TILE)
        target = lax.dynamic_slice_in_dim(parts.target, start, TILE)
        rows, target = lax.optimization_barrier((rows, target))
        logits = ops.contract(rows, params.head)
        raw = jnp.zeros((TILE,), bool)
        record = _record(logits, logits, raw, target, alternatives)
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0), found, record
        )

    tiles = jnp.where(parts.header[3] > 0, -(-parts.header[0] // TILE), 0)
    return lax.fori_loop(0, tiles, tile, _no_record(layout.rows, alternatives))


def _record(
    logits: Array, log_p: Array, processed: Array, token: Array, alternatives: int
) -> TokenLogprobs:
    """Returns the record of a tile, of the raw logits or of log p as each row wants."""
    chosen = processed[:, None]
    order = jnp.where(chosen, log_p, logits)
    return pick_tile(order, jnp.where(chosen, log_p, core.log_softmax(logits)), token, alternatives)


def _no_record(rows: int, alternatives: int) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=jnp.zeros((rows,), jnp.float32),
        rank=jnp.zeros((rows,), jnp.int32),
        top_ids=jnp.zeros((rows, alternatives), jnp.int32),
        top_logprobs=jnp.zeros((rows, alternatives), jnp.float32),
    )
