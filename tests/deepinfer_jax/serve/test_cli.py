"""`serve` and `bench` on the command line."""

import json
import subprocess
import sys

import httpx
import pytest

from deepinfer_jax.cli import main as cli
from deepinfer_jax.cli.bench_http import Seen, percentiles, summary
from deepinfer_jax.cli.bench_points import Point, draw, pareto


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    written = capsys.readouterr()
    return stop.value.code, written.out, written.err


@pytest.fixture
def configs(monkeypatch, model):
    """What `serve` would have run."""
    found = []
    monkeypatch.setattr("deepinfer_jax.cli.generate.load_with_bar", lambda *_, **__: model)
    monkeypatch.setattr(
        "deepinfer_jax.serve.server.serve", lambda llm, config, note: found.append((llm, config))
    )
    return found


def test_options_and_environment_reach_the_server(configs, capsys, monkeypatch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nalpha\n\nbeta\n")
    monkeypatch.setenv("DEEPINFER_JAX_PORT", "1234")
    monkeypatch.setenv("DEEPINFER_JAX_ADMIN_KEY", "boss")
    options = ["--served-model-name", "a", "--served-model-name", "b", "--api-key", "k"]
    code, _, _ = run(
        capsys, "serve", *options, "--api-key-file", str(keys), "--host", "0.0.0.0",
        "--max-seqs", "3",
    )  # fmt: skip
    ((llm, config),) = configs
    assert code == 0
    assert config.port == 1234
    assert config.served_model_name == ("a", "b")
    assert config.api_key == ("k", "alpha", "beta")
    assert config.admin_key == "boss"
    assert llm.runtime.max_seqs == 3
    assert llm.runtime.warm_grammars


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host", "0.0.0.0"], "no API key"),
        (["--api-key-file", "nowhere"], "readable text file"),
        (["--drain-seconds", "-1"], "drain_seconds"),
    ],
)
def test_serve_refuses_before_it_loads_anything(configs, arguments, complaint, capsys):
    code, _, err = run(capsys, "serve", *arguments)
    assert code == 2
    assert complaint in err
    assert configs == []


def test_serve_says_what_to_install(configs, capsys, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.cli.serve.find_spec", lambda name: None)
    code, _, err = run(capsys, "serve")
    assert code == 2
    assert "pip install 'deepinfer-jax[serve]'" in err


def test_bench_measures_a_server(server, capsys, tmp_path):
    file = tmp_path / "bench.json"
    options = ["--concurrency", "1,2", "--prompt-tokens", "8", "--max-tokens", "4", "--rounds", "2"]
    code, out, err = run(capsys, "bench", "--url", server.url, *options, "--json", str(file))
    assert code == 0, err
    record = json.loads(file.read_text())
    assert [(one["concurrency"], one["requests"]) for one in record["points"]] == [(1, 2), (2, 4)]
    for one in record["points"]:
        assert one["tokens_per_s"] > 0
        assert one["first_token_ms"]["p50"] <= one["first_token_ms"]["p99"]
    assert "tokens/s" in out


def test_bench_measures_an_engine_with_and_without_drafts(capsys, tmp_path):
    file = tmp_path / "bench.json"
    options = ["--concurrency", "1,4", "--prompt-tokens", "8", "--max-tokens", "6", "--rounds", "1"]
    runtime = ["--max-tokens-per-step", "32", "--max-len", "512", "--block-tokens", "16"]
    code, _, err = run(capsys, "bench", *options, *runtime, "--json", str(file))
    assert code == 0, err
    record = json.loads(file.read_text())
    assert [one["series"] for one in record["points"]] == ["drafts"] * 2 + ["no drafts"] * 2
    assert record["runtime"]["max_seqs"] == 4
    assert all(one["seconds"] > 0 for one in record["points"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--concurrency", "1,x"], "--concurrency must be numbers"),
        (["--concurrency", "0"], "--concurrency must be numbers"),
        (["--json", "/no/such/folder/x.json"], "must exist"),
        (["--url", "ftp://x"], "http://host:port"),
    ],
)
def test_bench_refuses(arguments, complaint, capsys):
    code, _, err = run(capsys, "bench", *arguments)
    assert code == 2
    assert complaint in err


def test_bench_says_that_a_server_is_not_there(capsys):
    code, _, err = run(capsys, "bench", "--url", "http://127.0.0.1:9", "--concurrency", "1")
    assert code == 2
    assert "did not answer" in err


def point(series, concurrency, total, each):
    return Point(
        series=series, concurrency=concurrency, requests=1, seconds=1.0, tokens_per_s=total,
        tokens_per_s_per_request=each, first_token_ms={"p50": 1.0, "p90": 1.0, "p99": 1.0},
        between_ms={"p50": 1.0, "p90": 1.0, "p99": 1.0},
    )  # fmt: skip


POINTS = [
    point("a", 1, 10.0, 10.0), point("a", 4, 30.0, 8.0), point("a", 16, 25.0, 2.0),
    point("b", 1, 20.0, 20.0), point("b", 4, 35.0, 8.0),
]  # fmt: skip


def test_pareto_keeps_what_nothing_beats():
    found = [(one.series, one.concurrency) for one in pareto(POINTS)]
    assert found == [("b", 1), ("b", 4)]
    assert pareto([]) == []


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    draw(POINTS, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_summary_counts_what_clients_saw():
    whole = Seen(status=200, arrivals=[0.1, 0.2, 0.2001], total_s=0.4)
    left = Seen(status=200, arrivals=[0.3], total_s=0.3, has_left=True)
    refused = Seen(status=429, error="busy")
    found = summary([whole, left, refused], 2.0)
    assert (found["answered"], found["left"], found["errors"]) == (1, 1, 1)
    assert found["events_per_s"] == 2.0
    assert found["between_bursts_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert percentiles([]) == {}


@pytest.mark.slow
@pytest.mark.accept(11)
def test_a_served_process_drains_at_sigterm_even_if_nobody_reads_its_notes():
    options = ["--port", "0", "--max-seqs", "2", "--max-len", "256"]
    command = [sys.executable, "-m", "deepinfer_jax.cli.main", "serve", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = next(line.split()[2] for line in process.stderr if line.startswith("ready at"))
    process.stderr.close()
    assert httpx.get(f"{url}/health").json()["state"] == "ready"
    process.terminate()
    assert process.wait(60) == 0
