"""Sections of the report: each reads its own result files and says which."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.charts import bars, points

Row = dict[str, Any]
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part: paragraphs, charts as (file name, SVG text), a table, the files it comes from.

    Text and cells are Markdown with nothing but `code` in it.
    """

    title: str
    text: tuple[str, ...]
    sources: tuple[str, ...]
    charts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: Rows = ()


def code(text: str) -> str:
    """Returns escaped text with `words` as HTML code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def newest(results: Path, pattern: str) -> Path:
    """Returns the last file of a pattern by name; names end with their date."""
    found = sorted(results.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no file {pattern} in {results}")
    return found[-1]


def read(path: Path) -> list[Row]:
    """Returns the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def prefill_and_decode(results: Path) -> Section:
    """Returns tokens per second of prompts against those of answers, on every machine and level."""
    files = [results / "determinism_cost_cpu.jsonl", newest(results, "determinism_cost_h200_*")]
    series: dict[str, list[tuple[float, float, str]]] = {}
    table = []
    for path in files:
        found = [row for row in read(path) if "tokens_per_s" in row]
        for level in ("off", "batch"):
            speeds = {
                "decode" if row["point"].startswith("decode") else "prefill": row["tokens_per_s"]
                for row in found
                if row["level"] == level and row["process"] in ("plain", "pinned_off", "pinned_256")
            }
            device = _device(found[0])
            point = (speeds["decode"], speeds["prefill"], level)
            series.setdefault(device, []).append(point)
            table.append((device, level, f"{speeds['decode']:.0f}", f"{speeds['prefill']:.0f}"))
    chart = points(
        "Prefill against decode, nano, 64 requests",
        series,
        across="decode, tokens/s",
        up="prefill, tokens/s",
    )
    return Section(
        title="Prefill and decode",
        text=(
            "64 requests of 256 prompt tokens each. Further to the upper right is better; the two "
            "points of a machine are two levels of determinism. The GPU runs the kernels that "
            "`load` picks.",
        ),
        charts=(("prefill_decode", chart),),
        columns=("device", "level", "decode, tokens/s", "prefill, tokens/s"),
        rows=tuple(table),
        sources=tuple(path.name for path in files),
    )


def throughput(results: Path) -> Section:
    """Returns the trade between the speed of one request and of all of them, with drafts or not."""
    files = [results / "speculation_cpu.jsonl", newest(results, "speculation_h200_static_*")]
    found = [
        row
        for path in files
        for row in read(path)
        if row.get("temperature") == 0.0 and "tokens_per_s" in row
    ]
    series = {
        f"{device}, {name}": [
            (
                row["tokens_per_s"] / row["load"],
                row["tokens_per_s"],
                f"{row['load']} at a time" if policy == "off" else "",
            )
            for row in sorted(found, key=lambda row: -row["load"])
            if row["policy"] == policy and _device(row) == device
        ]
        for device in dict.fromkeys(map(_device, found))
        for name, policy in (("no drafts", "off"), ("drafts", "scheduled"))
    }
    chart = points(
        "All requests against one request, nano",
        series,
        across="tokens/s of one request",
        up="tokens/s of all requests",
    )
    return Section(
        title="Throughput against the speed of one request",
        text=(
            "Greedy, level `batch` on the CPU and `run` on the GPU. Running more requests together "
            "raises the sum and lowers what each gets. Drafts move the right end: a request that "
            "is alone has rows to spare. They cost something at the left end, where rows are all "
            "taken.",
        ),
        charts=(("throughput", chart),),
        sources=tuple(path.name for path in files),
    )


def kernels(results: Path) -> Section:
    """Returns times of kernels as fractions of other implementations' on the same GPU."""
    path = newest(results, "kernels_h200_*")
    found = read(path)
    rows: list[tuple[str, str, float, float]] = []
    for part in sorted({r["part"] for r in found if "deepgemm_us" in r}, key=_by_size):
        best = min(
            (r for r in found if r.get("part") == part and r.get("ok")), key=lambda r: r["us"]
        )
        peer = best["deepgemm_us"]
        rows.append((f"FP8 product {part.split()[1]}", "DeepGEMM", best["us"], peer))
    rows += [
        (f"sparse attention, {row['case']}", "FlashMLA", row["us"], row["flash"])
        for row in found
        if "of_flash" in row
    ]
    mixing = {row["case"]: row for row in found if row.get("op") == "mhc_pre" and "us" in row}
    rows += [
        (f"stream mixing (mhc_pre), {case}", "XLA", row["us"], row["xla_us"])
        for case, row in mixing.items()
    ]
    chart = bars(
        "Time of our kernel / time of the peer, H200 (below 1: ours is faster)",
        [(label, {"ratio": ours / peer}) for label, _, ours, peer in rows],
        reference=1.0,
    )
    return Section(
        title="Kernels against peers",
        text=(
            "Kernel times on one H200. DeepGEMM ran beside ours; FlashMLA's times are reference "
            "figures for that GPU, not of the same run. XLA's products were not tuned. An H200 "
            "runs these kernels by default, but for the FP8 products: their scales are not V4.1's.",
        ),
        charts=(("kernels", chart),),
        columns=("operation", "peer", "ours, us", "peer, us", "ratio"),
        rows=tuple(
            (label, peer, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}")
            for label, peer, ours, theirs in rows
        ),
        sources=(path.name,),
    )


def _by_size(part: str) -> tuple[int, ...]:
    return tuple(-int(number) for number in part.split()[1].split("x"))


def determinism(results: Path) -> Section:
    """Returns what level "batch" costs, as times of level "off"."""
    files = [results / "determinism_cost_cpu.jsonl", newest(results, "determinism_cost_h200_*")]
    found = [row for path in files for row in read(path) if "ratio" in row]
    whole = [row for row in found if row["point"].startswith(("decode", "prefill"))]
    parts = [row for row in found if row["point"].endswith("64 rows")]
    chart = bars(
        'Time at level "batch" / time at level "off"',
        [(f"{_device(row)}: {row['point']}", {"ratio": row["ratio"]}) for row in whole]
        + [(row["point"].removesuffix("; 64 rows"), {"ratio": row["ratio"]}) for row in parts],
        reference=1.0,
    )
    return Section(
        title="Price of determinism",
        text=(
            "The same network and engine at two levels: `off` leaves the order of sums to the "
            "compiler, `batch` fixes it. First whole steps, then single operations with 64 rows on "
            "the CPU.",
        ),
        charts=(("determinism", chart),),
        columns=("device", "point", "off, ms", "batch, ms", "ratio"),
        rows=tuple(
            (
                *(_device(row), row["point"], f"{row['off_ms']:g}", f"{row['ms']:g}"),
                f"{row['ratio']:.2f}",
            )
            for row in whole
        ),
        sources=tuple(path.name for path in files),
    )


def _device(row: Row) -> str:
    return "CPU, 2 cores" if row["device"] == "cpu" else row["device"].removeprefix("NVIDIA ")


def drafts(results: Path) -> Section:
    """Returns how many drafts are accepted, and what that gains at several loads."""
    acceptance, cpu = results / "draft_acceptance_nano.jsonl", results / "speculation_cpu.jsonl"
    gpu = newest(results, "speculation_h200_static_*")
    tasks = [row for row in read(acceptance) if "task" in row]
    by_task = bars(
        "Tokens per round by task, nano (blocks of 5 drafts: at most 6)",
        [(row["task"], {"tokens": row["accepted_length"]}) for row in tasks],
        form="{:.1f}",
    )
    chosen = [row for row in tasks if row["task"] in ("story", "trace", "tool_call", "all")]
    by_place = points(
        "Chance that a draft is accepted if those before it were",
        {
            row["task"]: [(i + 1.0, p, "") for i, p in enumerate(row["position_acceptance"])]
            for row in chosen
        },
        across="place in the block",
        up="acceptance",
        log=False,
    )
    gains = [row for row in read(cpu) + read(gpu) if row.get("policy") == "scheduled"]
    gains.sort(key=lambda row: (row["device"] != "cpu", row["load"], row["temperature"]))
    table = [
        (
            *(_device(row), row["determinism"], str(row["load"]), f"{row['temperature']:g}"),
            f"{row['ratio']:.2f}",
        )
        for row in gains
    ]
    return Section(
        title="Drafts",
        text=(
            "A round verifies up to five drafts and yields one token more than it accepts. Below, "
            "how far drafts get, then how many times as fast a run is with scheduled drafts as "
            'without (`verify="exact"`: the same tokens either way).',
        ),
        charts=(("acceptance_by_task", by_task), ("acceptance_by_place", by_place)),
        columns=("device", "level", "requests together", "temperature", "times as fast"),
        rows=tuple(table),
        sources=(acceptance.name, cpu.name, gpu.name),
    )


def quality(results: Path) -> Section:
    """Returns how often nano is right."""
    path = results / "eval_nano.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return Section(
        title="What nano can do",
        text=(
            "Held-out items of the synthetic corpus it was trained on, scored exactly. It knows "
            "nothing else.",
        ),
        columns=("task", "items", "right", "share"),
        rows=tuple(
            (r["name"], str(r["count"]), str(r["correct"]), f"{r['rate']:.0%}") for r in rows
        ),
        sources=(path.name,),
    )


def engine(results: Path) -> Section:
    """Returns single figures of engine and server."""
    serving = read(results / "serving_cpu.jsonl")[0]
    batching = read(results / "continuous_batching.jsonl")
    overhead = read(results / "engine_overhead.jsonl")
    other = read(results / "transformers_v4.jsonl")
    rows = [
        (f"planning a step of {r['requests']} requests", f"{r['plan_us']:.0f} us")
        for r in overhead
        if r["benchmark"] == "planner"
    ]
    rows += [
        (
            f"host work of a step of {r['requests']} requests: plan, dispatch, commit"
            + (", text" if r["text"] else ""),
            f"{r['host_us']:.0f} us of {1e3 * r['step_ms']:.0f} us",
        )
        for r in overhead
        if r["benchmark"] == "engine_overhead"
    ]
    others = {"static": "batches of fixed members", "waves": "batches that end together"}
    rows += [
        (f"continuous batching over {others[r['schedule']]}", f"{r['continuous_over_this']:.2f} x")
        for r in batching
        if r.get("schedule") in others
    ]
    rows += [
        (
            f"V4 in float32, prompts together: {r['prompts']}, over transformers on this CPU",
            f"{r['times_as_fast']:.1f} x ({r['equal_tokens']} of {r['tokens']} tokens equal)",
        )
        for r in other
    ]
    rows.append(
        (
            f"HTTP server, {serving['clients']} clients at once, {serving['answered']} answered",
            f"{serving['requests_per_s']:.1f} requests/s, {serving['errors']} errors "
            f"({serving['note']})",
        )
    )
    names = ("engine_overhead", "continuous_batching", "transformers_v4", "serving_cpu")
    return Section(
        title="Engine and server",
        text=("Single figures, on two CPU cores.",),
        columns=("what", "figure"),
        rows=tuple(rows),
        sources=tuple(f"{name}.jsonl" for name in names),
    )


def installing(results: Path) -> Section:
    """Returns what installing costs."""
    [row] = read(results / "install.jsonl")
    return Section(
        title="Installing",
        text=(
            "The wheel into an empty environment, with everything in the package cache; measured "
            "by `python -m benchmarks.install`.",
        ),
        columns=("what", "figure"),
        rows=(
            ("wheel", f"{row['wheel_bytes'] / 1e6:.1f} MB"),
            ("direct dependencies", str(row["declared_dependencies"])),
            ("packages installed with it", str(row["installed_packages"])),
            ("environment on disk", f"{row['installed_bytes'] / 1e6:.0f} MB"),
            (
                f"install ({row['installer']}, Python {row['python']}, {row['cores']} cores, "
                f"load average {row['load_average']})",
                f"{row['install_s_warm_cache']:.0f} s, {row['install_cpu_s']:.0f} s of CPU",
            ),
        ),
        sources=("install.jsonl",),
    )


SECTIONS: tuple[Callable[[Path], Section], ...] = (
    *(prefill_and_decode, throughput, determinism, kernels, drafts, quality, engine, installing),
)
