"""The bridge on the software double. `make test-ascend` builds both; elsewhere the tests skip."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent


def _module(name: str):
    """Returns a helper of this folder, importable by the tests as `ascend_<name>`."""
    spec = importlib.util.spec_from_file_location(f"ascend_{name}", _HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


double_module = _module("double")


def _is_current(library: Path, sources: str) -> bool:
    native = double_module.ROOT / "native_ascend"
    texts = [p for folder in ("include", sources) for p in (native / folder).iterdir()]
    return library.is_file() and library.stat().st_mtime > max(p.stat().st_mtime for p in texts)


@pytest.fixture(scope="session")
def libraries():
    """(bridge, double) of the build for tests."""
    bridge = double_module.bridge_of(double_module.BUILD)
    double = double_module.double_of(double_module.BUILD)
    if not (_is_current(bridge, "src") and _is_current(double.path, "double")):
        if os.environ.get("DIJ_ASCEND_LANE"):
            pytest.fail("make test-ascend builds the libraries before it runs the tests")
        pytest.skip("the bridge and its double are built by make test-ascend")
    return bridge, double


@pytest.fixture(scope="session")
def runtime(libraries):
    """The bridge, loaded with the double."""
    import native_ascend

    bridge, double = libraries
    return native_ascend.load(str(double.path), allow_double=True, bridge=str(bridge))


@pytest.fixture
def double(libraries, runtime):
    """The double, checked after the test: no broken protocol, nothing left behind."""
    from native_ascend import library

    _, double = libraries
    double.reset()
    library.call(runtime.library, "dij_unpoison", 0)
    before = double.live()
    yield double
    after, broken = double.live(), double.violations()
    double.reset()
    library.call(runtime.library, "dij_unpoison", 0)
    assert broken == []
    # the workspace stays with its device, so one block may have come
    grown = {kind: after[kind] - before[kind] for kind in before}
    assert grown.pop("blocks") <= 1
    assert not any(grown.values()), grown


#: Of the double, off by name for nano, whose heads are narrower than any real model's.
GATES = ("sparse_flash_mla.head_dim", "lightning_indexer.head_dim")


@pytest.fixture(scope="session")
def gates():
    """Names of the two gates."""
    return GATES


@pytest.fixture
def narrow(double):
    """The double with two gates off."""
    for gate in GATES:
        double.set(gate, 0)
    yield double
    for gate in GATES:
        double.set(gate, 1)


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory):
    """The checkpoint nano with `use_fp4_sparse_kv=false`: the arithmetic that CANN can express."""
    from deepinfer_jax.loading import EMBEDDED

    folder = tmp_path_factory.mktemp("nano") / "without_fp4_rows"
    shutil.copytree(EMBEDDED, folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    assert fields["text_config"]["use_fp4_sparse_kv"] is True
    fields["text_config"]["use_fp4_sparse_kv"] = False
    path.write_text(json.dumps(fields))
    return folder
