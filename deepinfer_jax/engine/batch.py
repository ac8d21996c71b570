"""A static batch: prompts that start together and decode one token each per step."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.state import CacheLayout, CacheState, init_cache
from deepinfer_jax.model.step import Plan, logits, plan_length, step

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
        state, tokens = _advance(
            params, config, state, _plan(config, rows), _padded(rows.last, slots)
        )
        owners = [rows.slot[row] - 1 for row in rows.last]
        return owners, [int(t) for t in np.asarray(tokens)[: len(rows.last)]]

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
    """Returns a cache with every sequence's pages assigned; sizes are powers of two."""
    slots = _power_of_two(sequences + 1)
    pages = _power_of_two(-(-longest // runtime.block_tokens))
    tile = config.execution.row_tile
    stock_rows = plan_length(_power_of_two(runtime.max_tokens_per_step), tile)
    layout = CacheLayout(
        num_slots=slots,
        num_blocks=1 + (slots - 1) * pages,
        max_blocks=pages,
        block_tokens=runtime.block_tokens,
        # Without row tiles a step writes all of its rows before it reads any.
        row_tile=tile if config.execution.determinism == "batch" else stock_rows,
    )
    state = init_cache(config, layout)
    table = np.zeros(state.block_table.shape, np.int32)
    table[1:] = np.arange(1, layout.num_blocks, dtype=np.int32).reshape(slots - 1, pages)
    # Where the parameters are: a state that moves after its first step would compile twice.
    return jax.device_put(replace(state, block_table=jnp.asarray(table)), place)


def _plan(config: ModelConfig, rows: Rows) -> Plan:
    """Returns the device plan; its length is a power of two, so that few programs serve all."""
    count = len(rows.ids)
    length = _power_of_two(plan_length(count, config.execution.row_tile))
    return Plan(
        ids=_padded(rows.ids, length),
        position=_padded(rows.position, length),
        slot=_padded(rows.slot, length),
        count=jnp.int32(count),
    )


def _padded(values: list[int], length: int) -> Array:
    return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, length - len(values))))


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def _advance(
    params: "Params", config: ModelConfig, state: CacheState, plan: Plan, rows: Array
) -> tuple[CacheState, Array]:
    """Runs a plan; returns the greedy token after each of `rows`, lowest id among equal maxima."""
    state, hidden, _ = step(params, config, state, plan)
    scores = logits(params, config, hidden[rows])
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return state, jnp.where(jnp.isnan(scores).any(axis=-1), NOT_A_TOKEN, tokens)
