"""The command line: cheap help, plain errors, and the record of `env`."""

import json
import os
import signal
import subprocess
import sys

import pytest

from deepinfer_jax import environment
from deepinfer_jax.cli import main as cli


def run(*arguments, **environment_variables):
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_jax.cli.main", *arguments],
        env=os.environ | environment_variables,
        capture_output=True,
        text=True,
    )


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys\nfrom deepinfer_jax.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "print('loaded', [n for n in ('jax', 'flax', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loaded []" in done.stdout
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"deepinfer-jax {name}" in done.stdout


@pytest.mark.slow
@pytest.mark.accept(11)
@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_takes_less_than_a_third_of_a_second(name):
    """In seconds of the processor, so that what else runs does not count; the best of five."""
    found = []
    for _ in range(5):
        before = os.times()
        assert run(*name.split(), "--help").returncode == 0
        after = os.times()
        found.append(
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
    assert min(found) < 0.3, found


@pytest.mark.slow
@pytest.mark.accept(11)
def test_a_pipe_is_read_and_written_and_may_close():
    """A message from a pipe; a reader that has enough does not make the writer fail loudly."""
    program = [sys.executable, "-m", "deepinfer_jax.cli.main"]
    chat = [*program, "chat", "--no-thinking", "--max-tokens", "8", "--seed", "1"]
    done = subprocess.run(chat, input="What is 1 + 1?\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    ids = subprocess.run(
        [*program, "tokenize", "--model", "nano"], input="def f():", capture_output=True, text=True
    )
    back = [*program, "tokenize", "--model", "nano", "--decode", ids.stdout]
    assert subprocess.run(back, capture_output=True, text=True).stdout == "def f():\n"


@pytest.mark.slow
@pytest.mark.accept(11)
def test_an_interrupt_ends_a_command_with_130(tmp_path):
    """SIGINT while it generates: text so far, no traceback."""
    command = [sys.executable, "-m", "deepinfer_jax.cli.main", "generate", "Mara lives in"]
    options = ["--max-tokens", "4000", "--ignore-eos", "--temperature", "1", "--seed", "1"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "the first text"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error


def test_unknown_command_exits_2():
    done = run("no-such-command")
    assert done.returncode == 2
    assert "no-such-command" in done.stderr


def test_own_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    from deepinfer_jax import errors

    def fail() -> None:
        raise errors.DeepInferError("the rule, what came, what to do")

    def fail_app(name):
        import typer

        app = typer.Typer(pretty_exceptions_enable=False)
        app.command(name)(fail)
        return app

    monkeypatch.setattr(cli, "command_app", fail_app)
    with pytest.raises(SystemExit) as stop:
        cli.main(["env"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == ("deepinfer-jax: error: the rule, what came, what to do\n")


def test_version_is_the_installed_one():
    from importlib.metadata import version

    done = run("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == version("deepinfer-jax")


def test_env_as_json_names_versions_devices_flags_and_extras():
    done = run("env", "--json", XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["versions"]["jax"]
    assert record["versions"]["python"].startswith("3.")
    assert record["backend"] == "cpu"
    assert record["devices"][0]["platform"] == "cpu"
    assert record["environment_variables"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
    assert record["compilation_cache"]["directory"]
    assert set(record["extras"]) == {"cuda", "dev", "gpu-compile", "notebook", "serve", "vision"}
    assert [line for line in record["warnings"] if "xla_cpu_enable_fast_math" in line]


def test_env_as_tables_names_the_same():
    done = run("env", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    for word in ("jaxlib", "usable_cores", "xla_gpu_deterministic_ops", "gpu-compile", "cpu:0"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("xla_flags", "config", "names"),
    [
        ("", {}, []),
        ("--xla_cpu_enable_fast_math", {}, ["xla_cpu_enable_fast_math"]),
        ("--xla_cpu_enable_fast_math=false", {}, []),
        ("--xla_cpu_enable_fast_math=1 --xla_cpu_enable_fast_math=0", {}, []),
        ("--xla_gpu_deterministic_ops=false", {}, ["xla_gpu_deterministic_ops"]),
        ("--xla_cpu_max_isa=AVX2", {}, []),
        ("", {"jax_default_matmul_precision": "highest"}, []),
        ("", {"jax_default_matmul_precision": "bfloat16"}, ["jax_default_matmul_precision"]),
        ("", {"jax_enable_x64": True}, ["jax_enable_x64"]),
        ("", {"jax_enable_x64": False}, []),
    ],
)
def test_flags_that_contradict_batch_are_found(xla_flags, config, names):
    rows = environment.numerics_flags(xla_flags, config)
    assert [row["name"] for row in rows if row["contradicts_batch"]] == names


def test_flag_names_of_jax_exist():
    import jax

    for flag in environment.JAX_FLAGS:
        assert flag.name in jax.config.values
