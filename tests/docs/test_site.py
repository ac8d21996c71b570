"""The documentation builds without a warning, loads nothing from elsewhere, has no dead links."""

import os
import re
import subprocess
import sys

import pytest

import deepinfer_jax as di

pytestmark = pytest.mark.accept(14)

EXTERNAL = re.compile(r'<(?:script|link|img|iframe|source)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    """The built pages."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_built(root, site):
    pages = [path.relative_to(root / "docs") for path in (root / "docs").rglob("*.md")]
    assert len(pages) >= 18
    for page in pages:
        assert (site / page.with_suffix(".html")).is_file()


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert pages
    found = {str(page.name): EXTERNAL.findall(page.read_text()) for page in pages}
    assert not any(found.values()), found


def test_reference_shows_every_public_name(root, site):
    text = (site / "reference" / "api.html").read_text()
    missing = [name for name in di.__all__ if f'.{name}"' not in text]
    assert not missing, f"add to docs/reference/api.md: {missing}"
    assert text.count("Examples:") >= len(di.__all__)


def test_command_line_page_names_every_command(root):
    from deepinfer_jax.cli.main import COMMANDS

    commands = set(COMMANDS)
    page = (root / "docs" / "reference" / "command-line.md").read_text()
    named = set(re.findall(r"^\| `([a-z ]+)` \|", page, flags=re.MULTILINE))
    assert commands == named


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_repository_lead_somewhere(root, name):
    text = (root / name).read_text()
    for link in (first or second for first, second in LINK.findall(text)):
        path, _, anchor = link.partition("#")
        if not link.startswith(("http:", "https:", "mailto:")):
            assert path == "" or (root / path).exists(), f"{name}: {link}"
            assert not anchor or anchor in anchors(root / (path or name)), f"{name}: {link}"


def anchors(path):
    """Returns the anchors that headings of a Markdown file have."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_pages_name_only_files_that_exist(root):
    """Paths in code style, such as `examples/04_rollout.py`, and the notebooks of their page."""
    for page in [*(root / "docs").rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]:
        for path in re.findall(
            r"`((?:examples|benchmarks|tests|tools|docs|deepinfer_jax)/[\w./-]+)`",
            page.read_text().replace("accept_issue_n", "accept_issue_2"),
        ):
            assert (root / path).exists(), f"{page.name} names {path}"
    table = re.findall(r"^\| `(\w+\.ipynb)`", (root / "docs/notebooks.md").read_text(), re.M)
    assert table == sorted(p.name for p in (root / "examples" / "notebooks").glob("*.ipynb"))


def test_the_page_on_ascend_has_the_operator_table(root):
    import native_ascend
    from native_ascend import operators

    page = (root / "docs" / "reference" / "ascend.md").read_text()
    assert operators.table() in page
    assert native_ascend.STATUS in page
