"""The public names: complete, lazy, and each where it says it is."""

import ast
import subprocess
import sys
from importlib import import_module

import pytest

import deepinfer_jax as di

SOURCE = di.__file__


def checked_imports():
    """Returns name -> module of the imports that type checkers read."""
    with open(SOURCE, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_three_lists_agree():
    assert set(di.__all__) == set(di._MODULE_OF) == set(checked_imports())
    assert len(di.__all__) == len(set(di.__all__))


@pytest.mark.parametrize("name", di.__all__)
def test_name_is_where_both_lists_say(name):
    module = f"deepinfer_jax.{di._MODULE_OF[name]}"
    assert checked_imports()[name] == module
    assert getattr(di, name) is getattr(import_module(module), name)


def test_star_import_brings_all_and_dir_shows_them():
    names: dict[str, object] = {}
    exec("from deepinfer_jax import *", names)
    assert set(di.__all__) <= set(names)
    assert set(di.__all__) <= set(dir(di))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(di, "no_such_name")  # noqa: B009


def test_names_are_resolved_at_first_use():
    code = (
        "import deepinfer_jax as di, sys; assert 'LLM' not in vars(di); "
        "assert 'jax' not in sys.modules; di.SamplingParams; assert 'SamplingParams' in vars(di)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_citation_is_of_this_version(root):
    text = (root / "CITATION.cff").read_text()
    assert f"\nversion: {di.__version__}\n" in text
    assert "license: Apache-2.0" in text
    for key in ("cff-version", "message", "title", "authors", "abstract", "keywords"):
        assert f"{key}:" in text
