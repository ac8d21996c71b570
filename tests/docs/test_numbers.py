"""The report is what the committed results give, and pages quote it correctly."""

import json
import re

import pytest

from benchmarks import report
from benchmarks.charts import bars, points
from benchmarks.report_parts import read
from deepinfer_jax.config.presets import preset

pytestmark = pytest.mark.accept(14)


def test_report_is_the_one_of_the_results():
    assert not report.stale(), "run: python -m benchmarks.report"


def test_report_reads_committed_lines_only(root):
    sources = {name for part in report.sections() for name in part.sources}
    assert len(sources) >= 10
    assert all((root / "benchmarks" / "results" / name).is_file() for name in sources)


def test_html_is_complete_and_loads_nothing(root):
    text = (root / report.HTML).read_text()
    assert text.count("<svg") == 6
    assert not re.search(r'(?:src|href)="', text)


def test_charts_draw_what_they_are_given():
    text = bars("T & t", [("first", {"a": 2.0, "b": 1.0})], reference=1.0)
    widths = [float(w) for w in re.findall(r'<rect x="320"[^>]* width="([\d.]+)"', text)]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert "T &amp; t" in text
    text = points("T", {"s": [(1.0, 10.0, "p"), (100.0, 1000.0, "q")]}, across="x", up="y")
    places = [float(v) for v in re.findall(r'<circle cx="([\d.]+)"', text)]
    assert places[0] < places[1]
    assert text == points("T", {"s": [(1.0, 10.0, "p"), (100.0, 1000.0, "q")]}, across="x", up="y")


def test_install_is_within_its_limits(root):
    [row] = read(root / "benchmarks" / "results" / "install.jsonl")
    assert row["install_s_warm_cache"] < 90
    assert row["wheel_bytes"] < 16_000_000


def test_speculation_page_quotes_the_results(root):
    cpu, gpu = (
        {
            row["load"]: row["ratio"]
            for row in read(root / f"benchmarks/results/speculation_{name}.jsonl")
            if row.get("policy") == "scheduled" and row["temperature"] == 0.0
        }
        for name in ("cpu", "h200_static_2026-11-30")
    )
    page = " ".join((root / "docs/concepts/speculation.md").read_text().split())
    assert f"alone runs {cpu[1]:.2f} times as fast" in page
    assert f"together {cpu[8]:.2f} times; sixty-four {cpu[64]:.2f} times" in page
    assert f"{gpu[1]:.1f} times alone, {gpu[8]:.2f} times for eight, {gpu[64]:.2f} times" in page


def test_invariance_page_quotes_the_results(root):
    ratios = {}
    for name in ("determinism_cost_cpu", "determinism_cost_h200_2026-11-30"):
        for row in read(root / f"benchmarks/results/{name}.jsonl"):
            if "ratio" in row and row["point"].startswith(("decode", "prefill")):
                ratios[row["device"], row["point"].split()[0]] = row["ratio"]
    page = " ".join((root / "docs/concepts/batch-invariance.md").read_text().split())
    cpu, gpu = "cpu", "NVIDIA H200"
    assert f"64 requests takes {ratios[cpu, 'decode']:.1f} times as long" in page
    assert f"prompts take {ratios[cpu, 'prefill']:.1f} times as long" in page
    gpu_step, gpu_prompts = ratios[gpu, "decode"], ratios[gpu, "prefill"]
    assert f"takes {gpu_step:.2f} times as long and prompts {gpu_prompts:.2f} times" in page


def test_cache_page_counts_correctly(root):
    """Bytes of the released dimensions, as docs/concepts/kv-cache.md states them."""
    config, page = preset("deepseek-v4.1-flash"), (root / "docs/concepts/kv-cache.md").read_text()
    attention, width = config.attention, config.attention.head_dim
    row = width // 2 + width // 16
    key = config.indexer.index_head_dim // 2 + config.indexer.index_head_dim // 32
    rows = sum(1 / attention.compress_ratios[layer] for layer in attention.kv_source_layer_ids)
    window = width + width // 32
    assert config.draft is not None
    rings = config.num_hidden_layers + config.draft.num_stages
    tails = 3 * 7 * 2 * width * 4  # float32 rows of the pairs that are open
    constant = rings * (attention.sliding_window + 6) * window + tails
    assert attention.kv_source_layer_ids == (2, 8, 14, 20)
    assert (row, key, window, rows) == (288, 68, 528, 2.5)
    assert rows * (row + key) == 890
    assert f"**{rows * (row + key):.0f} bytes**" in page
    assert f"about {constant / 1e6:.1f} MB" in page
    ordinary = config.num_hidden_layers * attention.num_attention_heads * width * 4
    assert f"{ordinary / 1e6:.1f} MB for *one" in page
    assert attention.sliding_window + config.indexer.index_topk == 640


def test_prefill_page_quotes_the_plan(root, capsys):
    from deepinfer_jax.cli import main as cli

    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", "deepseek-v4.1-flash", "--devices", "8xH200", "--json"])
    steps = {one["step"]: one for one in json.loads(capsys.readouterr().out)["steps"]}
    prompt, answer = steps["prefill of 4096"], steps["decode, 16 rows a device"]
    page = " ".join((root / "docs/concepts/prefill-decode.md").read_text().split())
    arithmetic, reading = (1e3 * prompt[f"{part}_seconds"] for part in ("arithmetic", "memory"))
    assert f"about {arithmetic:.0f} ms of arithmetic and {reading:.0f} ms of reading" in page
    assert abs(answer["arithmetic_seconds"] - 0.5e-3) < 0.1e-3  # "half a millisecond"
    assert f"about {1e3 * answer['memory_seconds']:.0f} ms of reading" in page
