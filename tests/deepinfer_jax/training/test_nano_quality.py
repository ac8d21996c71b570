"""What the embedded checkpoint can do: B1, B2 and B3 of issue 4, with the default items."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import demo_prompts
from deepinfer_jax.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.accept(4)]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The default evaluation, repeated in float32."""
    path = tmp_path_factory.mktemp("eval") / "nano.json"
    with pytest.raises(SystemExit) as stop:
        main(["eval", "nano", "--compare", "float32", "--json", str(path)])
    assert not stop.value.code
    found = json.loads(path.read_text())
    print(json.dumps({k: v for k, v in found.items() if k != "answers"}, indent=1))
    return found


@pytest.mark.parametrize(
    ("row", "items", "rate"),
    [
        ("extraction", 50, 0.9),
        ("addition", 50, 0.9),
        ("needle-1k", 40, 0.9),
        ("needle-4k", 4, 0),
        ("needle-8k", 2, 0),
        ("loops", 20, 1),
    ],
)
def test_tasks_are_solved(row, items, rate, record):
    found = next(r for r in record["rows"] if r["name"] == row)
    assert found["count"] >= items
    assert found["rate"] >= rate, f"{row}: {found['correct']} of {found['count']}"


def test_tool_calls_have_the_right_form(record):
    found = next(r for r in record["rows"] if r["name"] == "tool_call")
    assert found["calls"] >= 30
    assert found["valid_calls"] >= 0.95 * found["calls"]


def test_story_perplexity_is_reported(record):
    assert record["perplexity"]["tokens"] > 1000
    assert 1 < record["perplexity"]["perplexity"] < 10


def test_float32_arithmetic_changes_few_verdicts(record):
    found = record["compare"]
    assert (found["numerics"], record["numerics"]) == ("float32", "checkpoint")
    assert found["items"] >= 200
    assert len(found["flips"]) <= 3, found["flips"]


def test_most_demo_prompts_are_answered_well(capsys):
    demo_prompts.main([])
    total = json.loads(capsys.readouterr().out.splitlines()[-1])
    print(total)
    assert total["prompts"] == 20
    assert total["passed"] >= 18


def test_demo_shows_a_consistent_story_and_a_correct_extraction(root):
    command = [sys.executable, str(root / "examples" / "02_demo.py")]
    # Compilation is part of what the demo shows: no cached programs.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "consistent: yes" in done.stdout
    assert "correct: yes" in done.stdout
    assert all(f"demo: {part} " in done.stdout for part in ("load", "compile", "generate"))
