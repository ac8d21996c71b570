"""Notebooks are stored without outputs and run from the first cell to the last, with nano."""

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
#: What every `make test` runs; the others are in the acceptance set.
FAST = {"01_quickstart"}
PARAMETERS = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in FAST else [pytest.mark.slow])
    for path in NOTEBOOKS
]

pytestmark = pytest.mark.accept(14)


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_there_are_seven():
    assert len(NOTEBOOKS) == 7
    assert {path.stem for path in NOTEBOOKS} >= FAST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(path))
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_one_install_cell_the_same_everywhere(path):
    first, *others = [cell.source for cell in cells(path)]
    assert first == cells(NOTEBOOKS[0])[0].source
    assert 'find_spec("deepinfer_jax") is None' in first
    assert not any("pip" in source for source in others)


@pytest.mark.parametrize("path", PARAMETERS)
def test_runs(path, tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
