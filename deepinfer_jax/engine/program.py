"""One step on the device: admissions, the network over the step's rows, tokens, new drafts.

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
from deepinfer_jax.engine.choose import Emitted, choose, no_record, token_record
from deepinfer_jax.engine.drafting import Drafting, make_drafts
from deepinfer_jax.engine.layout import RESULT, PlanLayout, PlanParts, header_word, unpack
from deepinfer_jax.engine.rows import SMALL_TABLE, TILE, Emitters, by_tiles, step_rows
from deepinfer_jax.engine.slots import EngineState, SlotState, admit, ids_before
from deepinfer_jax.model.params import Leaf, Params
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.slots import look_back, open_slots
from deepinfer_jax.model.step import step
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.sampling.logprobs import TokenLogprobs
from deepinfer_jax.speculative.confidence import survival


@struct.dataclass
class StepResult:
    """What the host reads of a step; T = plan rows, k = alternatives.

    rounds [S, width]: of each emitter, the words `layout.RESULT`, its tokens (-1 beyond the last)
    and the survivals of its new drafts. chosen: log-probabilities by emitting row; prompt: of the
    prompt rows' next ids; both are zeros on the device, and None on the host, unless asked for.
    hashes: of the logits, by emitting row; None unless they are recorded.
    """

    rounds: Leaf  # int32 [S, width]
    chosen: TokenLogprobs | None
    prompt: TokenLogprobs | None
    hashes: Leaf = None  # uint32 [S * (drafts + 1), 2]


@partial(
    jax.jit,
    static_argnames=("trees", "config", "layout", "alternatives", "drafting", "hashes"),
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
    drafting: Drafting | None,
    hashes: bool,
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
        drafting: how drafts are made; None makes none.
        hashes: return hashes of the logits that gave each token.
    """
    after, result = engine_step(
        jax.tree.unflatten(trees[0], params),
        jax.tree.unflatten(trees[1], state),
        vector,
        config=config,
        layout=layout,
        alternatives=alternatives,
        drafting=drafting,
        hashes=hashes,
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
    drafting: Drafting | None,
    hashes: bool,
) -> tuple[EngineState, StepResult]:
    """Returns (state after the step, what the host will read). Pure; arguments as `run_step`."""
    parts = unpack(layout, vector)
    state = _prepare(params, config, state, parts)
    plan, emitters = step_rows(layout, parts, state.slots, state.cache.length)
    writes_context = config.draft is not None
    cache, hidden, _ = step(params, config, state.cache, plan, drafting=writes_context)
    prompt = _score_prompt(params, config, layout, parts, hidden, alternatives)
    slots, emitted, told = choose(
        params, config, state.slots, parts, plan, emitters, hidden, alternatives, hashes
    )
    # Rejected rows are taken back: the next round begins after the last token that was accepted.
    dropped = jnp.where(emitted.count > 0, emitters.slot, cache.length.shape[0])
    length = cache.length.at[dropped].set(emitters.base + emitted.count, mode="drop")
    state = EngineState(cache=replace(cache, length=length), slots=slots)
    if drafting is not None:
        assert isinstance(params, Params)  # V4 has no draft stages here
        state = make_drafts(params, config, state, parts, emitters, emitted, drafting)
    rounds = _result_rows(state.slots, emitters, emitted)
    return state, StepResult(rounds=rounds, chosen=told.logprobs, prompt=prompt, hashes=told.hashes)


def _result_rows(slots: SlotState, emitters: Emitters, emitted: Emitted) -> Int[Array, "s w"]:
    """Returns `StepResult.rounds`."""
    slot = emitters.slot
    words = {
        "slot": slot,
        "generation": slots.generation[slot],
        "first": emitters.first,
        "count": emitted.count,
        "code": emitted.code,
        "status": emitted.status,
        "verified": jnp.maximum(emitters.rows - 1, 0),
        "accepted": emitted.accepted,
    }
    columns = [jnp.stack([words[name] for name in RESULT], axis=1), emitted.tokens]
    if slots.drafting is not None:
        alive = survival(slots.drafting.confidence[slot])
        alive = jnp.where(slots.drafting.is_made[slot][:, None], alive, 0.0)
        columns.append(lax.bitcast_convert_type(alive, jnp.int32))
    return jnp.concatenate(columns, axis=1)


def _prepare(
    params: AnyParams, config: ModelConfig, state: EngineState, parts: PlanParts
) -> EngineState:
    """Applies admissions and block-table entries."""
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
    return EngineState(cache=replace(cache, block_table=table), slots=slots)


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

    def record(logits: Float[Array, "t v"], target: Int[Array, " t"]) -> TokenLogprobs:
        raw = jnp.zeros((TILE,), bool)
        return token_record(logits, logits, raw, target, alternatives)

    def tile(index: Int[Array, ""] | int, found: TokenLogprobs) -> TokenLogprobs:
        start = index * TILE
        rows = lax.dynamic_slice_in_dim(hidden, start, TILE)
        target = lax.dynamic_slice_in_dim(parts.target, start, TILE)
        rows, target = lax.optimization_barrier((rows, target))
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0),
            found,
            record(ops.head(rows, params.head), target),
        )

    if ops.static and layout.rows * config.vocab_size <= SMALL_TABLE:
        return by_tiles(record, ops.head(hidden, params.head), parts.target)
    count = jnp.where(header_word(parts, "scores_prompt"), header_word(parts, "prompt_rows"), 0)
    return lax.fori_loop(0, -(-count // TILE), tile, no_record(layout.rows, alternatives))
