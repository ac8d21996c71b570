"""`benchmarks.multi_gpu` runs as a whole on two emulated devices, and its lines say what they must.

Figures of emulated devices mean nothing; what is checked is that bits are compared, that a planted
difference is noticed, and that support.json is written for real devices alone.
"""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.multi_gpu import meshes, tasks_of
from benchmarks.multi_gpu_report import derived, proven, write_support
from sharding.exchange import exchange
from sharding.mesh import AXES, EXPERT_AXES, build_mesh

ONE_AND_TWO = (
    "collectives_slice_fast_off_dp2,slice_bits_slice_load_batch_one,slice_bits_slice_load_batch_dp2"
)


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    def call(parts, only):
        out = tmp_path_factory.mktemp("multi_gpu") / "out.jsonl"
        words = ["--small", "--json", str(out), "--parts", parts, "--only", only]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.multi_gpu", *words],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(root)},
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert not [line for line in lines if "error" in line]
        return lines

    return call


@pytest.fixture(scope="module")
def lines(run):
    return run("a,b", ONE_AND_TWO)


def bits_against_one(lines):
    """Checks every comparison of bits, and returns the meshes."""
    found = [line for line in lines if line["point"] == "bits against one device"]
    for line in found:
        assert line["is_equal"]
        assert line["planted_difference_noticed"]
        assert line["experts_are_split"]
        assert line["rows_that_differ"] == 0
        assert line["rows"] > 100
    assert proven(lines) is None  # emulated
    return [line["mesh"] for line in found]


def test_every_line_names_machine_mesh_and_flags(lines):
    assert lines
    for line in lines:
        assert line["devices"] == 2
        assert line["mesh"] in ({}, {"dp": 2})
        assert line["NCCL_NVLS_ENABLE"] == "0"
        assert {"platform", "jax", "code_sha256", "xla_flags", "seconds"} <= set(line)


def test_collectives_of_the_step_are_measured(lines):
    found = [line for line in lines if line["point"] == "collective"]
    assert {"all_to_all", "pmax"} <= {line["kind"] for line in found}
    used = [line for line in found if line["times_in_step"]]
    assert {"uint8", "int32"} <= {line["dtype"] for line in used}
    for line in found:
        assert line["received_bytes"] > 0
        assert line["us"] > 0


def test_bits_of_two_devices_are_those_of_one_and_a_flipped_bit_is_noticed(lines):
    assert bits_against_one(lines) == [{"dp": 2}]
    held = [line for line in lines if line["point"] == "bits of a mesh" and line["mesh"]]
    assert held[0]["experts_by_device"] == ["0..7", "8..15"]
    assert 0 < held[0]["planted_rows_that_differ"] < held[0]["rows"]


@pytest.mark.slow
@pytest.mark.accept(15)
def test_bits_on_every_mesh_of_two_devices(run):
    found = bits_against_one(run("b", "slice_bits_slice_load"))
    assert sorted(map(json.dumps, found)) == ['{"cp": 2}', '{"dp": 2}', '{"er": 2}']


def test_the_points_of_two_four_and_eight_devices():
    assert meshes(2) == [{"dp": 2}, {"cp": 2}, {"er": 2}]
    assert [len(meshes(devices)) for devices in (1, 2, 4, 8)] == [0, 3, 9, 19]
    names = [task["name"] for task in tasks_of("a,b,c,d", 4)]
    assert len(set(names)) == len(names)
    assert {task["part"] for task in tasks_of("a,d", 2)} == {"a", "d"}


def lines_of(tmp_path, differing=0, noticed=3, split=True, error=0.0):
    """Returns the lines of one device and of two, whose digests and logits lie in files."""
    for name, shift in (("one", 0), ("two", differing)):
        digests = np.asarray([f"{row + (row < shift) * 100}" for row in range(8)])
        logits = np.arange(1.0, 9.0, dtype=np.float32).reshape(2, 4) * (1 + error * (name == "two"))
        np.savez(tmp_path / f"{name}.npz", digests=digests, sample=logits, logits=logits)
    shared = {"what": "slice", "level": "batch", "kernels": {}, "finite": True, "rows": 8}
    plan = dict.fromkeys(("step_us", "memory_us", "arithmetic_us", "exchange_us", "latency_us"), 5)
    for name, mesh, rate in (("one", {}, 100.0), ("two", {"dp": 2}, 140.0)):
        both = {"file": str(tmp_path / f"{name}.npz"), "mesh": mesh} | shared
        yield both | {
            "point": "bits of a mesh",
            "planted_rows_that_differ": noticed,
            "experts_are_split": split,
        }
        yield both | {
            "point": "step",
            "case": "decode",
            "step_us": 50.0,
            "tokens_per_second": rate,
            "plan": plan,
            "longest_us": {"kernel": 1.0},
        }


@pytest.mark.parametrize(
    ("change", "equal", "void"),
    [
        ({}, True, False),
        ({"differing": 2}, False, False),
        ({"noticed": 0}, False, True),
        ({"split": False}, False, True),
    ],
)
def test_bits_count_only_where_the_comparison_is_sound(tmp_path, change, equal, void):
    found = [line for _, line in derived(list(lines_of(tmp_path, **change)))]
    (line,) = [line for line in found if line["point"] == "bits against one device"]
    assert line["is_equal"] is equal
    assert line["is_void"] is void
    assert line["rows_that_differ"] == change.get("differing", 0)


def test_efficiency_predictions_and_the_reason(tmp_path):
    found = [line for _, line in derived(list(lines_of(tmp_path)))]
    (line,) = [line for line in found if line["point"] == "step against one device"]
    assert line["efficiency"] == pytest.approx(0.7)
    assert line["reason"]["longest_us"] == {"kernel": 1.0}
    assert line["predicted_us"]["one_gpu_plus_exchange"] == pytest.approx(60.0)
    assert line["within_30_percent"] == {
        "as_shipped": False,
        "one_gpu_plus_exchange": True,
        "one_gpu_plus_differences": True,
    }


def test_support_is_written_from_what_is_proven(tmp_path, root):
    target = tmp_path / "support.json"
    shutil.copy(root / "support.json", target)
    before = target.read_text()
    machine = {"small": False, "platform": "gpu", "device": "NVIDIA H200", "devices": 2}
    equal = {"point": "bits against one device", "mesh": {"dp": 2}, "rows": 8, "what": "slice"}

    def enter(*some):
        source = tmp_path / "multi_gpu_h200.jsonl"
        source.write_text("".join(json.dumps(machine | equal | line) + "\n" for line in some))
        return write_support(source, target)

    assert "nothing is proven" in enter({"is_equal": False})
    assert "nothing is proven" in enter({"is_equal": True, "platform": "cpu"})
    assert "nothing is proven" in enter({"is_equal": True, "small": True})
    assert target.read_text() == before
    enter({"is_equal": True}, {"is_equal": False, "mesh": {"cp": 2}})
    rows = json.loads(target.read_text())["capabilities"]
    (row,) = [row for row in rows if row["name"].startswith("Several devices")]
    assert row["h200"]["status"] == "limits"
    assert row["h200"]["evidence"] == "benchmarks/results/multi_gpu_h200.jsonl"
    assert "meshes dp2" in row["h200"]["note"]
    assert "not on cp2" in row["h200"]["note"]
    assert rows[:3] == json.loads(before)["capabilities"][:3]


def test_one_packed_collective_gives_what_many_give():
    devices = jax.devices()[:1]
    mesh = build_mesh({"dp": 1}, devices)
    rng = np.random.default_rng(0)
    items = {
        "codes": rng.integers(0, 256, (12, 6), dtype=np.uint8),
        "row": np.arange(12, dtype=np.int32),
        "weight": rng.normal(size=12).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=(12, 3)), jnp.bfloat16),
    }
    valid = rng.random(12) < 0.7

    def answers(packed, cap):
        def serve(got, present):
            weight = jnp.where(present, got["weight"], 7.0)[:, None]
            return {"out": got["half"] * weight.astype(jnp.bfloat16), "codes": got["codes"]}

        def body(items, valid):
            target = jnp.zeros((12,), jnp.int32)
            return exchange(serve, items, target, valid, axes=EXPERT_AXES, cap=cap, packed=packed)

        spec = jax.P(AXES)
        run = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        return jax.tree.map(np.asarray, jax.jit(run)(items, valid))

    expected = answers(packed=False, cap=5)
    for packed, cap in ((True, 5), (True, 12), (False, 12)):
        found = answers(packed, cap)
        for name, leaf in expected.items():
            assert found[name].tobytes() == leaf.tobytes()
