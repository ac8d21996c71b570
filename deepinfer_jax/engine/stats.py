"""Counters and gauges of an engine, and their Prometheus text."""

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.cache.block_cache import CacheStats
from deepinfer_jax.engine.constraints import GrammarStats
from deepinfer_jax.engine.expert_load import ExpertStats
from deepinfer_jax.engine.results import RoundResults
from deepinfer_jax.engine.scheduler import Scheduler

#: First drafts that are verified before their rejection is worth a warning.
_ENOUGH = 1000


class DraftCounts:
    """Drafts verified and accepted, by position in the round; those behind a stop do not count."""

    def __init__(self, size: int) -> None:
        """Starts at zero; size: drafts of a round."""
        self.rounds = 0
        self.verified = np.zeros(size, np.int64)
        self.accepted = np.zeros(size, np.int64)
        self._is_told = False

    def add(self, rounds: RoundResults, count: int) -> None:
        """Counts the first `count` results; warns once if no draft is ever accepted."""
        self.rounds += count - rounds.count[:count].count(0)
        if not len(self.verified):
            return
        place = np.arange(1, len(self.verified) + 1)[:, None]
        columns = (rounds.count, rounds.verified, rounds.accepted)
        emitted, verified, accepted = np.asarray([column[:count] for column in columns], np.int64)
        self.verified += (np.minimum(verified, emitted) >= place).sum(axis=1)
        self.accepted += (np.minimum(accepted, emitted) >= place).sum(axis=1)
        if self.verified[0] >= _ENOUGH and not self.accepted[0] and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"none of {self.verified[0]} first drafts was accepted: the draft stages do not "
                "belong to these weights, or their block size is another. Set "
                "RuntimeConfig.drafting=False, or train drafts for them",
                stacklevel=2,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State of an engine at one moment.

    counters: since the start: requests, tokens, steps, rows, preemptions, errors, finished_*.
    waiting, running: sequences. in_flight: steps whose result has not been read. depth: how many
    may be. slots, blocks: capacity. rounds: decoded so far; verified, accepted: their drafts, by
    position in the round. grammar: compilations and masks. experts: their load by device, None
    unless they are placed again while serving (`RuntimeConfig.rebalance_steps`).
    """

    counters: dict[str, int]
    waiting: int
    running: int
    in_flight: int
    depth: int
    slots: int
    blocks: int
    cache: CacheStats
    rounds: int
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    grammar: GrammarStats
    experts: ExpertStats | None = None

    def prometheus(self, prefix: str = "deepinfer") -> str:
        """Returns the Prometheus text exposition of all values."""
        lines: list[str] = []

        def add(name: str, kind: str, samples: Mapping[str, int | float]) -> None:
            lines.append(f"# TYPE {prefix}_{name} {kind}")
            lines.extend(f"{prefix}_{name}{label} {value}" for label, value in samples.items())

        finished = {}
        for name, value in sorted(self.counters.items()):
            if name.startswith("finished_"):
                finished[f'{{reason="{name.removeprefix("finished_")}"}}'] = value
            else:
                add(f"{name}_total", "counter", {"": value})
        if finished:
            add("finished_total", "counter", finished)
        for name in ("waiting", "running", "in_flight", "depth", "slots", "blocks"):
            add(name, "gauge", {"": getattr(self, name)})
        add("rounds_total", "counter", {"": self.rounds})
        for name in ("verified", "accepted"):
            values = getattr(self, name)
            if values:
                samples = {f'{{position="{k}"}}': v for k, v in enumerate(values, start=1)}
                add(f"drafts_{name}_total", "counter", samples)
        cache = self.cache
        for name in ("hits", "hit_tokens", "publications", "duplicates", "evictions"):
            add(f"prefix_{name}_total", "counter", {"": getattr(cache, name)})
        misses = {f'{{reason="{why}"}}': count for why, count in sorted(cache.misses.items())}
        if misses:
            add("prefix_misses_total", "counter", misses)
        for name in ("free", "kept", "referenced"):
            add(f"blocks_{name}", "gauge", {"": getattr(cache, name)})
        grammar = self.grammar
        for name in ("compiled", "failed", "compile_seconds", "mask_seconds", "mask_rows"):
            add(f"grammar_{name}_total", "counter", {"": getattr(grammar, name)})
        for name in ("waiting", "stuck"):
            add(f"grammar_{name}", "gauge", {"": getattr(grammar, name)})
        if (experts := self.experts) is not None:
            for name in ("decisions", "placed_layers", "moved_slots"):
                add(f"experts_{name}_total", "counter", {"": getattr(experts, name)})
            add("experts_waiting_layers", "gauge", {"": experts.waiting_layers})
            loads = {f'{{layer="{i}"}}': value for i, value in enumerate(experts.imbalance)}
            add("experts_imbalance", "gauge", loads)
        return "\n".join(lines) + "\n"


def collect_stats(
    scheduler: Scheduler,
    drafts: DraftCounts,
    counters: Counter[str],
    in_flight: int,
    grammar: GrammarStats,
    experts: ExpertStats | None,
) -> EngineStats:
    """Returns the state of an engine; counters: of the engine, beside the scheduler's."""
    return EngineStats(
        counters=dict(scheduler.counters + counters),
        waiting=len(scheduler.waiting),
        running=len(scheduler.active),
        in_flight=in_flight,
        depth=scheduler.limits.depth,
        slots=scheduler.limits.layouts[-1].slots,
        blocks=scheduler.cache.num_blocks - 1,
        cache=scheduler.cache.stats(),
        rounds=drafts.rounds,
        verified=tuple(drafts.verified.tolist()),
        accepted=tuple(drafts.accepted.tolist()),
        grammar=grammar,
        experts=experts,
    )
