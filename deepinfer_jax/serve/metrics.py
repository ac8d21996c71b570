"""Counters and histograms of the server as Prometheus text, with vLLM's names behind our prefix."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from deepinfer_jax.engine.stats import EngineStats

PREFIX = "deepinfer"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(slots=True, eq=False)
class Histogram:
    """Counts values by upper bound; the last count is of those above all bounds."""

    bounds: tuple[int | float, ...] = _LATENCY
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        """Returns the exposition of a histogram."""
        counts = self.counts or [0] * (len(self.bounds) + 1)
        lines, so_far = [f"# TYPE {PREFIX}_{name} histogram"], 0
        for bound, count in zip((*self.bounds, None), counts, strict=True):
            so_far += count
            edge = "+Inf" if bound is None else f"{bound:g}"
            lines.append(f'{PREFIX}_{name}_bucket{{le="{edge}"}} {so_far}')
        return [*lines, f"{PREFIX}_{name}_sum {self.total!r}", f"{PREFIX}_{name}_count {so_far}"]


class Metrics:
    """What the server itself measures; touched in its event loop alone, `compilations` aside."""

    def __init__(self) -> None:
        """Starts at zero, and counts the programs that JAX compiles from here on."""
        self.first_token, self.per_token = Histogram(), Histogram()
        self.total, self.queue = Histogram(), Histogram()
        self.prompt_tokens = self.images = self.disconnects = self.stalls = self.compilations = 0
        self.responses: Counter[int] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stops counting programs."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.compilations += event == _COMPILED

    def text(self, stats: EngineStats | None) -> str:
        """Returns the exposition; stats: of the engine, None if it did not answer."""
        lines = [] if stats is None else _engine_lines(stats)
        lines += _one("prompt_tokens_total", "counter", self.prompt_tokens)
        lines += _one("images_total", "counter", self.images)
        lines += _one("client_disconnects_total", "counter", self.disconnects)
        lines += _one("stream_stalls_total", "counter", self.stalls)
        lines += _one("jax_compilations_total", "counter", self.compilations)
        statuses = {f'status="{status}"': n for status, n in sorted(self.responses.items())}
        lines += _many("http_responses_total", "counter", statuses)
        lines += self.first_token.lines("time_to_first_token_seconds")
        lines += self.per_token.lines("time_per_output_token_seconds")
        lines += self.total.lines("e2e_request_latency_seconds")
        lines += self.queue.lines("queue_time_seconds")
        text = "\n".join(lines) + "\n"
        return text if stats is None else text + stats.prometheus(f"{PREFIX}_engine")


def _engine_lines(stats: EngineStats) -> list[str]:
    cache, counters = stats.cache, stats.counters
    ended = {
        f'finish_reason="{name.removeprefix("finished_")}"': count
        for name, count in sorted(counters.items())
        if name.startswith("finished_")
    }
    return [
        *_one("num_requests_running", "gauge", stats.running),
        *_one("num_requests_waiting", "gauge", stats.waiting),
        *_one("kv_cache_usage_ratio", "gauge", cache.referenced / max(stats.blocks, 1)),
        *_one("prefix_cache_queries_total", "counter", cache.hits + sum(cache.misses.values())),
        *_one("prefix_cache_hits_total", "counter", cache.hits),
        *_one("generation_tokens_total", "counter", counters.get("tokens", 0)),
        *_many("request_success_total", "counter", ended),
        *_one("spec_decode_draft_tokens_total", "counter", sum(stats.verified)),
        *_one("spec_decode_accepted_tokens_total", "counter", sum(stats.accepted)),
        *_one("grammar_compile_seconds", "counter", stats.grammar.compile_seconds),
        *_one("grammar_mask_seconds", "counter", stats.grammar.mask_seconds),
        *_one("grammar_errors_total", "counter", stats.grammar.failed),
        *_one("grammar_stuck_compiles", "gauge", stats.grammar.stuck),
    ]


def _one(name: str, kind: str, value: int | float) -> list[str]:
    return [f"# TYPE {PREFIX}_{name} {kind}", f"{PREFIX}_{name} {value}"]


def _many(name: str, kind: str, samples: Mapping[str, int | float]) -> list[str]:
    rows = [f"{PREFIX}_{name}{{{label}}} {value}" for label, value in samples.items()]
    return [f"# TYPE {PREFIX}_{name} {kind}", *rows] if rows else []
