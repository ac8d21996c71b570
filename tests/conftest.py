"""Options, environment and fixtures shared by all tests."""

import gc
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "jax"

# Before jax is imported, and as environment variables too, for subprocesses of tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax  # noqa: E402

jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_addoption(parser):
    parser.addoption(
        "--accept", type=int, default=None, metavar="N", help="only tests marked accept(N)"
    )


def pytest_collection_modifyitems(config, items):
    issue = config.getoption("--accept")
    if issue is None:
        return
    chosen, left = [], []
    for item in items:
        marked = any(issue in mark.args for mark in item.iter_markers("accept"))
        (chosen if marked else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen


def pytest_collection_finish():
    """Collects garbage less often: tracing makes many objects and few cycles, and each pass over
    the modules and programs of a whole session takes a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The golden files; their README says what each holds and at which tolerance it is compared."""
    return ROOT / "tests" / "fixtures"


#: Compiled programs are memory mappings, and Linux allows a process 65,530: beyond them XLA aborts.
MOST_MAPPINGS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _mappings_stay_few():
    """Forgets compiled programs after a file of tests, once there are many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
