"""Converted checkpoints: bytes of every leaf, restart, damaged folders, replacement."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint import convert
from deepinfer_jax.checkpoint.convert import is_converted, load_converted, save_converted
from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.checkpoint.orbax_store import read_arrays, write_arrays
from deepinfer_jax.cli import main as cli
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.loading import load, read_tokenizer
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.model.engram.vocabulary import build_token_map
from deepinfer_jax.model.forward import score

MODELS = ("tiny_v41", "tiny_v4")
IDS = [0, 17, 290, 511, 3, 3, 44, 128, 9]


@pytest.fixture(scope="module")
def converted(fixtures_dir, tmp_path_factory):
    """Converted copies of the tiny checkpoints, by name."""
    root = tmp_path_factory.mktemp("converted")
    for name in MODELS:
        source = fixtures_dir / name
        config = read_config(source)
        save_converted(load_params(source, config), config, root / name, tokenizer_from=source)
    return root


@pytest.fixture
def damaged(converted, tmp_path):
    """A converted tiny_v41 that a test may damage."""
    return shutil.copytree(converted / "tiny_v41", tmp_path / "damaged")


def edit_manifest(folder, change):
    path = folder / convert.MANIFEST
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def assert_same_bits(got, wanted):
    named = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for leaf, (path, expected) in zip(jax.tree.leaves(got), named, strict=True):
        assert leaf.shape == expected.shape, path
        assert leaf.dtype == expected.dtype, path
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes(), path


@pytest.mark.accept(3)
@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_comes_back_bit_for_bit(fixtures_dir, converted, name):
    folder = converted / name
    assert is_converted(folder)
    assert not is_converted(fixtures_dir / name)
    config = read_config(folder)
    assert config == read_config(fixtures_dir / name)
    loaded = load_params(fixtures_dir / name, config)
    seen = []
    restored = load_converted(
        folder, config, verify=True, progress=lambda done, total, _: seen.append((done, total))
    )
    assert jax.tree.structure(restored) == jax.tree.structure(loaded)
    assert_same_bits(restored, loaded)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {loaded.embed.sharding}
    assert seen[-1][0] == seen[-1][1] == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))


def test_dtypes_of_the_store_are_those_of_the_tree(converted):
    leaves = json.loads((converted / "tiny_v41" / convert.MANIFEST).read_text())["leaves"]
    assert {record["dtype"] for record in leaves.values()} == {
        "float8_e4m3fn",
        "bfloat16",
        "uint8",
        "float32",
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (converted / "tiny_v41" / name).is_file()


@pytest.mark.accept(3)
@pytest.mark.parametrize(
    "numerics", ["checkpoint", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_a_restart_gives_the_same_logits(fixtures_dir, converted, numerics):
    model = load(fixtures_dir / "tiny_v41", numerics=numerics)
    folder = converted / "tiny_v41"
    config = read_config(folder)
    params = load_converted(folder, config)
    if numerics == "float32":
        params = expand_float32(params)
    token_map = build_token_map(read_tokenizer(folder), config.engram, config.vocab_size)
    params = replace(params, engram=replace(params.engram, token_map=token_map))
    config = replace(config, execution=model.config.execution)
    assert config == model.config

    run = jax.jit(partial(score, config=config))
    before = np.asarray(run(model.params, token_ids=np.asarray(IDS)))
    after = np.asarray(run(params, token_ids=np.asarray(IDS)))
    assert np.isfinite(before).all()
    assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("place", ["host", "mapped"])
def test_tables_on_the_host_are_written_like_those_on_the_device(
    fixtures_dir, converted, tmp_path, place
):
    source = fixtures_dir / "tiny_v41"
    config = read_config(source)
    params = load_params(source, config, engram=place)
    save_converted(params, config, tmp_path / "new", tokenizer_from=source)
    hashes = [
        json.loads((folder / convert.MANIFEST).read_text())["leaves"]
        for folder in (tmp_path / "new", converted / "tiny_v41")
    ]
    assert hashes[0] == hashes[1]
    assert_same_bits(load_converted(tmp_path / "new", config), load_params(source, config))


def test_tables_can_be_restored_to_the_host(fixtures_dir, converted):
    config = read_config(converted / "tiny_v41")
    restored = load_converted(converted / "tiny_v41", config, engram="host", verify=True)
    wanted = load_params(fixtures_dir / "tiny_v41", config, engram="host")
    for table, expected in zip(restored.engram.tables, wanted.engram.tables, strict=True):
        assert isinstance(table, HostTable)
        assert not table.is_mapped
        ids = np.arange(table.shape[0])
        np.testing.assert_array_equal(table.lookup(ids), expected.lookup(ids))
    with pytest.raises(CheckpointError, match='"mapped"'):
        load_converted(converted / "tiny_v41", config, engram="mapped")


def test_an_expanded_tree_is_refused(fixtures_dir, tmp_path):
    source = fixtures_dir / "tiny_v41"
    model = load(source, numerics="float32")
    with pytest.raises(CheckpointError, match='numerics="checkpoint"'):
        save_converted(model, model.config, tmp_path / "new", tokenizer_from=source)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_accepted_in_place_of_its_parameters(fixtures_dir, converted, tmp_path):
    source = fixtures_dir / "tiny_v41"
    model = load(source)
    save_converted(model, model.config, tmp_path / "new", tokenizer_from=source)
    manifests = [
        (f / convert.MANIFEST).read_text() for f in (tmp_path / "new", converted / source.name)
    ]
    assert manifests[0] == manifests[1]


def test_engram_needs_a_tokenizer(fixtures_dir, tmp_path):
    source = fixtures_dir / "tiny_v41"
    config = read_config(source)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        save_converted(load_params(source, config), config, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


EMBED = "embed"
MANIFEST_DAMAGE = {
    "a leaf is not listed": (lambda m: m["leaves"].pop(EMBED), "embed is missing"),
    "an unknown leaf": (
        lambda m: m["leaves"].update(extra=m["leaves"][EMBED]),
        "extra is unknown",
    ),
    "wrong shape": (
        lambda m: m["leaves"][EMBED].update(shape=[1, 2]),
        r"embed is bfloat16\[1, 2\] instead of bfloat16\[512, \d+\]",
    ),
    "wrong dtype": (lambda m: m["leaves"][EMBED].update(dtype="float32"), "embed is float32"),
    "no such dtype": (lambda m: m["leaves"][EMBED].update(dtype="float5"), "cannot be read"),
    "newer format": (
        lambda m: m.update(format_version=9, package_version="7.1"),
        r"format 9, written by deepinfer-jax 7\.1: upgrade",
    ),
    "another format": (lambda m: m.update(format="other"), "must be a manifest"),
    "no leaves": (lambda m: m.pop("leaves"), "cannot be read"),
}


@pytest.mark.parametrize("case", MANIFEST_DAMAGE)
def test_a_damaged_manifest_is_named(damaged, case):
    change, message = MANIFEST_DAMAGE[case]
    edit_manifest(damaged, change)
    with pytest.raises(CheckpointError, match=message):
        load_converted(damaged, read_config(damaged))


def remove_manifest(folder):
    (folder / convert.MANIFEST).unlink()


def cut_manifest(folder):
    path = folder / convert.MANIFEST
    path.write_text(path.read_text()[:100])


def remove_arrays(folder):
    shutil.rmtree(folder / convert.ARRAYS)


def remove_leaf(folder):
    rewrite(folder, lambda arrays: arrays.pop(EMBED))


def reshape_leaf(folder):
    rewrite(folder, lambda arrays: arrays.update({EMBED: arrays[EMBED].T}))


def rewrite(folder, change):
    store = folder / convert.ARRAYS
    leaves = json.loads((folder / convert.MANIFEST).read_text())["leaves"]
    targets = {
        n: jax.ShapeDtypeStruct(tuple(r["shape"]), np.dtype(r["dtype"])) for n, r in leaves.items()
    }
    arrays = read_arrays(store, targets)
    change(arrays)
    shutil.rmtree(store)
    write_arrays(store, arrays)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_manifest, "manifest that lists its leaves"),
        (cut_manifest, "manifest that lists its leaves"),
        (remove_arrays, "must be readable by Orbax"),
        (remove_leaf, f"{convert.ARRAYS}: embed is missing"),
        (reshape_leaf, f"{convert.ARRAYS}: embed is bfloat16"),
    ],
)
def test_a_partial_folder_is_named(damaged, damage, message):
    config = read_config(damaged)
    damage(damaged)
    assert is_converted(damaged)
    with pytest.raises(CheckpointError, match=message):
        load_converted(damaged, config)


LOAD_SCRIPT = """
import sys
from deepinfer_jax.checkpoint.convert import load_converted
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.errors import CheckpointError
try:
    load_converted(sys.argv[1], read_config(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.accept(3)
def test_missing_data_files_are_named(root, damaged):
    # In a process of its own: the other reads of a failed group end when Orbax's event loop is
    # gone, at any later time, with complaints on stderr.
    for path in (damaged / convert.ARRAYS).rglob("d"):
        shutil.rmtree(path)
    command = [sys.executable, "-c", LOAD_SCRIPT, str(damaged)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "must be readable by Orbax" in done.stdout
    assert "convert the checkpoint again" in done.stdout


def test_changed_values_are_found_by_their_hash(damaged):
    def change(arrays):
        flipped = arrays[EMBED].copy()
        flipped.view(np.uint8)[3, 5] ^= 1
        arrays[EMBED] = flipped

    config = read_config(damaged)
    rewrite(damaged, change)
    load_converted(damaged, config)
    with pytest.raises(CheckpointError, match="SHA-256 of the manifest: embed of 1"):
        load_converted(damaged, config, verify=True)


def test_another_config_is_refused_before_anything_is_read(converted, monkeypatch):
    monkeypatch.setattr(convert, "read_arrays", lambda *_: pytest.fail("an array was read"))
    config = read_config(converted / "tiny_v41")
    with pytest.raises(CheckpointError, match="instead of"):
        load_converted(converted / "tiny_v41", replace(config, vocab_size=1024))


def test_a_failed_write_leaves_the_old_folder(fixtures_dir, damaged, monkeypatch):
    def fail(*_):
        raise CheckpointError("disk full")

    before = (damaged / convert.MANIFEST).read_bytes()
    monkeypatch.setattr(convert, "write_arrays", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        cli.command_app("convert")(
            [str(fixtures_dir / "tiny_v41"), str(damaged), "--overwrite"], standalone_mode=False
        )
    assert (damaged / convert.MANIFEST).read_bytes() == before
    assert list(damaged.parent.iterdir()) == [damaged]


@pytest.mark.parametrize("name", MODELS)
def test_command_writes_and_replaces(fixtures_dir, tmp_path, capsys, name):
    source, target = fixtures_dir / name, tmp_path / "deep" / "er"

    def run(*arguments):
        cli.command_app("convert")([*map(str, arguments)], standalone_mode=False)

    run(source, target)
    assert "MB on disk" in capsys.readouterr().err
    config = read_config(target)
    assert_same_bits(load_converted(target, config, verify=True), load_params(source, config))
    with pytest.raises(CheckpointError, match="--overwrite"):
        run(source, target)
    (target / "old").touch()
    run(source, target, "--overwrite")
    assert not (target / "old").exists()
    assert [path.name for path in target.parent.iterdir()] == ["er"]
    with pytest.raises(CheckpointError, match="converted already"):
        run(target, tmp_path / "again")


def test_a_folder_with_other_things_is_never_replaced(fixtures_dir, tmp_path):
    (tmp_path / "thesis.tex").touch()
    for flags in ([], ["--overwrite"]):
        with pytest.raises(CheckpointError, match="holds something else"):
            cli.command_app("convert")(
                [str(fixtures_dir / "tiny_v4"), str(tmp_path), *flags], standalone_mode=False
            )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_target_may_not_contain_the_source(fixtures_dir, copy_of):
    source = copy_of("tiny_v4").folder
    with pytest.raises(CheckpointError, match="must not contain SOURCE"):
        cli.command_app("convert")([str(source), str(source.parent)], standalone_mode=False)


MESH_SCRIPT = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from deepinfer_jax.checkpoint.convert import load_converted
from deepinfer_jax.config.hf import read_config

mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)

def placement(spec, shape):
    fits = len(shape) >= 2 and shape[-2] % 2 == 0 and shape[-1] % 2 == 0
    axes = (None,) * (len(shape) - 2) + ("rows", "columns") if fits else ()
    return NamedSharding(mesh, P(*axes))

config = read_config(sys.argv[1])
one = load_converted(sys.argv[1], config)
many = load_converted(sys.argv[1], config, placement=placement, verify=True)
shard = many.layers.wo_a.addressable_shards[0].data
assert shard.shape[-1] * 2 == many.layers.wo_a.shape[-1]
for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), a.shape
"""


def test_leaves_are_restored_into_the_shards_of_a_mesh(root, converted):
    flags = "--xla_force_host_platform_device_count=4"
    subprocess.run(
        [sys.executable, "-c", MESH_SCRIPT, str(converted / "tiny_v41")],
        cwd=root,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        check=True,
    )
