"""Which layer and which operation differ first: schedules run again with every layer observed."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.invariance.network import Lab, kept_rows, plan_of, walk
from deepinfer_jax.invariance.report import Difference
from deepinfer_jax.invariance.schedule import Call, Schedule
from deepinfer_jax.model.registry import AnyParams, AnyState
from deepinfer_jax.model.step import Plan, logits, plan_length, step

#: Observations of a layer in the order in which they are computed, and what each is.
OPS = {
    "x_in": "streams in (n-gram memory)",
    "attn_in": "attention input (mix, norm)",
    "compressed_rows": "compressed row",
    "index_keys": "index key",
    "topk": "selected indices",
    "attn_out": "attention output",
    "ffn_in": "MoE input (mix, norm)",
    "expert_ids": "chosen experts",
    "expert_weights": "routing weights",
    "ffn_out": "MoE output",
    "x_out": "streams out (mix)",
    "pre_out": "mix of the next layer",
}
#: Values after the layers.
LAST = ("final norm", "head")
#: (layer or None, op) -> position -> the bytes of the value there.
Seen = dict[tuple[int | None, str], dict[int, bytes]]


def observed_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the observations that a model's layers offer."""
    return tuple(name for name in OPS if name != "pre_out" or config.model_type != "deepseek_v4")


def digest(value: bytes) -> str:
    """Returns the first 16 hex digits of the SHA-256 of a value's bytes."""
    return hashlib.sha256(value).hexdigest()[:16]


def observe(lab: Lab, schedule: Schedule, length: int | None) -> Seen:
    """Returns every observation of the schedule's kept rows; a recomputed row is the newest.

    length: of the plans, None for the schedule's own.
    """
    config, seen = lab.config_of(schedule.replay), {}
    names = observed_names(config)
    for call, held in walk(lab, schedule):
        wanted, positions = kept_rows(call)
        # The first rows only, for the shape: all logits follow from the hidden rows.
        plan = plan_of(config, schedule, call, [], length)
        held.cache, hidden, layers, scores = _observed(
            lab.params, config, held.cache, plan, names=names
        )
        keep = [
            (row, place)
            for row, place in zip(wanted, positions, strict=True)
            if place >= schedule.floor
        ]
        collect(config, seen, layers, keep)
        for name, values in zip(LAST, (hidden, scores), strict=True):
            rows, found = np.asarray(values), seen.setdefault((None, name), {})
            found.update((place, rows[row].tobytes()) for row, place in keep)
    return seen


def collect(
    config: ModelConfig, seen: Seen, layers: Mapping[str, Any], keep: list[tuple[int, int]]
) -> None:
    """Adds the observations [layers, T, ...] of rows, given as (row, position), to `seen`.

    A compressed row is observed where its group closes: before, it holds what no row reads.
    """
    for name in observed_names(config):
        values = np.asarray(layers[name])
        for layer in range(values.shape[0]):
            ratio = 1
            if name in ("compressed_rows", "index_keys"):
                ratio = config.attention.compress_ratios[layer]
            if not ratio:
                continue
            found = seen.setdefault((layer, name), {})
            found.update(
                (place, values[layer, row].tobytes())
                for row, place in keep
                if (place + 1) % ratio == 0
            )


def first_difference(config: ModelConfig, found: Seen, lone: Seen) -> dict[str, Any]:
    """Returns layer, op, op_position and hashes of the first value that differs.

    First in the order of computation, over all positions: what it was computed from is equal.
    Empty if no observation differs.
    """
    order = [
        (layer, name)
        for layer in range(config.num_hidden_layers)
        for name in observed_names(config)
    ]
    for key in [*order, *((None, name) for name in LAST)]:
        one, other = found.get(key, {}), lone.get(key, {})
        wrong = [place for place in sorted(one) if place in other and one[place] != other[place]]
        if wrong:
            layer, name = key
            return {
                "layer": layer,
                "op": f"{name}: {OPS[name]}" if name in OPS else name,
                "op_position": wrong[0],
                "found": digest(one[wrong[0]]),
                "lone": digest(other[wrong[0]]),
            }
    return {}


def locate(
    lab: Lab,
    schedule: Schedule,
    *,
    run: int,
    position: int,
    found: np.ndarray,
    lone: np.ndarray,
    locates: bool = True,
) -> Difference:
    """Returns where a schedule first leaves the lone run; found, lone: the differing logits.

    locates: run both again to find layer and op.
    """
    where = _observed_difference(lab, schedule) if locates else {}
    note = ""
    if not where:
        where = {
            "op": "head",
            "op_position": position,
            "found": digest(found.tobytes()),
            "lone": digest(lone.tobytes()),
        }
        if locates:
            note = "observed layer by layer, all values are equal: the compiled programs differ"
    return Difference(run=run, detail=schedule.detail, position=position, note=note, **where)


def _observed_difference(lab: Lab, schedule: Schedule) -> dict[str, Any]:
    alone = lab.lone_schedule(schedule.ids, schedule.replay, schedule.floor)
    length = None
    if lab.config.execution.determinism == "batch" and schedule.shape == lab.shape:
        # Shorter plans than the case's own have the same bits and copy less.
        calls = [one for one in (*schedule.actions, *alone.actions) if isinstance(one, Call)]
        most = max(sum(len(part.ids) for part in call.parts) for call in calls)
        length = plan_length(most, lab.tile)
    return first_difference(lab.config, observe(lab, schedule, length), observe(lab, alone, length))


@partial(jax.jit, static_argnames=("config", "names"), donate_argnames="state")
def _observed(
    params: AnyParams, config: ModelConfig, state: AnyState, plan: Plan, *, names: tuple[str, ...]
) -> tuple[AnyState, Array, dict[str, Array], Array]:
    """Returns (state, hidden rows, observations, logits of all rows)."""
    drafting = config.draft is not None
    state, hidden, seen = step(params, config, state, plan, drafting=drafting, collect=names)
    return state, hidden, seen, logits(params, config, hidden)
