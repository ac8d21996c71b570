"""What the pages show is executed: Python blocks in order, commands beside them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "sh", "json", "jsonl", "text"}


def blocks(page):
    """Returns (language, title, text) of every fenced block."""
    return FENCE.findall((DOCS / page).read_text(encoding="utf-8"))


PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
SHOWN = [page for page in PAGES if any(b[0] in ("python", "bash") for b in blocks(page))]
PROGRAM = Path(sys.executable).with_name("deepinfer-jax")

pytestmark = pytest.mark.accept(14)


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pages_show_something():
    assert len(SHOWN) >= 13
    assert all(language in LANGUAGES for page in PAGES for language, _, _ in blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_page_runs(page, tmp_path, request):
    """Files first, then Python in one process, then commands, in one folder.

    `sh` blocks need an accelerator, an index or much time: only their options are checked.
    """
    found = blocks(page)
    for _, title, text in found:
        if title:
            (tmp_path / title).write_text(text)
    script = "\n".join(text for language, _, text in found if language == "python")
    if "127.0.0.1:8000" in script:
        port = request.getfixturevalue("server_port")
        script = script.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    if script:
        run([sys.executable, "-W", "error::DeprecationWarning", "-c", script], tmp_path)
    for line in commands(found, "bash"):
        words = shlex.split(line)
        assert words[0] == PROGRAM.name
        printed = run([PROGRAM, *words[1:]], tmp_path)
        assert printed.strip() or "--output" in words or words[1] == "convert"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_have_real_options(page):
    from typer.main import get_command

    from deepinfer_jax.cli.main import COMMANDS, command_app

    for line in commands(blocks(page), "sh"):
        words = shlex.split(line)
        if words[0] != PROGRAM.name:
            assert words[0] in ("pip", "export", "python"), line
            continue
        name = next(n for n in (" ".join(words[1:3]), words[1]) if n in COMMANDS)
        known = {o for p in get_command(command_app(name)).params for o in p.opts}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known, f"{page}: {line}"


def commands(found, language):
    """Returns the lines of all blocks of a language, without comments."""
    return [
        line
        for kind, _, text in found
        if kind == language
        for line in text.splitlines()
        if line and line[0] != "#"
    ]


@pytest.fixture
def server_port():
    """The port of a running server with nano."""
    command = [PROGRAM, "serve", "nano", "--port", "0", "--max-seqs", "2", "--max-len", "256"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                yield int(found.group(1))
                break
        else:
            raise AssertionError("".join(lines))
        process.terminate()
        process.communicate()


def test_json_blocks_are_json():
    for page in PAGES:
        for language, _, text in blocks(page):
            if language == "json":
                json.loads(text)
            elif language == "jsonl":
                assert all(json.loads(line) for line in text.splitlines())
