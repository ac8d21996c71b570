"""README and notebooks in an empty environment with nothing but the built wheel (J1)."""

import os
import shlex
import subprocess
import sys

import nbformat
import pytest

from benchmarks.install import build_wheel
from tests.contract.test_readme import COMMANDS, COVERED, blocks
from tests.docs.test_notebooks import NOTEBOOKS, cells

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.accept(14)]

EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
"""
TRANSCRIPT = """
import doctest, sys
failed, tried = doctest.testfile(sys.argv[1], module_relative=False)
assert tried >= 10 and not failed
"""


class Fresh:
    """A virtual environment outside the checkout, and a folder to run in."""

    def __init__(self, folder, wheels):
        self.folder = folder / "run"
        self.folder.mkdir()
        self.bin = folder / "venv" / "bin"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.environment = kept | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_PRE": "0",
        }

    def run(self, program, *arguments):
        """Returns what a program of the environment prints."""
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """An environment into which the notebooks' own install cell has put the wheel."""
    folder, wheels = tmp_path_factory.mktemp("fresh"), tmp_path_factory.mktemp("wheels")
    build_wheel(wheels)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    one = Fresh(folder, wheels)
    one.run("pip", "install", "-qq", "nbclient", "nbformat", "ipykernel")
    install = cells(NOTEBOOKS[0])[0].source
    one.run("python", "-c", install)
    one.run("python", "-c", install)  # does nothing now
    return one


def test_package_is_the_one_of_the_wheel(fresh, root):
    place = fresh.run("python", "-c", "import deepinfer_jax as di; print(di.__file__)")
    assert str(fresh.bin.parent) in place
    assert str(root) not in place


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in COVERED])
def test_command_of_readme_runs(fresh, command):
    (fresh.folder / "prompts.jsonl").write_text(blocks("jsonl")[0])
    program, *words = shlex.split(command)
    printed = fresh.run(program, *words)
    assert printed.strip() or "--output" in words


def test_python_of_readme_runs(fresh):
    for text in blocks("python"):
        fresh.run("python", "-c", text)


def test_transcript_of_readme_is_what_happens(fresh):
    path = fresh.folder / "transcript.txt"
    path.write_text(blocks("pycon")[0])
    fresh.run("python", "-c", TRANSCRIPT, str(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(fresh, path):
    copy = fresh.folder / path.name
    nbformat.write(nbformat.read(path, as_version=4), copy)
    fresh.run("python", "-c", EXECUTE, str(copy))
