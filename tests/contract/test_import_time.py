"""`import deepinfer_jax` is cheap and touches no device (architecture.md 6)."""

import json
import os
import statistics
import subprocess
import sys

import pytest

MEASURE = """
import json, sys, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import deepinfer_jax
end = time.perf_counter()
from jax._src import xla_bridge
print(json.dumps({"jax_s": middle - start, "own_s": end - middle,
                  "backends": sorted(xla_bridge._backends)}))
"""
LIST_MODULES = """
import json, sys
import deepinfer_jax
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
HEAVY = {
    "jax", "flax", "orbax", "optax", "tokenizers", "deepseek_recipe", "llguidance",
    "huggingface_hub", "rich", "typer", "native_ascend",
}  # fmt: skip


def run(code):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPROFILEIMPORTTIME"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def measured():
    run(MEASURE)  # writes the bytecode of a fresh installation
    return [run(MEASURE) for _ in range(5)]


@pytest.mark.accept(2)
def test_import_adds_at_most_a_third_of_a_second_to_jax(measured):
    own = statistics.median(row["own_s"] for row in measured)
    jax = statistics.median(row["jax_s"] for row in measured)
    print(f"import jax {jax:.3f} s, import deepinfer_jax after it {own:.3f} s (medians of 5)")
    assert own <= 0.3


@pytest.mark.accept(2)
def test_import_initialises_no_backend(measured):
    assert all(row["backends"] == [] for row in measured)


def test_a_backend_would_be_noticed():
    row = run(MEASURE.replace("end = ", "jax.devices()\nend = "))
    assert row["backends"]


def test_import_alone_loads_nothing_heavy():
    assert HEAVY & set(run(LIST_MODULES)) == set()
