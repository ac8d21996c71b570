"""The tests of the official clients again, with the clients of a year ago (io.md 7, gate 11)."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.accept(11)]
#: The newest of November 2025; those of the environment are of November 2026.
CLIENTS = {"openai": "2.8.1", "anthropic": "0.75.0"}
FILES = ("test_openai_client.py", "test_anthropic_client.py", "test_tools.py")


@pytest.fixture
def old_python(tmp_path):
    """The interpreter of an environment with old clients in front of the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    wanted = [f"{name}=={version}" for name, version in CLIENTS.items()]
    subprocess.run([tmp_path / "bin/pip", "install", "-q", *wanted], check=True)
    paths = {"base": str(tmp_path), "platbase": str(tmp_path)}
    own = Path(sysconfig.get_path("purelib", vars=paths))
    (own / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "bin/python"


def test_clients_of_a_year_ago(old_python, root):
    code = "".join(
        f"import {name}; print({name}.__name__, {name}.__version__);" for name in CLIENTS
    )
    run = {"capture_output": True, "text": True, "cwd": root}
    versions = subprocess.run([old_python, "-c", code], check=True, **run).stdout
    print(versions)
    assert versions.split() == [word for pair in CLIENTS.items() for word in pair]
    here = Path(__file__).parent
    files = [str(here / name) for name in FILES]
    found = subprocess.run([old_python, "-m", "pytest", "-q", "-m", "not slow", *files], **run)
    print(found.stdout[-2000:])
    assert found.returncode == 0, found.stdout + found.stderr
