"""A server under many streaming clients, some of which hang up (acceptance H5).

`python benchmarks/serving.py [--model nano] [--clients 256] [--seconds 120] [--leave 0.2]` starts
`deepinfer-jax serve` on loopback in a process of its own, loads it from this one, and prints one
JSON line: latencies as clients see them, the server's memory, and what it holds in the end. Exit
code 1 if a slot leaked, the server crashed, an answer failed, or its memory grew by 1 MB or more a
minute after the first one (--settle). Before that, bursts of 1, 2, 4, ... requests use every size
of program once, because memory grows by what a program needs when it first runs.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from deepinfer_jax.cli.bench_http import load, summary

PROMPTS = (
    "Tell me a story.",
    "hi",
    "What is 17 + 25?",
    "Write a short story about a dog named Kip and a baker named Ann.",
    "Sort this list: 9, 4, 7, 1.",
)


def start(model: str, options: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Returns the server's process and its address, once it is ready."""
    command = [sys.executable, "-m", "deepinfer_jax.cli.main", "serve", model, "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        found = re.match(r"ready at (\S+)", line)
        if found:
            return process, found[1]
    raise SystemExit(f"the server ended with {process.wait()} before it was ready")


def resident_mb(pid: int) -> float:
    """Returns the memory of a process in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024 / 1e6  # pyright: ignore


def watch(pid: int, samples: list[tuple[float, float]], stop: threading.Event) -> None:
    """Notes (seconds, MB) once a second."""
    began = time.monotonic()
    while not stop.wait(1.0):
        samples.append((time.monotonic() - began, resident_mb(pid)))


def slope_per_minute(samples: list[tuple[float, float]], after_s: float) -> float | None:
    """Returns the least-squares growth in MB a minute of the samples behind `after_s`."""
    late = [(t / 60, mb) for t, mb in samples if t >= after_s]
    if len(late) < 10:
        return None
    mean_t = sum(t for t, _ in late) / len(late)
    mean_mb = sum(mb for _, mb in late) / len(late)
    spread = sum((t - mean_t) ** 2 for t, _ in late)
    return sum((t - mean_t) * (mb - mean_mb) for t, mb in late) / spread


def metrics(url: str) -> dict[str, float]:
    """Returns the server's counters and gauges."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


def wait_idle(url: str) -> dict[str, float]:
    """Returns the counters as soon as nothing runs; gives up after 30 s."""
    end = time.monotonic() + 30
    while True:
        found = metrics(url)
        busy = found["deepinfer_num_requests_running"] + found["deepinfer_num_requests_waiting"]
        if not busy or time.monotonic() > end:
            return found
        time.sleep(0.1)


def bursts(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`: so many requests at once use every size of program."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def main() -> None:
    """Runs the load of the command line."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", default="nano")
    arguments.add_argument("--clients", type=int, default=256)
    arguments.add_argument("--seconds", type=float, default=120)
    arguments.add_argument("--leave", type=float, default=0.2)
    arguments.add_argument("--max-tokens", type=int, default=48)
    arguments.add_argument("--settle", type=float, default=60, help="seconds without a slope")
    given, options = arguments.parse_known_args()
    process, url = start(given.model, options)
    path = "/v1/chat/completions"

    def make_body(rng: random.Random) -> dict[str, object]:
        return {
            "model": given.model,
            "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
            "max_tokens": rng.randint(8, given.max_tokens),
            "seed": rng.randrange(2**32),
        }

    for clients in bursts(given.clients):
        asyncio.run(load(url, path, make_body, clients=clients, requests=1))
    before = wait_idle(url)["deepinfer_generation_tokens_total"]
    samples: list[tuple[float, float]] = []
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, samples, stop))
    watcher.start()
    began = time.monotonic()
    try:
        found = asyncio.run(
            load(
                url,
                path,
                make_body,
                clients=given.clients,
                seconds=given.seconds,
                leave_share=given.leave,
            )
        )
        seconds = time.monotonic() - began
        after = wait_idle(url)
    finally:
        stop.set()
        watcher.join()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    loaded = [(t, mb) for t, mb in samples if t <= given.seconds]  # not while it empties
    slope = slope_per_minute(loaded, given.settle)
    line = {
        "benchmark": "serving",
        "model": given.model,
        "clients": given.clients,
        **summary(found, seconds),
        "tokens_per_s": round((after["deepinfer_generation_tokens_total"] - before) / seconds, 1),
        "disconnects_seen": after["deepinfer_client_disconnects_total"],
        "running_after": after["deepinfer_num_requests_running"],
        "waiting_after": after["deepinfer_num_requests_waiting"],
        "blocks_in_use_after": after["deepinfer_engine_blocks_referenced"],
        "resident_mb": round(samples[-1][1], 1) if samples else None,
        "resident_mb_every_10_s": [round(mb, 1) for _, mb in samples[::10]],
        "settled_after_s": given.settle,
        "resident_mb_per_minute_settled": None if slope is None else round(slope, 3),
        "exit_code": code,
    }
    print(json.dumps(line))
    is_free = not (line["running_after"] or line["waiting_after"] or line["blocks_in_use_after"])
    if code or line["errors"] or not is_free or (slope is not None and slope >= 1):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
