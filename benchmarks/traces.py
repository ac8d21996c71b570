"""What ran on the devices, read from a folder that `jax.profiler.trace` wrote."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np


def kernels_by_device(folder: Path) -> Iterator[list[tuple[str, float, float]]]:
    """Yields (name, begin, end in ns) of what ran on each device; host transfers do not count."""
    (path,) = folder.rglob("*.xplane.pb")
    on_cpu = jax.default_backend() == "cpu"
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/host:CPU" if on_cpu else "/device:GPU:"):
            continue
        found = []
        for line in plane.lines:
            if not line.name.startswith("tf_XLA" if on_cpu else "Stream"):
                continue
            for event in line.events:
                if event.name.startswith(("MemcpyH2D", "MemcpyD2H")) or not event.duration_ns:
                    continue
                if not on_cpu or "hlo_op" in dict(event.stats):
                    found.append((event.name, event.start_ns, event.start_ns + event.duration_ns))
        if found:
            yield found


def length_and_gaps(spans: Iterable[tuple[float, float]]) -> tuple[float, np.ndarray]:
    """Returns ns from the first begin to the last end of (begin, end), and those of every gap."""
    intervals = np.asarray(sorted(spans))
    # Busy until: the latest end so far. A gap is where the next interval begins after that.
    until = np.maximum.accumulate(intervals[:, 1])
    return float(until[-1] - intervals[0, 0]), np.maximum(intervals[1:, 0] - until[:-1], 0.0)
