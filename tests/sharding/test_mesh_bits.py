"""On every mesh of emulated devices the network has the bits of one device (G1, G6)."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

#: Every (er, dp, cp) with product 1, 2, 4, 8.
ALL = [
    {"er": er, "dp": dp, "cp": cp}
    for er, dp, cp in product((1, 2, 4, 8), repeat=3)
    if er * dp * cp in (1, 2, 4, 8)
]
FAST = [{"cp": 2}, {"dp": 4}, {"er": 2, "dp": 2, "cp": 2}, {"dp": 8}]


@pytest.fixture
def run(root, fixtures_dir):
    def call(name, *arguments):
        words = [str(fixtures_dir / a) if a.startswith("tiny") else a for a in arguments]
        script = root / "tests" / "sharding" / "mesh_runs.py"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, str(script), name, *words],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return call


def all_equal(found):
    assert found
    assert all(found.values()), [mesh for mesh, equal in found.items() if not equal]


def test_there_are_twenty_meshes():
    assert len(ALL) == 20


def test_cached_rows_have_the_bits_of_one_device(run):
    all_equal(run("equal", "tiny_v41", "float32", "cached", *map(json.dumps, FAST)))


@pytest.mark.slow
@pytest.mark.accept(10)
def test_pure_functions_in_checkpoint_arithmetic(run):
    all_equal(run("equal", "tiny_v41", "checkpoint", "forms", json.dumps(FAST[2])))


def test_the_engine_with_drafts_and_prefix_cache(run):
    all_equal(run("equal", "tiny_v41", "checkpoint", "engine", json.dumps({"dp": 2, "cp": 2})))


@pytest.mark.slow
@pytest.mark.accept(10)
def test_deepseek_v4(run):
    all_equal(run("equal", "tiny_v4", "float32", "cached", json.dumps({"dp": 2, "cp": 4})))


def test_exchanges_of_every_cap_and_routing(run):
    found = run("exchanges")
    assert found["cases"] == 48
    assert found["wrong"] == []


def test_split_arrays_come_to_the_host_in_parts(run):
    assert run("gathering") == []


def test_weights_go_straight_to_their_shards(run, tmp_path):
    found = run("loading", "tiny_v41", json.dumps({"dp": 8}), str(tmp_path / "converted"))
    assert found["unlike"] == []
    assert found["placed"] == found["leaves"]


@pytest.mark.parametrize("mesh", [{"dp": 4, "cp": 2}, {"er": 2, "dp": 2, "cp": 2}])
def test_devices_hold_what_describe_says(run, mesh):
    found = run("footprint", "tiny_v41", json.dumps(mesh))
    for held, said in zip(found["held"], found["said"], strict=True):
        assert abs(held - said) <= 0.01 * said
    assert found["experts"] * found["ranks"] == found["experts_total"]


@pytest.mark.slow
@pytest.mark.accept(10)
@pytest.mark.parametrize(
    ("mesh", "extras"),
    [
        ({"dp": 2, "cp": 2}, "4"),
        ({"er": 2, "dp": 4}, ""),
    ],
)
def test_experts_move_while_sequences_are_decoded(run, mesh, extras):
    found = run("rebalance", "tiny_v41", json.dumps(mesh), extras)
    assert found["equal"]
    assert min(found["moved"]) > 0
    assert found["slots"] == 8 + int(extras or 0)
    assert found["rows"][0] == found["rows"][1]


@pytest.mark.slow
@pytest.mark.accept(10)
@pytest.mark.parametrize(
    ("source", "mesh", "extras"),
    [
        ("tiny_v41", {"dp": 2, "cp": 2}, "4"),
        ("tiny_v41", {"er": 2, "dp": 4}, "0"),
        ("tiny_v41", {"cp": 3}, "3"),
        ("nano", {"dp": 4}, "8"),
    ],
)
def test_an_engine_places_experts_again_while_it_serves(run, source, mesh, extras):
    found = run("moving", source, json.dumps(mesh), extras)
    assert found["equal"]
    assert found["compiled"] == 0
    assert found["model_is_whole"]
    assert found["is_split"]
    assert found["decisions"] > 1
    assert found["placed_layers"] > 1
    assert found["moved_slots"] > 2
    assert min(found["imbalance"]) >= 1.0


@pytest.mark.slow
@pytest.mark.accept(10)
@pytest.mark.parametrize("mesh", [{"dp": 2, "cp": 2}, {"er": 2, "dp": 2, "cp": 2}])
def test_bytes_that_an_engine_holds_and_exchanges(run, mesh):
    found = run("engine_program", "tiny_v41", json.dumps(mesh))
    assert abs(found["held"] - found["said"]) <= 0.01 * found["said"]
    assert found["compiled"] == 0
    assert found["kinds"] == ["all-gather", "all-reduce", "all-to-all"]
    assert found["adds"] == ["s32"]
    assert found["lint"] == []
    assert found["exchanged"] == found["by_formula"]
    # Gathered are rows of the step alone, in their stored form: never a weight.
    assert {shape[0] for _, shape in found["gathered"]} == {found["rows"]}
    assert ["u8", [found["rows"], found["window"]]] in found["gathered"]


def test_collectives_of_the_program(run):
    found = run("program", "tiny_v41", json.dumps({"dp": 2, "cp": 2}))
    assert set(found["kinds"]) == {"all-gather", "all-reduce", "all-to-all"}
    assert found["adds_floats"] == found["lint"] == []
    assert found["gathers_weights"] == []
    assert found["compiled"] == 1
    # A row of width 64 travels as codes and scales, its answer as BF16, an Engram row as bytes.
    sent = {(dtype, width) for dtype, width, _ in found["exchanged"]}
    assert {("u8", 64), ("u8", 2), ("u16", 64), ("u8", 32), ("u8", 1)} <= sent
    assert {count for _, _, count in found["exchanged"]} == {4}


@pytest.mark.slow
@pytest.mark.accept(10)
@pytest.mark.parametrize("part", range(4))
def test_the_engine_with_drafts_and_prefix_cache_on_every_mesh(run, part):
    all_equal(run("equal", "tiny_v41", "checkpoint", "engine", *map(json.dumps, ALL[part::4])))


#: For what is not the engine's, and for models beside tiny_v41.
SOME = [{"er": 2, "dp": 2, "cp": 2}, {"dp": 4}, {"cp": 4}]


@pytest.mark.slow
@pytest.mark.accept(10)
@pytest.mark.parametrize(
    ("source", "numerics", "kind"),
    [
        ("nano", "checkpoint", "engine"),
        ("nano", "checkpoint", "forms"),
        ("nano", "checkpoint", "cached"),
        ("tiny_v41", "float32", "engine"),
        ("tiny_v41", "float32", "forms"),
        ("tiny_v41", "checkpoint", "cached"),
        ("tiny_v4", "float32", "cached"),
        ("tiny_v4", "float32", "engine"),
    ],
)
def test_models_and_forms_on_some_meshes(run, source, numerics, kind):
    all_equal(run("equal", source, numerics, kind, *map(json.dumps, SOME)))


@pytest.mark.slow
@pytest.mark.accept(10)
def test_the_order_of_devices_does_not_matter(run):
    assert run("shuffled", "tiny_v41") == {"equal": True}
