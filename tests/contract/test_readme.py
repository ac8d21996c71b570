"""README says what is: its commands and snippets run, its matrix comes from support.json."""

import doctest
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_jax.checkpoint.inventory import count_summary, tensor_inventory
from tools import support_matrix

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Run by .ci/run and by the acceptance of a fresh clone; here they would call themselves.
COVERED = {"make demo", "make test"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [
    line for block in blocks("bash") for line in block.splitlines() if line and line[0] != "#"
]

#: Compiling what it runs takes half a minute or more -> the issues whose acceptance set runs it.
LONG = {"02_demo": (4, 14), "03_train_draft": (14,), "04_rollout": (11, 14)}
EXAMPLES = [
    pytest.param(
        path,
        id=path.stem,
        marks=[pytest.mark.slow, pytest.mark.accept(*LONG[path.stem])] if path.stem in LONG else [],
    )
    for path in sorted((ROOT / "examples").glob("*.py"))
]


def test_covered_commands_are_targets_of_the_makefile(root):
    makefile = (root / "Makefile").read_text()
    for command in COVERED:
        assert command in COMMANDS
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)


def test_continuous_integration_runs_the_tests(root):
    lines = (root / ".ci" / "run").read_text().splitlines()
    lanes = [line for line in lines if line.startswith("make ")]
    assert lanes[:3] == ["make test", "make test-gpu-compile", "make test-ascend"]


def test_the_program_is_installed(tmp_path):
    """In a process of its own; the commands below run in this one and share compiled programs."""
    program = Path(sys.executable).with_name("deepinfer-jax")
    assert program.is_file()
    done = subprocess.run([program, "env"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jaxlib" in done.stdout


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in COVERED])
def test_command_runs(command, tmp_path, monkeypatch, capsys):
    from deepinfer_jax.cli.main import main

    program, *words = shlex.split(command)
    assert program == "deepinfer-jax", f"{program} is not covered and not this package's"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(blocks("jsonl")[0])
    with pytest.raises(SystemExit) as stop:
        main(words)
    written = capsys.readouterr()
    assert not stop.value.code, written.out + written.err
    if "--output" in words:
        answers = (tmp_path / words[words.index("--output") + 1]).read_text()
        assert answers.count("\n") == blocks("jsonl")[0].count("\n")
    else:
        assert written.out.strip()


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_snippet_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[number], "README.md", "exec"), {"__name__": "__main__"})


def test_transcript_is_what_happens():
    """The session in "What it looks like", run as a doctest."""
    [session] = blocks("pycon")
    test = doctest.DocTestParser().get_doctest(session, {}, "README.md", None, 0)
    assert len(test.examples) >= 10
    output: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=output.append).failed, "".join(output)


def test_commands_that_are_not_run_have_real_options():
    """Blocks of `sh` need the published weights: the options that they name exist."""
    from typer.main import get_command

    from deepinfer_jax.cli.main import command_app

    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        program, name, *words = shlex.split(line)
        known = {o for p in get_command(command_app(name)).params for o in p.opts}
        assert program == "deepinfer-jax"
        assert {word for word in words if word.startswith("--")} <= known


def test_needs_of_the_real_weights_are_those_of_the_plan(capsys):
    from deepinfer_jax.cli import main as cli
    from deepinfer_jax.config.presets import preset

    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", "deepseek-v4.1-flash", "--devices", "8xH200", "--json"])
    found = json.loads(capsys.readouterr().out)["bytes"]
    total = (found["parameters_total"] + found["state_total"]) / 1e9
    assert f"on eight H200 {total:.0f} GB of each" in " ".join(README.split())
    counts = count_summary(tensor_inventory(preset("deepseek-v4.1-flash")))
    assert f"{counts.elements / 1e9:.0f} billion numbers in" in README


def test_introduction_has_five_sentences():
    introduction = README.split("## Two commands")[0].split("\n", 1)[1]
    assert len(re.findall(r"[a-z)]\.(?:\s|$)", introduction)) == 5


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("script", EXAMPLES)
def test_example_runs(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")


def test_every_claim_has_evidence():
    record = support_matrix.load()
    assert record["capabilities"]
    problems = support_matrix.check(record)
    assert not problems, "\n".join(problems)


def test_matrix_is_the_one_of_support_json():
    expected = support_matrix.render(support_matrix.load())
    assert support_matrix.block_of(README) == expected, "run tools/support_matrix.py --write"


def test_claim_without_evidence_is_reported():
    record = {
        "devices": {"cpu": "CPU"},
        "statuses": {"works": "", "absent": ""},
        "capabilities": [
            {"name": "a", "cpu": {"status": "works"}},
            {"name": "b", "cpu": {"status": "works", "evidence": "tests/no_such_test.py"}},
            {"name": "c", "cpu": {"status": "fast"}},
            {"name": "d"},
            {"name": "e", "cpu": {"status": "absent"}},
        ],
    }
    problems = support_matrix.check(record)
    assert [line.split()[0] for line in problems] == ["a", "b", "c", "d"]


def test_claim_for_a_device_needs_a_result_of_that_device(tmp_path):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "a.jsonl").write_text('{"device": "NVIDIA H200"}\n')
    (results / "b.jsonl").write_text('{"device": "cpu"}\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_c.py").write_text("")

    def row(name, evidence):
        return {"name": name, "h200": {"status": "works", "evidence": evidence}}

    record = {
        "devices": {"h200": "NVIDIA H200 (sm90)"},
        "statuses": {"works": ""},
        "capabilities": [
            row("a", "benchmarks/results/a.jsonl"),
            row("b", "benchmarks/results/b.jsonl"),
            row("c", "tests/test_c.py"),
        ],
    }
    problems = support_matrix.check(record, tmp_path)
    assert [line.split()[0] for line in problems] == ["b", "c"]
