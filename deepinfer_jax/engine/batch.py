"""A static batch: prompts that start together and decode one token each per step."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.cached import cache_layout, make_plan, prefill
from deepinfer_jax.model.registry import AnyParams, AnyState, empty_cache
from deepinfer_jax.model.step import plan_length
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import row_params
from deepinfer_jax.sampling.sample import Sampled, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSequence:
    """One sequence of a batch: prompt ids, sampling rules, the seed in use."""

    ids: list[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What the sampler said about one sequence; `token` is negative where `status` is not OK.

    logprob and alternatives are None unless some sequence of the batch asked for them.
    """

    token: int
    status: int
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of one step on the host; `last` marks rows after which a token is chosen."""

    ids: list[int]
    position: list[int]
    slot: list[int]
    last: list[int]


Step = list[tuple[int, Emitted]]  # sequence number and what it got


def run_batch(
    params: AnyParams,
    config: ModelConfig,
    runtime: RuntimeConfig,
    sequences: Sequence[BatchSequence],
    room: int,
) -> Generator[Step, list[int] | None, None]:
    """Yields, step by step, the next tokens of the sequences that are still running.

    The caller answers each yield with `send(finished)`: sequences that need no more tokens.
    Every prompt has at least one id; `room` is the number of tokens after the longest prompt.
    """
    prompts = [sequence.ids for sequence in sequences]
    state = _new_state(config, runtime, len(prompts), max(map(len, prompts)) + room, params)
    slots = state.length.shape[0]
    rules = row_params([s.params for s in sequences], [s.seed for s in sequences], size=slots)
    asked = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
    alternatives = max(asked, default=None)

    def advance(rows: _Rows) -> Step:
        nonlocal state
        # Powers of two again: plan lengths, and as many logit rows as there are slots.
        length = _power_of_two(plan_length(len(rows.ids), config.execution.row_tile))
        wanted = np.pad(np.asarray(rows.last, np.int32), (0, slots - len(rows.last)))
        owners = [rows.slot[row] - 1 for row in rows.last]
        plan = make_plan(config, rows.ids, rows.position, rows.slot, length=length, rows=wanted)
        state, out = prefill(params, config, state, plan)
        if not owners:
            return []
        place = np.pad(np.asarray(owners, np.int32), (0, slots - len(owners)))
        # The index of the chosen token: one after the row that predicts it.
        index = np.asarray(rows.position, np.int32)[wanted] + 1
        found = sample(out.logits, rules.take(place), index, logprobs=alternatives)
        return list(zip(owners, _emitted(found, len(owners)), strict=True))

    newest: dict[int, tuple[int, int]] = {}  # sequence -> its newest token and its position
    for rows in _prefill(prompts, runtime.max_tokens_per_step):
        step = advance(rows)
        finished = (yield step) or [] if step else []
        for owner, emitted in step:
            if owner not in finished:
                newest[owner] = emitted.token, len(prompts[owner])
    while newest:
        order = sorted(newest)
        step = advance(
            _Rows(
                ids=[newest[s][0] for s in order],
                position=[newest[s][1] for s in order],
                slot=[s + 1 for s in order],
                last=list(range(len(order))),
            )
        )
        finished = (yield step) or []
        for owner, emitted in step:
            newest[owner] = emitted.token, newest[owner][1] + 1
        for owner in finished:
            del newest[owner]


def _emitted(found: Sampled, count: int) -> Iterator[Emitted]:
    """Yields the first `count` rows; one transfer from the device."""
    host = jax.device_get(found)
    for row in range(count):
        token, status = int(host.token[row]), int(host.status[row])
        if host.logprobs is None:
            yield Emitted(token=token, status=status)
            continue
        yield Emitted(
            token=token,
            status=status,
            logprob=float(host.logprobs.logprob[row]),
            top_ids=tuple(host.logprobs.top_ids[row].tolist()),
            top_logprobs=tuple(host.logprobs.top_logprobs[row].tolist()),
        )


def _prefill(prompts: list[list[int]], budget: int) -> Iterator[_Rows]:
    """Yields the prompts' rows in order, at most `budget` rows at a time."""
    rows = [
        (token, position, number + 1, position == len(prompt) - 1)
        for number, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for start in range(0, len(rows), budget):
        part = rows[start : start + budget]
        ids, position, slot, is_last = (list(column) for column in zip(*part, strict=True))
        last = [row for row, ends in enumerate(is_last) if ends]
        yield _Rows(ids=ids, position=position, slot=slot, last=last)


def _new_state(
    config: ModelConfig, runtime: RuntimeConfig, sequences: int, longest: int, params: AnyParams
) -> AnyState:
    """Returns a cache for one batch; sizes are powers of two, so that few programs serve all."""
    slots = _power_of_two(sequences + 1)
    pages = _power_of_two(-(-longest // runtime.block_tokens))
    layout = cache_layout(config, runtime, slots, pages * runtime.block_tokens)
    # Where the parameters are: a state that moves after its first step would compile twice.
    return jax.device_put(empty_cache(config, layout), params.embed.sharding)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
