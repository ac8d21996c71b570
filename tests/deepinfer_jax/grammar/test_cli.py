"""`generate --schema | --regex | --grammar` on the command line, on a loaded tiny model."""

import json
import re

import pytest

import deepinfer_jax as di
from deepinfer_jax.cli import generate as command
from deepinfer_jax.cli import main as cli
from tests.e2e.lab import BASE, model

pytestmark = pytest.mark.accept(11)
FLAGS = [
    f"--{name.replace('_', '-')}={getattr(BASE, name)}"
    for name in ("max_seqs", "max_len", "max_tokens_per_step", "block_tokens")
]
SEEDED = ["--temperature=1", "--max-tokens=60", "--seed=5", "--no-drafting"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command; returns (stdout, stderr)."""

    def call(*arguments, code=0):
        monkeypatch.setattr(command, "load_with_bar", lambda *_, **__: model())
        with pytest.raises(SystemExit) as stop:
            cli.main(["generate", "one", *arguments, *SEEDED, *FLAGS])
        written = capsys.readouterr()
        assert stop.value.code == code, written.err
        return written.out, written.err

    return call


def test_files_and_patterns(run, tmp_path):
    schema, lark = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"enum": ["é", 12]}', encoding="utf-8")
    lark.write_text('root ::= "a" [0-9]{3}')
    out, err = run("--schema", str(schema))
    assert json.loads(out) in ("é", 12)
    assert "finish: stop" in err
    out, _ = run("--grammar", str(lark))
    assert re.fullmatch(r"a\d{3}\n", out)
    out, _ = run("--regex", "[a-c]{2}", "--json")
    assert re.fullmatch("[a-c]{2}", json.loads(out)["text"])


def test_what_is_refused(run, tmp_path):
    bad = tmp_path / "s.json"
    bad.write_text('{"properties": {"a": {"not": {}}}}')
    assert "exclude each other" in run("--schema", str(bad), "--regex", "a", code=2)[1]
    assert "/properties/a/not" in run("--schema", str(bad), code=2)[1]
    assert "unclosed group" in run("--regex", "a(", code=2)[1]
    assert "must be a text file" in run("--grammar", str(tmp_path / "no.lark"), code=2)[1]
    assert "exclude each other" in run("--regex", "a", "--ignore-eos", code=2)[1]


def test_lines_of_a_job_may_have_grammars(tmp_path):
    from deepinfer_jax.jobs.lines import params_from_json

    usual = di.SamplingParams(grammar=di.Grammar.json_object())
    line = {"grammar": {"kind": "choice", "text": '["a"]', "trigger": [5]}}
    found = params_from_json(line, usual).grammar
    assert found == di.Grammar(kind="choice", text='["a"]', trigger=(5,))
    assert params_from_json({"grammar": None}, usual).grammar is None
    assert params_from_json({}, usual).grammar == usual.grammar
