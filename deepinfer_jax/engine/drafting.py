"""New drafts of every sequence that goes on, made at the end of its step (engine.md 3.1-3.3).

Drafts are drawn with the request's own temperature and truncation, without its logit edits: those
only say which drafts are accepted. With verify="exact" they are drawn with the target's noise.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import ROLLBACK, RuntimeConfig
from deepinfer_jax.engine.choose import Emitted
from deepinfer_jax.engine.layout import MAKE_DRAFTS, NO_DRAFTS, PlanParts, header_word
from deepinfer_jax.engine.rows import Emitters, by_tiles
from deepinfer_jax.engine.slots import RUNNING, EngineState
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.loading import Model
from deepinfer_jax.model.draft import draft_blocks
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.sampling.truncate import NARROW, WIDE, is_greedy, logprobs_tile
from deepinfer_jax.speculative.confidence import calibrated_confidence
from deepinfer_jax.speculative.verify import EXACT, draft_tokens

Drafts = tuple[Array, Array, Array | None]  # token ids, confidences, log q if it is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """size: drafts of a round. temperatures: of their confidences (engine.md 3.4)."""

    size: int
    temperatures: tuple[float, ...]


def plan_drafting(model: Model, runtime: RuntimeConfig) -> Drafting | None:
    """Returns how an engine drafts, None if it does not.

    Raises:
        ConfigError: `RuntimeConfig.drafting` is True for a model without draft stages, or their
            blocks are longer than what a cache can take back.
    """
    settings = model.config.draft
    has_stages = settings is not None and getattr(model.params, "draft", None) is not None
    if runtime.drafting and not has_stages:
        raise ConfigError(
            "RuntimeConfig.drafting=True needs draft stages, and this model has none: leave it at "
            'None, or train some with "deepinfer-jax train draft"'
        )
    if settings is None or not has_stages or runtime.drafting is False:
        return None
    size = settings.dspark_block_size
    if size >= ROLLBACK:
        raise ConfigError(
            f"a cache takes back at most {ROLLBACK - 1} drafts, the draft stages propose {size}: "
            "set RuntimeConfig.drafting=False"
        )
    temperatures = model.draft_temperatures or (1.0,) * size
    return Drafting(size=size, temperatures=temperatures)


def make_drafts(
    params: Params,
    config: ModelConfig,
    state: EngineState,
    parts: PlanParts,
    emitters: Emitters,
    emitted: Emitted,
    drafting: Drafting,
    makes_drafts: bool | None,
) -> EngineState:
    """Returns the state with new drafts of the emitters that go on, if the plan wants drafts.

    makes_drafts: of the plan's layout.
    """
    slots, slot = state.slots, emitters.slot
    assert slots.drafting is not None
    assert isinstance(state.cache, CacheState)
    cache = state.cache
    count = header_word(parts, "rounds") + header_word(parts, "ends")
    length, rules = cache.length[slot], slots.rules.take(slot)
    image, rule = config.image_token_id, slots.drafting.rule[slot]
    keeps_q = slots.drafting.log_q is not None
    is_static = ops_for(config.execution).static

    def choose(
        sequence: Int[Array, " t"], place: Int[Array, ""], scores: Float[Array, "t v"]
    ) -> tuple[Array, Array | None]:
        if is_static:
            return by_tiles(partial(choose_tile, place), sequence, scores)
        return choose_tile(place, sequence, scores)

    def choose_tile(
        place: Int[Array, ""], sequence: Int[Array, " t"], scores: Float[Array, "t v"]
    ) -> tuple[Array, Array | None]:
        if image is not None:
            scores = jnp.where(jnp.arange(scores.shape[1]) == image, -jnp.inf, scores)
        own = rules.take(sequence)
        log_q = logprobs_tile(scores, own, WIDE if is_static else NARROW)
        anchor = length[sequence]
        token = lax.cond(
            jnp.all(is_greedy(own.temperature)),
            lambda: jnp.argmax(log_q, axis=-1).astype(jnp.int32),
            lambda: draft_tokens(log_q, rule[sequence], own.key, anchor, anchor + 1 + place),
        )
        return token, log_q if keeps_q else None

    drafts = slots.drafting
    temperatures = jnp.asarray(drafting.temperatures, np.float32)

    def draft() -> Drafts:
        found = draft_blocks(
            params, config, cache, slots.last[slot], length - 1, slot, count, choose
        )
        confidence = calibrated_confidence(found.confidence_logit, temperatures)
        return found.token_ids, confidence, found.log_q

    def keep() -> Drafts:
        log_q = None if drafts.log_q is None else drafts.log_q[slot]
        return drafts.token[slot], drafts.confidence[slot], log_q

    wanted = header_word(parts, "drafting")
    made: Drafts
    if makes_drafts is None:
        made = lax.cond(wanted == MAKE_DRAFTS, draft, keep)
    else:
        made = draft() if makes_drafts else keep()
    token, confidence, log_q = made
    is_made = emitters.is_live & (emitted.code == RUNNING)
    where = jnp.where(is_made, slot, slots.last.shape[0])

    def put(leaf: Array, value: Array) -> Array:
        return leaf.at[where].set(value, mode="drop")

    drafts = replace(
        drafts,
        token=put(drafts.token, token),
        confidence=put(drafts.confidence, confidence),
        is_made=put(drafts.is_made, jnp.broadcast_to(wanted != NO_DRAFTS, where.shape)),
        log_q=None if log_q is None else put(drafts.log_q, log_q),
    )
    return replace(state, slots=replace(slots, drafting=drafts))


def force_drafts(
    state: EngineState, emitters: Emitters, emitted: Emitted, forced: Int[Array, "m n"]
) -> EngineState:
    """Returns the state with what grammars dictate in the place of drafts (io.md 2.7).

    Such drafts are accepted unless the sampler wants another spelling: the output skips ahead, and
    no token changes. Only for the rule "exact": the others must have drawn what they verify.

    Args:
        state: after `make_drafts`.
        emitters: of the step.
        emitted: their tokens.
        forced: by row that chooses a token, (n + 1) for each emitter: what follows it, -1 beyond.
    """
    drafts, slot = state.slots.drafting, emitters.slot
    assert drafts is not None
    last = jnp.arange(slot.shape[0]) * (forced.shape[1] + 1) + jnp.maximum(emitted.count - 1, 0)
    ids = forced[last]
    is_wanted = emitters.is_live & drafts.is_made[slot] & (drafts.rule[slot] == EXACT)
    is_forced = is_wanted[:, None] & (ids >= 0)
    where = jnp.where(is_wanted, slot, drafts.token.shape[0])
    token = jnp.where(is_forced, ids, drafts.token[slot])
    confidence = jnp.where(is_forced, np.float32(1), drafts.confidence[slot])
    drafts = replace(
        drafts,
        token=drafts.token.at[where].set(token, mode="drop"),
        confidence=drafts.confidence.at[where].set(confidence, mode="drop"),
    )
    return replace(state, slots=replace(state.slots, drafting=drafts))
