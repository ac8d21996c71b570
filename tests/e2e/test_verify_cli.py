"""`deepinfer-jax verify`: table, files, exit codes."""

import json
from importlib.util import find_spec

import pytest

import deepinfer_jax as di
from deepinfer_jax.cli import generate
from deepinfer_jax.cli import main as cli
from tests.e2e.lab import model
from tests.golden.network import TINY

pytestmark = pytest.mark.accept(7)
CASES = "--cases=slots=2;poisoned cache=1;mesh;control: weight bits flipped"


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments, code):
        def loaded(_console, source, **options):
            assert source == str(TINY)
            if options == {"numerics": "float32", "determinism": "batch"}:
                return model()
            return di.load(source, **options)

        monkeypatch.setattr(generate, "load_with_bar", loaded)
        with pytest.raises(SystemExit) as stop:
            cli.main(["verify", str(TINY), "--numerics=float32", *arguments])
        written = capsys.readouterr()
        assert stop.value.code == code, written.err
        return written.out, written.err

    return call


def test_equal_bits_are_a_table_a_file_and_code_0(run, tmp_path):
    path = tmp_path / "report.json"
    out, err = run(CASES, "--seed=4", f"--json={path}", code=0)
    assert "slots" in out
    assert "noticed" in out
    assert "all bits equal" in err
    record = json.loads(path.read_text())
    assert record["is_equal"] is True
    assert record["seed"] == 4
    assert [row["name"] for row in record["rows"]][:2] == ["slots", "poisoned cache"]
    assert record["rows"][2]["skipped"]


@pytest.mark.slow
def test_another_level_differs_and_says_where(run, tmp_path):
    path = tmp_path / "report.json"
    out, err = run("--cases=chunks=4", "--level=off", f"--json={path}", code=1)
    assert "promises no equal bits" in err
    assert "failed: chunks" in err
    row = json.loads(path.read_text())["rows"][0]
    assert row["differing"] > 0
    assert row["first"]["found"] != row["first"]["lone"]
    assert row["first"]["op"].split(":")[0] in out.replace("\n", "")


def test_a_report_is_compared_with_another(run, tmp_path):
    path = tmp_path / "theirs.json"
    _, err = run(CASES, f"--json={path}", code=0)
    assert "D1 claimed" in err
    assert "D5 claimed" in err
    out, _ = run("--cases=slots=1", f"--against={path}", code=0)
    assert out.splitlines()[-2].startswith("comparable")
    assert "positions match" in out.splitlines()[-1]
    record = json.loads(path.read_text())
    for one in record["fingerprints"]:
        one["chain"][7] = "0" * 16
    path.write_text(json.dumps(record))
    out, _ = run("--cases=slots=1", f"--against={path}", code=1)
    assert "first at position 7" in out
    record["environment"]["device"]["kind"] = "another"
    path.write_text(json.dumps(record))
    out, _ = run("--cases=slots=1", f"--against={path}", code=0)
    assert "not comparable" in out
    assert (
        "no sequence in common"
        in run("--cases=mesh;slots=1", "--seed=9", f"--against={path}", code=2)[1]
    )


def test_usage_errors_are_code_2(run, tmp_path):
    assert "no case 'x'" in run("--cases=x", code=2)[1]
    assert "existing folder" in run(f"--json={tmp_path}/no/report.json", code=2)[1]
    assert "no readable report" in run(f"--against={tmp_path}/absent.json", code=2)[1]
    assert "no case ran" in run("--cases=mesh", code=2)[1]
    assert "--level" in run("--level=perhaps", code=2)[1]
    if find_spec("matplotlib") is None:
        assert "matplotlib" in run(f"--png={tmp_path}/a.png", code=2)[1]


def test_cases_are_listed(run):
    out, _ = run("--cases=list", code=0)
    assert "engine: preemption" in out.splitlines()
