"""Counters and gauges of an engine, and their Prometheus text."""

from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer_jax.cache.block_cache import CacheStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State of an engine at one moment.

    counters: since the start: requests, tokens, steps, rows, preemptions, errors, finished_*.
    waiting, running: sequences. in_flight: steps whose result has not been read. depth: how many
    may be. slots, blocks: capacity.
    """

    counters: dict[str, int]
    waiting: int
    running: int
    in_flight: int
    depth: int
    slots: int
    blocks: int
    cache: CacheStats

    def prometheus(self, prefix: str = "deepinfer") -> str:
        """Returns the Prometheus text exposition of all values."""
        lines: list[str] = []

        def add(name: str, kind: str, samples: Mapping[str, int]) -> None:
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
        cache = self.cache
        for name in ("hits", "hit_tokens", "publications", "duplicates", "evictions"):
            add(f"prefix_{name}_total", "counter", {"": getattr(cache, name)})
        misses = {f'{{reason="{why}"}}': count for why, count in sorted(cache.misses.items())}
        if misses:
            add("prefix_misses_total", "counter", misses)
        for name in ("free", "kept", "referenced"):
            add(f"blocks_{name}", "gauge", {"": getattr(cache, name)})
        return "\n".join(lines) + "\n"
