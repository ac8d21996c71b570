"""Greedy drafting and exact verification with the pure cached functions, rounds recorded.

The smallest host loop that speculates: it verifies all drafts of every round, so its records are
what temperatures are fitted on (engine.md 3.4). The tokens are those of plain greedy decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.cached import cache_layout, make_plan, prefill, verify
from deepinfer_jax.model.draft import DraftOutput, draft_blocks, draft_params, draft_settings
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.registry import AnyState, empty_cache
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.step import plan_length

_PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRounds:
    """Completions of all prompts, and one record per round.

    token_ids: per prompt, without the end token. sequence [n]: the prompt of each round.
    confidence_logit [n, k] float32. accepted [n]: leading drafts that the target agreed with.
    observed [n]: positions that count; those after an accepted end token do not.
    """

    token_ids: tuple[tuple[int, ...], ...]
    sequence: np.ndarray
    confidence_logit: np.ndarray
    accepted: np.ndarray
    observed: np.ndarray


@dataclass(slots=True)
class _Running:
    """One sequence in a slot; the last of `ids` is its anchor, in no cache yet."""

    number: int
    slot: int
    ids: list[int]
    start: int  # length of the prompt
    is_done: bool = False


@dataclass(slots=True)
class _Records:
    sequence: list[int] = field(default_factory=list)
    confidence_logit: list[np.ndarray] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)


def greedy_rounds(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    slots: int = 16,
    report: Callable[[int], None] | None = None,
) -> GreedyRounds:
    """Completes prompts at temperature 0 by drafting, several at a time.

    Args:
        params: Parameters with draft stages.
        config: Their config.
        prompts: Token ids of each prompt.
        max_tokens: Longest completion; the end token stops one earlier.
        slots: Sequences that run together.
        report: Called with the number of rounds so far, after every step.

    Raises:
        InputError: The model has no draft stages, a prompt is empty, or one is too long.
    """
    size = draft_settings(config).dspark_block_size
    draft_params(params)
    longest = max((len(prompt) for prompt in prompts), default=0) + max_tokens + size
    if longest > config.max_position_embeddings or not all(len(prompt) for prompt in prompts):
        raise InputError(
            "prompts must have at least one id and leave room for max_tokens and one block within "
            f"max_position_embeddings={config.max_position_embeddings}; the longest needs {longest}"
        )
    # A power of two, so that few programs serve all prompts.
    runtime = RuntimeConfig(
        max_seqs=slots, max_tokens_per_step=_PREFILL_ROWS, max_len=1 << (longest - 1).bit_length()
    )
    layout = cache_layout(config, runtime, slots + 1, runtime.longest(config))
    layout = replace(layout, rollback=max(layout.rollback, size + 1))
    state = empty_cache(config, layout)
    waiting = list(enumerate(prompts))[::-1]
    free, running = list(range(slots, 0, -1)), []
    records, done = _Records(), {}
    while waiting or running:
        fresh = []
        while waiting and free:
            number, prompt = waiting.pop()
            fresh.append(_Running(number, free.pop(), list(prompt), len(prompt)))
        if fresh:
            state = _begin(params, config, state, fresh, slots)
            running += fresh
        else:
            state = _round(params, config, state, running, slots, records)
        for sequence in running:
            _finish(sequence, config.eos_token_id, max_tokens)
            if sequence.is_done:
                done[sequence.number] = tuple(sequence.ids[sequence.start :])
                free.append(sequence.slot)
        running = [sequence for sequence in running if not sequence.is_done]
        if report is not None:
            report(len(records.accepted))
    return GreedyRounds(
        token_ids=tuple(done[number] for number in range(len(prompts))),
        sequence=np.asarray(records.sequence, np.int64),
        confidence_logit=np.asarray(records.confidence_logit, np.float32).reshape(-1, size),
        accepted=np.asarray(records.accepted, np.int64),
        observed=np.asarray(records.observed, np.int64),
    )


def _begin(
    params: Params, config: ModelConfig, state: AnyState, fresh: list[_Running], slots: int
) -> AnyState:
    """Processes prompts and appends the first token of each."""
    rows = [
        (token, position, sequence.slot, number if position == sequence.start - 1 else -1)
        for number, sequence in enumerate(fresh)
        for position, token in enumerate(sequence.ids)
    ]
    for first in range(0, len(rows), _PREFILL_ROWS):
        ids, position, slot, owner = zip(*rows[first : first + _PREFILL_ROWS], strict=True)
        ends = [row for row, number in enumerate(owner) if number >= 0]
        wanted = np.pad(np.asarray(ends, np.int32), (0, slots - len(ends)))
        plan = make_plan(
            config, list(ids), list(position), list(slot), length=_PREFILL_ROWS, rows=wanted
        )
        state, out = prefill(params, config, state, plan)
        tokens = np.asarray(jnp.argmax(out.logits, axis=-1))
        for row, token in zip(ends, tokens, strict=False):
            fresh[owner[row]].ids.append(int(token))
    return state


def _round(
    params: Params,
    config: ModelConfig,
    state: AnyState,
    running: list[_Running],
    slots: int,
    records: _Records,
) -> AnyState:
    """Drafts, verifies and appends the accepted tokens and one more to every sequence."""
    size = draft_settings(config).dspark_block_size
    count = len(running)
    anchor, last, slot = (
        np.pad(np.asarray(values, np.int32), (0, slots - count))
        for values in (
            [sequence.ids[-1] for sequence in running],
            [len(sequence.ids) - 2 for sequence in running],
            [sequence.slot for sequence in running],
        )
    )
    found = draft_round(params, config, state, anchor, last, slot, np.int32(count))
    drafts, logits = jax.device_get((found.token_ids, found.confidence_logit))
    offset = np.arange(size + 1)
    plan = make_plan(
        config,
        np.concatenate([anchor[:count, None], drafts[:count]], axis=1).reshape(-1),
        (last[:count, None] + 1 + offset).reshape(-1),
        np.repeat(slot[:count], size + 1),
        length=plan_length(slots * (size + 1), config.execution.row_step),
    )
    state, out = verify(params, config, state, plan)
    chosen = np.asarray(jnp.argmax(out.logits, axis=-1))[: count * (size + 1)]
    chosen = chosen.reshape(count, size + 1)
    agrees = np.cumprod(drafts[:count] == chosen[:, :size], axis=1)
    for row, sequence in enumerate(running):
        accepted = int(agrees[row].sum())
        ends = np.flatnonzero(drafts[row, :accepted] == config.eos_token_id)
        records.sequence.append(sequence.number)
        records.confidence_logit.append(logits[row])
        records.accepted.append(accepted)
        records.observed.append(int(ends[0]) + 1 if ends.size else size)
        sequence.ids += chosen[row, : accepted + 1].tolist()
    return state


def _finish(sequence: _Running, eos: int, max_tokens: int) -> None:
    """Cuts a sequence at its end token or at its longest length, and marks it if it has ended."""
    completion = sequence.ids[sequence.start :]
    if eos in completion:
        completion, sequence.is_done = completion[: completion.index(eos)], True
    if len(completion) >= max_tokens:
        completion, sequence.is_done = completion[:max_tokens], True
    sequence.ids[sequence.start :] = completion


@partial(jax.jit, static_argnames=("config",))
def draft_round(
    params: Params,
    config: ModelConfig,
    state: CacheState,
    anchor: Int[Array, " s"],
    last: Int[Array, " s"],
    slot: Int[Array, " s"],
    count: Int[Array, ""],
) -> DraftOutput:
    """Returns the greedy drafts of the first `count` sequences; the others are padding.

    Args:
        params: Parameters with draft stages.
        config: Their config.
        state: The cache; it is only read.
        anchor: Newest token of each sequence, in no cache yet.
        last: Newest processed position of each sequence.
        slot: Where each sequence is cached.
        count: Real sequences.
    """
    return draft_blocks(params, config, state, anchor, last, slot, count)
