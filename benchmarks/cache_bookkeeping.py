"""What does the host bookkeeping of one cache block cost? (engine.md 7.6: below 2 us)

Every operation of a block's life on a full pool, so that each allocation evicts. One JSON line:

    python -m benchmarks.cache_bookkeeping --json out.jsonl
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.off_vs_plain import revision
from deepinfer_jax.cache.block_cache import BlockCache

BLOCK_TOKENS = 128
ROOT = bytes(16)
TARGET_US = 2.0


def measure(blocks_per_sequence: int, sequences: int, repeats: int) -> dict[str, Any]:
    """Returns microseconds of CPU time per block, median and minimum over the repeats.

    Every repeat runs `sequences` new sequences that share no block through a pool that the
    sequences of the repeat before fill, so each of their blocks is evicted once.
    """
    count = blocks_per_sequence * sequences
    cache = BlockCache(count + 1, block_tokens=BLOCK_TOKENS, checkpoint_bytes=0)
    times: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[np.ndarray, list[int]], Any]) -> list[Any]:
        started = time.process_time()
        results = [run(tokens, blocks) for tokens, blocks in zip(prompts, held, strict=True)]
        times.setdefault(name, []).append((time.process_time() - started) / count * 1e6)
        return results

    for repeat in range(repeats + 1):
        prompts = [
            np.arange(blocks_per_sequence * BLOCK_TOKENS, dtype=np.int32) + 1000 * repeat + number
            for number in range(sequences)
        ]
        held: list[list[int]] = [[] for _ in prompts]
        held = timed("allocate", lambda _, __: cache.allocate(blocks_per_sequence))
        held = timed("publish", lambda t, b: cache.publish(ROOT, t, b, 0, len(b)))
        matches = timed("match", lambda t, _: cache.match(ROOT, t))
        if [match.blocks for match in matches] != held:
            raise RuntimeError("a published sequence was not found again")
        timed("acquire", lambda _, b: cache.acquire(b))
        timed("release_shared", lambda _, b: cache.release(b))
        timed("release_last", lambda _, b: cache.release(b))
        if repeat == 0:
            times.clear()  # the first pool was empty: nothing was evicted
    cache.check()
    life = [sum(parts) for parts in zip(*times.values(), strict=True)]
    point = {f"{name}_us": round(statistics.median(values), 3) for name, values in times.items()}
    least = {f"{name}_min_us": round(min(values), 3) for name, values in times.items()}
    return {
        "blocks_per_sequence": blocks_per_sequence,
        "sequences": sequences,
        "evictions": cache.stats().evictions,
        **point,
        **least,
        "life_us": round(statistics.median(life), 3),
        "life_min_us": round(min(life), 3),
        "target_us_per_operation": TARGET_US,
    }


def main() -> None:
    """Prints one JSON line per shape of the load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    options = parser.parse_args()
    environment = {
        "question": "cache_bookkeeping",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "revision": revision(),
    }
    for blocks, sequences in ((32, 256), (4096, 2)):
        line = json.dumps({**environment, **measure(blocks, sequences, options.repeats)})
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
