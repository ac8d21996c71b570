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
from deepinfer_jax.engine.drafting import Drafting, force_drafts, make_drafts
from deepinfer_jax.engine.expert_load import step_load
from deepinfer_jax.engine.layout import RESULT, PlanLayout, PlanParts, header_word, unpack
from deepinfer_jax.engine.rows import SMALL_TABLE, TILE, Emitters, by_tiles, step_rows
from deepinfer_jax.engine.slots import EngineState, SlotState, admit, ids_before
from deepinfer_jax.model.on_mesh import everywhere
from deepinfer_jax.model.params import Leaf, Params
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.slots import look_back, open_slots
from deepinfer_jax.model.step import Plan, step
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.sampling.logprobs import TokenLogprobs
from deepinfer_jax.speculative.confidence import survival


@struct.dataclass
class StepResult:
    """What the host reads of a step; T = plan rows, k = alternatives.

    rounds [S, width]: of each emitter, the words `layout.RESULT`, its tokens (-1 beyond the last)
    and the survivals of its new drafts. chosen: log-probabilities by emitting row; prompt: of the
    prompt rows' next ids; both are zeros on the device, and None on the host, unless asked for.
    hashes: of the logits, by emitting row; None unless they are recorded. drafts: new ones of each
    emitter; None in steps without grammars, whose host does not need them. load: rows by layer and
    expert, if the layout counts them.
    """

    rounds: Leaf  # int32 [S, width]
    chosen: TokenLogprobs | None
    prompt: TokenLogprobs | None
    hashes: Leaf = None  # uint32 [S * (drafts + 1), 2]
    drafts: Leaf = None  # int32 [S, drafts]
    load: Leaf = None  # int32 [layers, experts]


@struct.dataclass
class MaskTable:
    """Of grammars: (drafts + 1) rows for each emitter of a step.

    words: bit i % 32 of word i // 32 is set where id i is allowed. forced: what follows the token
    of a row for certain, -1 beyond.
    """

    words: Leaf  # int32 [m, w]
    forced: Leaf  # int32 [m, drafts]


@struct.dataclass
class StepRows:
    """What the network leaves to the choice of tokens; T = plan rows.

    hidden float32 [T, d]: what the head takes. prompt, load: as in `StepResult`.
    """

    plan: Plan
    emitters: Emitters
    hidden: Leaf
    prompt: TokenLogprobs
    load: Leaf = None


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
    tree = jax.tree.unflatten(trees[0], params)
    run = partial(
        engine_step,
        config=config,
        layout=layout,
        alternatives=alternatives,
        drafting=drafting,
        hashes=hashes,
    )
    step_all = everywhere(run, config, tree, 2)
    after, result = step_all(tree, jax.tree.unflatten(trees[1], state), vector)
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
    state, rows = network_part(
        params, state, parts, config=config, layout=layout, alternatives=alternatives
    )
    return token_part(
        params,
        state,
        parts,
        rows,
        config=config,
        layout=layout,
        alternatives=alternatives,
        drafting=drafting,
        hashes=hashes,
    )


def network_part(
    params: AnyParams,
    state: EngineState,
    parts: PlanParts,
    *,
    config: ModelConfig,
    layout: PlanLayout,
    alternatives: int,
) -> tuple[EngineState, StepRows]:
    """Returns (state, rows) after admissions and the network: the first part of `engine_step`."""
    state = _prepare(params, config, state, parts)
    plan, emitters = step_rows(layout, parts, state.slots, state.cache.length)
    writes_context = config.draft is not None
    seeing = replace(plan, image_rows=state.images, image_place=parts.image)
    collect = ("expert_ids",) if layout.counts_experts else ()
    cache, hidden, seen = step(
        params, config, state.cache, seeing, drafting=writes_context, collect=collect
    )
    prompt = _score_prompt(params, config, layout, parts, hidden, alternatives)
    load = step_load(plan, seen["expert_ids"], config) if collect else None
    rows = StepRows(plan=plan, emitters=emitters, hidden=hidden, prompt=prompt, load=load)
    return replace(state, cache=cache), rows


def token_part(
    params: AnyParams,
    state: EngineState,
    parts: PlanParts,
    rows: StepRows,
    *,
    config: ModelConfig,
    layout: PlanLayout,
    alternatives: int,
    drafting: Drafting | None,
    hashes: bool,
    masks: MaskTable | None = None,
) -> tuple[EngineState, StepResult]:
    """Returns what `engine_step` does: tokens and new drafts, the second part of it.

    masks: of grammars; the result holds the new drafts as well then.
    """
    emitters, cache = rows.emitters, state.cache
    slots, emitted, told = choose(
        params,
        config,
        state.slots,
        parts,
        rows.plan,
        emitters,
        rows.hidden,
        alternatives,
        hashes,
        None if masks is None else masks.words,
    )
    # Rejected rows are taken back: the next round begins after the last token that was accepted.
    dropped = jnp.where(emitted.count > 0, emitters.slot, cache.length.shape[0])
    length = cache.length.at[dropped].set(emitters.base + emitted.count, mode="drop")
    state = replace(state, cache=replace(cache, length=length), slots=slots)
    if drafting is not None:
        assert isinstance(params, Params)  # V4 has no draft stages here
        wants = layout.makes_drafts
        state = make_drafts(params, config, state, parts, emitters, emitted, drafting, wants)
    drafts = None
    if masks is not None and drafting is not None:
        state = force_drafts(state, emitters, emitted, masks.forced)
        assert state.slots.drafting is not None
        drafts = state.slots.drafting.token[emitters.slot]
    return state, StepResult(
        rounds=_result_rows(state.slots, emitters, emitted),
        chosen=told.logprobs,
        prompt=rows.prompt,
        hashes=told.hashes,
        drafts=drafts,
        load=rows.load,
    )


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
    return replace(state, cache=replace(cache, block_table=table), slots=slots)


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
    height = config.execution.row_tile if ops.static else TILE

    def record(logits: Float[Array, "t v"], target: Int[Array, " t"]) -> TokenLogprobs:
        raw = jnp.zeros((TILE,), bool)
        return token_record(logits, logits, raw, target, alternatives)

    def tile(index: Int[Array, ""] | int, found: TokenLogprobs) -> TokenLogprobs:
        start = index * height
        rows = lax.dynamic_slice_in_dim(hidden, start, height)
        target = lax.dynamic_slice_in_dim(parts.target, start, height)
        rows, target = lax.optimization_barrier((rows, target))
        scores = ops.head(rows, params.head)
        told = record(scores, target) if height == TILE else by_tiles(record, scores, target)
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0), found, told
        )

    if ops.static and layout.rows * config.vocab_size <= SMALL_TABLE:
        return by_tiles(record, ops.head(hidden, params.head), parts.target)
    count = jnp.where(header_word(parts, "scores_prompt"), header_word(parts, "prompt_rows"), 0)
    return lax.fori_loop(0, -(-count // height), tile, no_record(layout.rows, alternatives))
