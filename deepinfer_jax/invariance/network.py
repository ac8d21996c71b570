"""Runs schedules on the pure cached functions, and the lone run they are compared with."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.cache.hit import HitRule, first_decoder_row, hit_rule
from deepinfer_jax.config.model import ModelConfig, Replay
from deepinfer_jax.config.roles import source_ratios
from deepinfer_jax.config.runtime import ROLLBACK, RuntimeConfig
from deepinfer_jax.invariance.fingerprint import Fingerprint, fingerprint
from deepinfer_jax.invariance.schedule import (
    Action,
    Call,
    Ids,
    Open,
    Part,
    Restore,
    Save,
    Schedule,
    Shape,
    Share,
)
from deepinfer_jax.loading import Model
from deepinfer_jax.model import cached, slots
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.registry import AnyParams, AnyState, empty_cache
from deepinfer_jax.model.step import Plan, logits, plan_length

SLOTS = 6
LOGIT_ROWS = 32  # of a plan; further rows go through the head afterwards
FEW = 8  # rows by which cases measure: a CPU's tile; those of a GPU are too tall
LONGEST = 1024  # tokens that a case may need; longer halos are skipped
GARBAGE = 77  # in integers of a poisoned cache
Compared = list[tuple[int, np.ndarray]]  # (position, float32 [v])


def bits(values: Any) -> np.ndarray:
    """Returns float32 values as uint32 bit patterns."""
    values = np.ascontiguousarray(values)
    if values.dtype != np.float32:
        raise TypeError(f"bits are compared of float32 values, got {values.dtype}")
    return values.view(np.uint32)


class Lab:
    """A model, sizes that exercise its mechanisms, sequences to run, and lone runs, kept."""

    def __init__(self, model: Model, runtime: RuntimeConfig, seed: int) -> None:
        """Draws the sequences; compiles and runs nothing."""
        self.model, self.params, self.runtime = model, model.params, runtime
        config = self.config = model.config
        self.tile, self.window = config.execution.row_step, config.attention.sliding_window
        self.few = min(self.tile, FEW)
        blocks = [16, *source_ratios(config)]
        given = runtime.block_tokens != RuntimeConfig().block_tokens
        self.block = runtime.block_tokens if given else math.lcm(*blocks)
        limit = min(config.max_position_embeddings, LONGEST)
        topk = config.indexer.index_topk if config.indexer else 0
        wanted = max(96, topk + self.window + 44, 2 * self.block + self.few + 4)
        self.length = min(wanted, limit)
        halo = self.rule("off", "halo").recomputed_rows
        self.halo_length = (halo // self.block + 2) * self.block + self.few + 3
        self.has_halo = self.halo_length <= limit
        longest = max(self.length, self.halo_length if self.has_halo else 0)
        rows = plan_length(longest, self.tile)
        self.shape = Shape(rows=rows, slots=SLOTS, tokens=longest, block_tokens=self.block)
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.sequences = [self.text(self.length) for _ in range(4)]
        self.sequences.append((self.text(7) * self.length)[: self.length])
        self._lone: dict[tuple[Ids, Replay, int], np.ndarray] = {}
        self._garbage: dict[tuple[ModelConfig, Shape], Any] = {}

    def rule(self, replay: Replay, restore: str = "checkpoint") -> HitRule:
        """Returns how hits work for blocks of this lab."""
        keep = max(self.window + ROLLBACK, min(self.runtime.replay_keep_tokens, 2 * self.window))
        return hit_rule(
            self.config,
            block_tokens=self.block,
            replay=replay,
            keep_tokens=keep,
            restore=restore,  # pyright: ignore[reportArgumentType]
            rollback=ROLLBACK,
        )

    def floor(self, ids: Ids, replay: Replay) -> int:
        """Returns the first decoder row of a prompt."""
        return first_decoder_row(self.rule(replay), len(ids), len(ids))

    def text(self, count: int) -> Ids:
        """Returns random token ids."""
        legal = np.arange(self.config.vocab_size)
        legal = legal[(legal > 2) & (legal != (self.config.image_token_id or 0))]
        return tuple(self.rng.choice(legal, count).tolist())

    def wrong(self, ids: Ids) -> Ids:
        """Returns a token for each position that is not the sequence's own."""
        other = [3 if token != 3 else 4 for token in ids]
        return tuple(other)

    def config_of(self, replay: Replay) -> ModelConfig:
        """Returns the config with a replay mode."""
        return replace(self.config, execution=replace(self.config.execution, replay=replay))

    def schedule(self, ids: Ids, actions: list[Action], detail: str, **options: Any) -> Schedule:
        """Returns a schedule on the lab's own cache."""
        return Schedule(
            ids=ids,
            actions=tuple(actions),
            detail=detail,
            **{"shape": self.shape, **options},
        )

    def lone_schedule(self, ids: Ids, replay: Replay = "off", floor: int = 0) -> Schedule:
        """Returns the lone run: one call, slot 1 of a clean cache, nobody else."""
        actions = [Open(1, ids, floor=floor), Call((Part(1, 0, ids, len(ids)),))]
        return self.schedule(ids, actions, "alone", poisoned=False, replay=replay, floor=floor)

    def lone(self, ids: Ids, replay: Replay = "off", floor: int = 0) -> np.ndarray:
        """Returns the lone run's logits, float32 [len(ids), v]."""
        key = (ids, replay, floor)
        if key not in self._lone:
            found = execute(self, self.lone_schedule(ids, replay, floor))
            self._lone[key] = np.stack([row for _, row in found])
        return self._lone[key]

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Returns the fingerprints of this lab's sequences whose lone runs are kept."""
        kept = ((ids, self._lone.get((ids, "off", 0))) for ids in self.sequences)
        return tuple(fingerprint(ids, rows) for ids, rows in kept if rows is not None)

    def fresh(self, schedule: Schedule) -> AnyState:
        """Returns the cache in which a schedule starts, where the parameters are."""
        config, shape = self.config_of(schedule.replay), schedule.shape
        key = (config, shape)
        if key not in self._garbage:
            runtime = RuntimeConfig(
                max_seqs=shape.slots,
                max_tokens_per_step=shape.rows,
                block_tokens=shape.block_tokens,
            )
            layout = cached.cache_layout(config, runtime, shape.slots + 1, shape.tokens)
            clean = jax.tree.map(np.asarray, empty_cache(config, layout))
            dirty = replace(jax.tree.map(_garbage, clean), block_table=clean.block_table)
            self._garbage[key] = (clean, dirty)
        chosen = self._garbage[key][1 if schedule.poisoned else 0]
        # Copied: the programs consume what they are given. A state from elsewhere compiles again.
        return jax.device_put(jax.tree.map(np.copy, chosen), self.params.embed.sharding)


def _garbage(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype == np.uint8:
        return np.full_like(leaf, 0xFF)
    return np.full_like(leaf, np.nan if leaf.dtype == np.float32 else GARBAGE)


def execute(lab: Lab, schedule: Schedule) -> Compared:
    """Returns the logits of every kept row, in the order in which they were computed."""
    config, found = lab.config_of(schedule.replay), []
    for call, held in walk(lab, schedule):
        wanted, positions = kept_rows(call)
        plan = plan_of(config, schedule, call, wanted[:LOGIT_ROWS])
        held.cache, out = cached.prefill(lab.params, config, held.cache, plan)
        rows = np.asarray(out.logits)[: len(wanted)]
        for start in range(LOGIT_ROWS, len(wanted), LOGIT_ROWS):
            more = _padded(wanted[start : start + LOGIT_ROWS])
            count = min(LOGIT_ROWS, len(wanted) - start)
            rows = np.concatenate([rows, _head(lab.params, config, out.hidden, more)[:count]])
        found += [
            (position, row)
            for position, row in zip(positions, rows, strict=True)
            if position >= schedule.floor
        ]
    return found


class Held:
    """The cache between the calls of a schedule; a call's program replaces it."""

    def __init__(self, cache: AnyState) -> None:
        """Holds a state."""
        self.cache = cache


def walk(lab: Lab, schedule: Schedule) -> Iterator[tuple[Call, Held]]:
    """Yields every call with the cache it runs on; does what lies between the calls."""
    config, held, saved = lab.config_of(schedule.replay), Held(lab.fresh(schedule)), {}
    for action in schedule.actions:
        cache = held.cache
        if isinstance(action, Call):
            yield action, held
        elif isinstance(action, Save):
            taken = slots.take_checkpoint(config, cache, action.slot, action.length)
            saved[action.length] = jax.tree.map(np.asarray, taken)
        elif isinstance(action, Restore):
            leaves = jax.tree.map(jnp.asarray, saved[action.length])
            held.cache = slots.put_checkpoint(config, cache, action.slot, action.length, leaves)
        elif isinstance(action, Share):
            # On the host: as operations of a GPU every count would be compiled.
            table, count = np.array(cache.block_table), action.blocks
            table[action.target, :count] = table[action.source, :count]
            place = lab.params.embed.sharding
            held.cache = replace(cache, block_table=jax.device_put(table, place))
        else:
            held.cache = _open(lab.params, config, cache, *_open_words(config, action))


def kept_rows(call: Call) -> tuple[list[int], list[int]]:
    """Returns the rows whose logits are compared, and their positions."""
    places = [
        (row, part.start + offset)
        for row, (part, offset) in enumerate(_rows(call))
        if part.skipped <= offset < part.skipped + part.kept
    ]
    return [row for row, _ in places], [position for _, position in places]


def plan_of(
    config: ModelConfig,
    schedule: Schedule,
    call: Call,
    wanted: list[int],
    length: int | None = None,
) -> Plan:
    """Returns the plan of a call: all of one length if tiles are loops, else of a power of four."""
    rows, tile = _rows(call), config.execution.row_step
    if length is None:
        length = schedule.shape.rows
        if not config.execution.is_tiled:
            size = plan_length(1, tile)
            while size < len(rows):
                size *= 4
            length = min(size, length)
    return cached.make_plan(
        config,
        [part.ids[offset] for part, offset in rows],
        [part.start + offset for part, offset in rows],
        [part.slot for part, _ in rows],
        length=length,
        rows=_padded(wanted),
    )


def _rows(call: Call) -> list[tuple[Part, int]]:
    """Returns the part of every row and the row's number in it."""
    order = call.order
    if order is None:
        order = [place for place, part in enumerate(call.parts) for _ in part.ids]
    done, rows = [0] * len(call.parts), []
    for place in order:
        rows.append((call.parts[place], done[place]))
        done[place] += 1
    return rows


def _padded(rows: list[int]) -> np.ndarray:
    return np.pad(np.asarray(rows, np.int32), (0, LOGIT_ROWS - len(rows)))


@partial(jax.jit, static_argnames="config")
def _head(params: AnyParams, config: ModelConfig, hidden: Array, rows: Leaf) -> Array:
    return logits(params, config, hidden[rows])


def _open_words(config: ModelConfig, action: Open) -> tuple[np.ndarray, np.ndarray]:
    count = slots.look_back(config)
    before = np.maximum(action.first - count + np.arange(count), 0)
    words = np.asarray([[action.slot], [action.length], [action.first], [action.floor]], np.int32)
    return words, np.asarray(action.ids, np.int32)[before][None]


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _open(
    params: AnyParams, config: ModelConfig, state: AnyState, words: Leaf, before: Leaf
) -> AnyState:
    slot, length, first, floor = words
    return slots.open_slots(
        params,
        config,
        state,
        slot,
        length=length,
        first=first,
        floor=floor,
        ids_before=before,
    )
