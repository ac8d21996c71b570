"""Spans of the host loop for Perfetto and chrome://tracing; nothing is kept unless switched on."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_SPANS = 1_000_000


class Trace:
    """Collects named spans of a clock in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts switched off."""
        self.clock = clock
        self.is_on = False
        self.spans: list[tuple[str, float, float, dict[str, Any]]] = []

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """Measures what runs inside; details become arguments of the span."""
        if not self.is_on:
            yield
            return
        begin = self.clock()
        yield
        if len(self.spans) < MOST_SPANS:
            self.spans.append((name, begin, self.clock(), details))

    def write(self, path: Path) -> None:
        """Writes the spans in the Trace Event format (microseconds)."""
        events = [
            {
                "name": name,
                "ph": "X",
                "ts": begin * 1e6,
                "dur": (end - begin) * 1e6,
                "pid": 1,
                "tid": 1,
                "args": details,
            }
            for name, begin, end, details in self.spans
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
