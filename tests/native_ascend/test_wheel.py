"""The wheel is pure Python: what only a checkout can use is left out (ascend.md 8.2)."""

import pytest

pytestmark = pytest.mark.accept(13)

LEFT_OUT = ("src", "include", "double", "lib", "CMakeLists.txt", "exports.map")


@pytest.fixture(scope="module")
def wheel(root):
    """Paths that the wheel holds, as its build back end lists them."""
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(root))
    return {file.distribution_path for file in builder.recurse_included_files()}


def test_the_wheel_holds_every_python_file_of_the_packages(wheel, root):
    for package in ("deepinfer_jax", "pallas_kernels", "sharding", "native_ascend"):
        files = {str(path.relative_to(root)) for path in (root / package).rglob("*.py")}
        assert files
        assert files <= wheel


def test_the_wheel_leaves_the_native_sources_out(wheel, root):
    native = {path for path in wheel if path.startswith("native_ascend/")}
    assert all(path.endswith(".py") for path in native), native
    for name in LEFT_OUT[:3] + LEFT_OUT[4:]:
        assert (root / "native_ascend" / name).exists(), "renamed: the exclusion is stale"


def test_a_bridge_that_was_built_stays_out(root, monkeypatch):
    """Not for git's sake alone: a source archive has no .gitignore."""
    from hatchling.builders.wheel import WheelBuilder

    config = WheelBuilder(str(root)).config
    for name in LEFT_OUT:
        assert f"/native_ascend/{name}" in config.target_config["exclude"]
        path = f"native_ascend/{name}" if "." in name else f"native_ascend/{name}/file"
        assert config.path_is_excluded(path), path
