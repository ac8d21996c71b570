"""Without CANN: import works, probe explains, a run raises the documented error (I4)."""

import subprocess
import sys

import pytest

import native_ascend
from native_ascend import ops, runtime

pytestmark = pytest.mark.accept(13)


def run(code: str, **env: str) -> str:
    import os

    kept = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=kept | env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_native_and_no_jax():
    out = run(
        "import sys, native_ascend\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('jax' in sys.modules, 'dij_ascend' in maps, 'ascendcl' in maps)"
    )
    assert out.split() == ["False", "False", "False"]


def test_probe_explains_and_names_what_it_tried(tmp_path):
    found = native_ascend.probe(str(tmp_path))
    assert not found.available
    assert f"{tmp_path}/lib64/libascendcl.so" in found.tried
    assert str(tmp_path) in found.reason
    assert native_ascend.available(str(tmp_path)) is False


def test_a_run_without_a_runtime_raises_and_computes_nothing(monkeypatch):
    import jax.numpy as jnp

    monkeypatch.setattr(runtime, "_loaded", None)
    with pytest.raises(native_ascend.AscendUnavailable, match="no Ascend runtime is loaded"):
        ops.matmul(jnp.ones((2, 2)), jnp.ones((2, 2)))


def test_load_without_a_bridge_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "_loaded", None)
    with pytest.raises(native_ascend.AscendUnavailable, match="make ascend"):
        native_ascend.load(str(tmp_path), bridge=str(tmp_path / "none.so"))


@pytest.mark.parametrize("determinism", ["batch", "run"])
def test_a_model_asked_for_on_ascend_is_not_loaded_elsewhere(monkeypatch, tmp_path, determinism):
    import deepinfer_jax as di

    monkeypatch.setattr(runtime, "_loaded", None)
    monkeypatch.setattr(runtime.native, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(native_ascend.AscendUnavailable, match="make ascend") as failure:
        di.load("nano", kernels="ascend", determinism=determinism)
    assert isinstance(failure.value, di.DeepInferError)
    assert di.load("nano").config.execution.on_ascend is False


def test_nothing_is_promised_of_an_ascend_device():
    from deepinfer_jax import ExecutionConfig, RuntimeConfig
    from deepinfer_jax.determinism import promises

    execution = ExecutionConfig(determinism="run", kernels=(("network", "ascend"),))
    found = promises(execution, RuntimeConfig(), has_drafts=False, platform="cpu", xla_flags="")
    assert not any(held for held, _ in found.values())
    assert "no CANN operator has been verified" in found["D0"][1]


def test_load_without_cann_names_every_path(monkeypatch, tmp_path, libraries):
    monkeypatch.setattr(runtime, "_loaded", None)
    with pytest.raises(native_ascend.AscendUnavailable) as failure:
        native_ascend.load(str(tmp_path), bridge=str(libraries[0]))
    for folder in ("lib64", "lib"):
        assert f"{tmp_path}/{folder}/libascendcl.so" in str(failure.value)


def test_diagnostics_say_what_there_is():
    report = native_ascend.diagnostics()
    assert report["abi"].startswith(("not checked", "unknown"))
    assert {"bridge", "cann", "loaded"} <= report.keys()


GATES = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
import native_ascend as na
from double import Double
from pathlib import Path
double = Double(Path({double!r}))
def load(**options):
    try:
        na.load(str(double.path), bridge={bridge!r}, **options)
    except na.AscendError as error:
        print(type(error).__name__, '|', error)
    else:
        print('loaded', na.current())
load()
double.set_text('version', '9.1.0'); load(allow_double=True)
double.set_text('version', ''); load(allow_double=True)
double.set_text('version', '9.2.0'); double.set_text('soc', 'Ascend910B'); load(allow_double=True)
double.set_text('soc', 'ascend950dt'); double.set('devices', 0); load(allow_double=True)
double.set('devices', 1); double.fault('aclInit', 1, 500000); load(allow_double=True)
double.fault('aclInit', 1, 100002); load(allow_double=True)
load(allow_double=True)
load(allow_double=True, allow_unverified=True)
"""


def test_versions_chips_devices_and_doubles_are_refused_each_with_its_reason(libraries, root):
    bridge, double = libraries
    here = root / "tests" / "native_ascend"
    code = GATES.format(root=str(root), here=str(here), double=str(double.path), bridge=str(bridge))
    lines = run(code, JAX_PLATFORMS="cpu").splitlines()
    expected = [
        ("AscendError", "is a test double"),
        ("AscendUnavailable", "CANN 9.2 is needed, installed is 9.1.0"),
        ("AscendUnavailable", "CANN version is unknown"),
        ("AscendUnavailable", "an Ascend950 is needed, found is Ascend910B"),
        ("AscendUnavailable", "found no device"),
        ("AscendError", "aclInit returned 500000"),
        ("loaded", "TEST DOUBLE"),
        ("loaded", "TEST DOUBLE"),
        ("AscendError", "one runtime a process"),
    ]
    assert len(lines) == len(expected)
    for line, (kind, text) in zip(lines, expected, strict=True):
        assert line.startswith(kind), line
        assert text in line, line


MISSING = """
import sys
sys.path[:0] = [{root!r}]
import native_ascend as na
for path in {paths!r}:
    try:
        na.load(path, bridge={bridge!r}, allow_double=True)
    except na.AscendError as error:
        print(type(error).__name__, '|', error)
found = [name for name, status in na.current().operators.items() if status == 'missing']
print(na.current().device_count, found)
"""


def test_missing_symbols_are_listed_together_and_missing_operators_one_by_one(
    libraries, root, tmp_path
):
    """Copies of the double whose symbol names are spelled wrong in its table of strings."""
    bridge, double = libraries
    whole = double.path.read_bytes()
    paths = []
    for number, names in enumerate((("aclrtMalloc", "aclCreateTensor"), ("aclnnAbs",))):
        text = whole
        for name in names:
            wanted = b"\0" + name.encode() + b"\0"
            assert wanted in text
            text = text.replace(wanted, wanted[:-2] + b"_\0")
        path = tmp_path / f"without_{number}.so"
        path.write_bytes(text)
        paths.append(str(path))
    code = MISSING.format(root=str(root), paths=paths, bridge=str(bridge))
    refused, left = run(code, JAX_PLATFORMS="cpu").splitlines()
    assert refused == "AscendUnavailable | " + refused.split("| ")[1]
    assert "symbols are missing: aclrtMalloc, aclCreateTensor" in refused
    assert left == "1 ['aclnnAbs']"


def test_a_library_of_a_newer_ffi_api_is_refused_and_jax_still_works(tmp_path, libraries):
    source, library = tmp_path / "new.c", tmp_path / "new.so"
    source.write_text("int dij_ffi_api_version(void) { return 99; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(native_ascend.AscendUnavailable, match=r"FFI API 0\.99"):
        runtime.native.open_library(library)
    import jax.numpy as jnp

    assert float(jnp.ones(2).sum()) == 2.0
