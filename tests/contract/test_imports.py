"""Imports point down only (architecture.md 2)."""

from pathlib import Path

import pytest

from tools import check_tree


def test_imports_of_the_repository_point_down():
    sources = check_tree.checked_sources(check_tree.tree_files())
    assert any(path.parts[0] == "deepinfer_jax" for path in sources)
    problems = [
        line
        for path, source in sources.items()
        for line in check_tree.import_violations(source, path)
    ]
    assert not problems, "\n".join(problems)


def test_parts_of_deepinfer_jax_do_not_import_each_other_in_a_circle():
    problems = check_tree.cycles(check_tree.checked_sources(check_tree.tree_files()))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("pallas_kernels/core/a.py", "import scipy", "imports only jax, numpy"),
        ("pallas_kernels/core/a.py", "from sharding import rules", "imports only jax, numpy"),
        ("pallas_kernels/core/a.py", "from deepinfer_jax import errors", "imports only jax, numpy"),
        ("sharding/mesh.py", "def f():\n    import pallas_kernels", "imports only jax, numpy"),
        ("native_ascend/loader.py", "import jax", "inside functions only"),
        ("deepinfer_jax/model/a.py", "import native_ascend", "reached through"),
        ("deepinfer_jax/backends.py", "import native_ascend", "inside functions only"),
        ("deepinfer_jax/config/a.py", "from deepinfer_jax import numerics", "comes after config"),
        ("deepinfer_jax/config/a.py", "from ..model.params import X", "comes after config"),
        ("deepinfer_jax/model/moe/a.py", "from ...engine import llm", "comes after model"),
        (
            "deepinfer_jax/numerics/a.py",
            "def f():\n    import deepinfer_jax.cache.x",
            "comes after",
        ),
        (
            "deepinfer_jax/model/a.py",
            "import importlib\nimportlib.import_module('deepinfer_jax.engine')",
            "comes after model",
        ),
        ("deepinfer_jax/novel/a.py", "import os", "has no place in the import order"),
        ("deepinfer_jax/model/a.py", "import tokenizers", "at first use"),
        ("deepinfer_jax/cli/a.py", "from tests import helpers", "nothing imports tests"),
        ("tools/a.py", "import benchmarks.decode", "nothing imports benchmarks"),
    ],
)
def test_wrong_import_is_reported(path, source, complaint):
    problems = check_tree.import_violations(source, Path(path))
    assert len(problems) >= 1
    assert any(complaint in line for line in problems), problems


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/core/a.py", "import jax.numpy as jnp\nimport numpy as np\nimport math"),
        ("pallas_kernels/core/a.py", "from .round import f\nfrom pallas_kernels.core import tiles"),
        ("native_ascend/loader.py", "import numpy\ndef f():\n    import jax"),
        ("deepinfer_jax/backends.py", "def f():\n    import native_ascend"),
        ("deepinfer_jax/config/a.py", "from deepinfer_jax.errors import ConfigError"),
        ("deepinfer_jax/engine/a.py", "from deepinfer_jax.model import params"),
        ("deepinfer_jax/checkpoint/a.py", "from deepinfer_jax.model import params"),
        ("deepinfer_jax/model/a.py", "def f():\n    import tokenizers"),
        ("deepinfer_jax/__init__.py", "from deepinfer_jax.engine import llm"),
    ],
)
def test_right_import_is_accepted(path, source):
    assert check_tree.import_violations(source, Path(path)) == []


def test_circle_of_two_parts_is_reported():
    sources = {
        Path("deepinfer_jax/checkpoint/a.py"): "from deepinfer_jax.model import params",
        Path(
            "deepinfer_jax/model/a.py"
        ): "def f():\n    from deepinfer_jax.checkpoint import names",
    }
    assert check_tree.cycles(sources) == [
        "deepinfer_jax.checkpoint and deepinfer_jax.model import each other"
    ]
    del sources[Path("deepinfer_jax/model/a.py")]
    assert check_tree.cycles(sources) == []
