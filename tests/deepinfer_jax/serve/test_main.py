"""What all commands share: exit codes, a file of options, and completion."""

import os
import subprocess
import sys

import pytest
import typer

from deepinfer_jax import errors
from deepinfer_jax.cli import main as cli


def run_with(error, monkeypatch):
    def fail() -> None:
        raise error

    def fail_app(name):
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command(name)(fail)
        return app

    monkeypatch.setattr(cli, "command_app", fail_app)
    with pytest.raises(SystemExit) as stop:
        cli.main(["env"])
    return stop.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InputError("x"), 2),
        (errors.ConfigError("x"), 2),
        (errors.CheckpointError("x"), 3),
        (errors.TokenizerError("x"), 3),
        (errors.CapacityError("x"), 4),
        (MemoryError("x"), 4),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_tell_what_went_wrong(error, code, monkeypatch, capsys):
    assert run_with(error, monkeypatch) == code
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch):
    with pytest.raises(RuntimeError, match="odd"):
        run_with(RuntimeError("odd"), monkeypatch)


FILE = """
max_seqs = 3
served_model_name = ["a", "b"]
insecure = true

[serve]
port = 7
host = "0.0.0.0"

[bench]
rounds = 9
"""


@pytest.fixture
def configs(monkeypatch, model):
    found = []
    monkeypatch.setattr("deepinfer_jax.cli.generate.load_with_bar", lambda *_, **__: model)
    monkeypatch.setattr(
        "deepinfer_jax.serve.server.serve", lambda llm, config, note: found.append((llm, config))
    )
    return found


def test_options_come_from_a_file_and_the_command_line_wins(configs, tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(FILE)
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--port", "8", "--config", str(file)])
    assert stop.value.code == 0
    ((llm, config),) = configs
    assert (config.port, config.host, config.insecure) == (8, "0.0.0.0", True)
    assert config.served_model_name == ("a", "b")
    assert llm.runtime.max_seqs == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_seqs = ", "readable TOML"),
        ("no_such_option = 1", "No such option"),
        ("serve = 1\nmax_seqs = 2", "a table of options"),
        ("port = 2020-01-01", "must be a text"),
    ],
)
def test_a_file_that_cannot_be_honoured_is_refused(text, complaint, configs, tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", f"--config={file}"])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err
    assert configs == []


def complete(line):
    words = line.split(" ")
    variables = {
        "_DEEPINFER_JAX_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax.cli.main"],
        env=os.environ | variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_shells_complete_commands_and_their_options():
    assert complete("deepinfer-jax gen") == ["generate"]
    assert "--served-model-name" in complete("deepinfer-jax serve --served")
