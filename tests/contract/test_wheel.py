"""The wheel holds the four packages and their data, and runs outside the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("deepinfer_jax", "pallas_kernels", "sharding", "native_ascend")
# -S leaves out site and with it the editable install's path file, which names the checkout.
RUN_ENTRY_POINT = """
import sys
sys.path[:0] = [{target!r}, {site!r}]
from importlib.metadata import distribution
found = distribution("deepinfer-jax")
assert str(found.locate_file("")).startswith({target!r}), found.locate_file("")
[entry] = [point for point in found.entry_points if point.group == "console_scripts"]
assert entry.name == "deepinfer-jax"
sys.argv = ["deepinfer-jax", *{arguments!r}]
entry.load()()
"""
IMPORT_ALL = """
import sys
sys.path[:0] = [{target!r}, {site!r}]
import deepinfer_jax, pallas_kernels, sharding, native_ascend
for package in (deepinfer_jax, pallas_kernels, sharding, native_ascend):
    assert package.__file__.startswith({target!r}), package.__file__
print(deepinfer_jax.__version__)
"""


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(target)]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def is_python(path: Path) -> bool:
    return path.suffix in (".py", ".typed")


def run_outside(code, target, tmp_path, **values):
    site = sysconfig.get_paths()["purelib"]
    text = code.format(target=str(target), site=site, **values)
    command = [sys.executable, "-I", "-S", "-c", text]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def test_wheel_holds_every_file_of_the_packages(root, wheel):
    from tools import check_tree

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    held = [path for path in check_tree.tree_files() if path.parts[0] in PACKAGES]
    # The C++ of the Ascend bridge is for a checkout (tests/native_ascend/test_wheel.py).
    wanted = {str(path) for path in held if path.parts[0] != "native_ascend" or is_python(path)}
    assert {name.split("/")[0] for name in wanted} == set(PACKAGES)
    assert wanted - names == set()
    unwanted = {
        name for name in names if name.split("/")[0] not in PACKAGES and ".dist-info/" not in name
    }
    assert unwanted == set()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_ships_the_default_checkpoint(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    folder = "deepinfer_jax/data/nano/"
    for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
        assert sizes.get(folder + name, 0) > 0
    assert any(name.startswith(folder) and name.endswith(".safetensors") for name in sizes)
    assert wheel.stat().st_size < 16_000_000  # architecture.md 5


def test_packages_import_outside_the_checkout(root, installed, tmp_path):
    done = run_outside(IMPORT_ALL, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert done.stdout.strip() == project["version"]


def test_command_line_runs_outside_the_checkout(installed, tmp_path):
    done = run_outside(RUN_ENTRY_POINT, installed, tmp_path, arguments=["--help"])
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    assert "env" in done.stdout


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.accept(2)
def test_wheel_runs_in_an_empty_environment(wheel, tmp_path):
    venv = tmp_path / "venv"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_"))}

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", str(venv))
    run(str(venv / "bin" / "pip"), "install", "-qq", str(wheel))
    program = str(venv / "bin" / "deepinfer-jax")
    assert "generate" in run(program, "--help")
    assert '"backend"' in run(program, "env", "--json")
    assert run(program, "generate", "The quick brown fox").strip()
