"""Looks into a running engine: drafts put in by hand, and every layer of one request observed.

Both wrap the engine's dispatch, because neither the host nor a request sees what they need.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.layout import PlanLayout, unpack
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.program import _prepare
from deepinfer_jax.engine.rows import step_rows
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import EngineState, SlotState
from deepinfer_jax.grammar.masks import MaskRows
from deepinfer_jax.invariance.observe import LAST, Seen, collect, observed_names
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.step import logits, step

Fill = Callable[[], MaskRows]


def force_drafts(engine: Engine, guesses: Mapping[Sequence, Items[int]]) -> None:
    """Puts given tokens in the place of the engine's own drafts, in every round to come.

    They are written on the device before each step: how far the output has come is not known to
    the host. guesses: of the output of every sequence; one that is absent gets zeros.
    """
    device, width = engine._device, 1 << engine.max_len.bit_length()
    dispatch = device.dispatch

    def forced(plan: StepPlan, now: float = 0.0, fill: Fill | None = None) -> Any:
        table = np.zeros((engine.runtime.max_seqs + 1, width), np.int32)
        for sequence in engine.scheduler.active:
            guess = guesses.get(sequence, ())[:width]
            table[sequence.slot, : len(guess)] = guess
        with jax.transfer_guard("allow"):
            slots = _write_drafts(device._state.slots, jax.device_put(table, device._place))
            device._state = replace(device._state, slots=slots)
        return dispatch(plan, now, fill)

    device.dispatch = forced


@jax.jit
def _write_drafts(slots: SlotState, table: Leaf) -> SlotState:
    if slots.drafting is None:
        return slots
    place = slots.produced[:, None] + jnp.arange(slots.drafting.token.shape[1])
    token = jnp.take_along_axis(table, jnp.minimum(place, table.shape[1] - 1), axis=1)
    return replace(slots, drafting=replace(slots.drafting, token=token))


def watch(engine: Engine, sequence: Sequence) -> Seen:
    """Returns the observations of a sequence, filled by every step to come.

    A position that is computed again, after a rejected draft or a preemption, keeps the newest.
    """
    device, seen = engine._device, {}
    dispatch, names = device.dispatch, observed_names(engine.config)

    def watched(plan: StepPlan, now: float = 0.0, fill: Fill | None = None) -> Any:
        for action, arguments in plan.before:
            getattr(device, action)(*arguments)
        plan.before = []
        with jax.transfer_guard("allow"):
            vector = jax.device_put(plan.vector, device._place)
            valid, slot, position, layers, last = jax.device_get(
                _observed_step(
                    device.params,
                    device._state,
                    vector,
                    config=engine.config,
                    layout=plan.layout,
                    names=names,
                )
            )
        if sequence in engine.scheduler.active:
            rows = np.flatnonzero(valid & (slot == sequence.slot))
            keep = [(int(row), int(position[row])) for row in rows]
            collect(engine.config, seen, layers, keep)
            for name, values in zip(LAST, last, strict=True):
                found = seen.setdefault((None, name), {})
                found.update((place, values[row].tobytes()) for row, place in keep)
        return dispatch(plan, now, fill)

    device.dispatch = watched
    return seen


@partial(jax.jit, static_argnames=("config", "layout", "names"))
def _observed_step(
    params: AnyParams,
    state: EngineState,
    vector: Array,
    *,
    config: ModelConfig,
    layout: PlanLayout,
    names: tuple[str, ...],
) -> tuple[Array, Array, Array, dict[str, Array], tuple[Array, Array]]:
    """Returns (which rows are real, their slots and positions, observations, values after them)."""
    parts = unpack(layout, vector)
    state = _prepare(params, config, state, parts)
    plan, _ = step_rows(layout, parts, state.slots, state.cache.length)
    drafting = config.draft is not None
    _, hidden, seen = step(params, config, state.cache, plan, drafting=drafting, collect=names)
    valid = plan.valid & (jnp.arange(layout.rows) < plan.count)
    return valid, plan.slot, plan.position, seen, (hidden, logits(params, config, hidden))
