"""A static batch: prompts that start together and decode one token each per step."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.cached import assign_pages, cache_layout, make_plan, prefill
from deepinfer_jax.model.state import CacheState, init_cache
from deepinfer_jax.model.step import plan_length

if TYPE_CHECKING:
    from deepinfer_jax.model.params import Params

NOT_A_TOKEN = -1  # reported for a row whose logits hold NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one step on the host: ids, positions, slots; `last` marks rows that need a token."""

    ids: list[int]
    position: list[int]
    slot: list[int]
    last: list[int]


def greedy_tokens(
    params: "Params",
    config: ModelConfig,
    runtime: RuntimeConfig,
    prompts: list[list[int]],
    room: int,
) -> Generator[tuple[list[int], list[int]], list[int] | None, None]:
    """Yields, step by step, (sequence numbers, their next greedy tokens).

    The caller answers each yield with `send(finished)`: the sequence numbers that need no more
    tokens. Every prompt has at least one id; `room` is the number of tokens after the longest
    prompt.
    """
    longest = max(map(len, prompts)) + room
    state = _new_state(config, runtime, len(prompts), longest, params.embed.sharding)
    slots = state.length.shape[0]
    running: dict[int, int] = {}  # sequence -> position of its newest token
    newest: dict[int, int] = {}

    def advance(rows: Rows) -> tuple[list[int], list[int]]:
        nonlocal state
        # Powers of two again: plan lengths, and as many logit rows as there are slots.
        length = _power_of_two(plan_length(len(rows.ids), config.execution.row_tile))
        wanted = np.pad(np.asarray(rows.last, np.int32), (0, slots - len(rows.last)))
        plan = make_plan(config, rows.ids, rows.position, rows.slot, length=length, rows=wanted)
        state, out = prefill(params, config, state, plan)
        tokens = np.asarray(_greedy(out.logits))[: len(rows.last)]
        return [rows.slot[row] - 1 for row in rows.last], tokens.tolist()

    for rows in _prefill(prompts, runtime.max_tokens_per_step):
        owners, tokens = advance(rows)
        if owners:
            finished = (yield owners, tokens) or []
            for owner, token in zip(owners, tokens, strict=True):
                if owner not in finished:
                    running[owner], newest[owner] = len(prompts[owner]), token
    while running:
        order = sorted(running)
        rows = Rows(
            ids=[newest[s] for s in order],
            position=[running[s] for s in order],
            slot=[s + 1 for s in order],
            last=list(range(len(order))),
        )
        owners, tokens = advance(rows)
        finished = (yield owners, tokens) or []
        for owner, token in zip(owners, tokens, strict=True):
            running[owner] += 1
            newest[owner] = token
        for owner in finished:
            running.pop(owner, None)


def _prefill(prompts: list[list[int]], budget: int) -> Iterator[Rows]:
    """Yields the prompts' rows in order, at most `budget` rows at a time."""
    rows = [
        (token, position, number + 1, position == len(prompt) - 1)
        for number, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for start in range(0, len(rows), budget):
        part = rows[start : start + budget]
        ids, position, slot, is_last = (list(column) for column in zip(*part, strict=True))
        yield Rows(
            ids=ids,
            position=position,
            slot=slot,
            last=[row for row, last in enumerate(is_last) if last],
        )


def _new_state(
    config: ModelConfig,
    runtime: RuntimeConfig,
    sequences: int,
    longest: int,
    place: jax.sharding.Sharding,
) -> CacheState:
    """Returns a cache for one batch; sizes are powers of two, so that few programs serve all."""
    slots = _power_of_two(sequences + 1)
    pages = _power_of_two(-(-longest // runtime.block_tokens))
    layout = cache_layout(config, runtime, slots, pages * runtime.block_tokens)
    # Where the parameters are: a state that moves after its first step would compile twice.
    return jax.device_put(assign_pages(init_cache(config, layout)), place)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@jax.jit
def _greedy(scores: Array) -> Array:
    """Returns the id of every row's highest logit, the lowest among equals; -1 if it has a NaN."""
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.isnan(scores).any(axis=-1), NOT_A_TOKEN, tokens)
