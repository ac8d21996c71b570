"""Loading: every leaf holds the bytes of its file tensors, in order; tables; failures."""

import gc
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from deepinfer_jax.checkpoint import loader
from deepinfer_jax.checkpoint.inventory import spec_leaves, spec_tree
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.checkpoint.safetensors import open_store
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.spec import scale_name
from pallas_kernels.core.quant_array import QuantArray

MODELS = ("tiny_v41", "tiny_v4")


def leaves_of(params):
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantArray))


def file_bytes(folder, names):
    """Returns the payload of tensors, one after another, by a reader of its own."""
    found = {}
    for path in folder.glob("model-*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        import json

        for name, record in json.loads(data[8 : 8 + length]).items():
            if name in names:
                start, stop = record["data_offsets"]
                found[name] = data[8 + length + start : 8 + length + stop]
    return b"".join(found[name] for name in names)


@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_has_the_bytes_of_its_tensors(fixtures_dir, name):
    folder = fixtures_dir / name
    config = read_config(folder)
    params = load_params(folder, config)
    assert isinstance(params, Params if name == "tiny_v41" else V4Params)
    specs, leaves = spec_leaves(spec_tree(config)), leaves_of(params)
    assert len(specs) == len(leaves)
    for spec, leaf in zip(specs, leaves, strict=True):
        if spec.load_as_bf16 or spec.dtype == "I64":
            continue
        payload = leaf.payload if isinstance(leaf, QuantArray) else leaf
        assert payload.shape == (*spec.stack, *spec.payload_shape)
        assert np.asarray(payload).tobytes() == file_bytes(folder, spec.names), spec.names[0]
        if spec.scale_shape is None:
            assert str(payload.dtype) == {"BF16": "bfloat16", "F32": "float32"}[spec.dtype]
            continue
        assert leaf.format == spec.format
        assert leaf.scale.shape == (*spec.stack, *spec.scale_shape)
        assert str(leaf.scale.dtype) == "uint8"
        scales = tuple(map(scale_name, spec.names))
        assert np.asarray(leaf.scale).tobytes() == file_bytes(folder, scales)
        expected = "uint8" if spec.format == "fp4_row32" else "float8_e4m3fn"
        assert str(payload.dtype) == expected


def test_stacks_follow_layers_then_experts(fixtures_dir):
    folder = fixtures_dir / "tiny_v41"
    params = load_params(folder, read_config(folder))
    store = open_store(folder)
    for layer, expert in ((0, 0), (3, 5), (9, 7)):
        stored = store[f"layers.{layer}.ffn.experts.{expert}.w2.weight"].read()
        leaf = params.layers.experts.w2
        np.testing.assert_array_equal(leaf.payload[layer, expert], stored.view(np.uint8))
    np.testing.assert_array_equal(
        params.indexers.weights_proj[3], store["layers.8.attn.indexer.weights_proj.weight"].read()
    )
    np.testing.assert_array_equal(
        params.compressors[1].wkv[0], store["layers.6.attn.compressor.wkv.weight"].read()
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit", [1, 3000, 2**26])
def test_wo_a_becomes_bf16_exactly(fixtures_dir, name, limit):
    folder = fixtures_dir / name
    config = read_config(folder)
    loaded = load_params(folder, config, expand_limit_bytes=limit).layers.wo_a
    assert loaded.dtype == ml_dtypes.bfloat16
    store, side = open_store(folder), config.dense_block_size
    for layer in range(config.num_hidden_layers):
        weight = store[f"layers.{layer}.attn.wo_a.weight"].read().astype(np.float64)
        scale = store[f"layers.{layer}.attn.wo_a.scale"].read().astype(np.float64)
        rows, columns = (np.arange(size) // side for size in weight.shape)
        expected = weight * 2.0 ** (scale[rows][:, columns] - 127)
        np.testing.assert_array_equal(np.asarray(loaded[layer]).astype(np.float64), expected)


def test_routing_tables_become_int32(fixtures_dir):
    folder = fixtures_dir / "tiny_v4"
    params = load_params(folder, read_config(folder))
    store = open_store(folder)
    assert str(params.tid2eid.dtype) == "int32"
    for layer in range(2):
        stored = store[f"layers.{layer}.ffn.gate.tid2eid"].read()
        np.testing.assert_array_equal(params.tid2eid[layer], stored)


def test_routing_table_outside_the_experts_is_refused(copy_of):
    copy = copy_of("tiny_v4")
    eight = (8).to_bytes(8, "little")
    copy.edit("layers.1.ffn.gate.tid2eid", lambda r: [r[0], r[1], r[2][:-8] + eight])
    with pytest.raises(CheckpointError, match=r"experts in \[0, 8\): received 0 to 8"):
        load_params(copy.folder, read_config(copy.folder))


@pytest.mark.parametrize("byte", [0, 254, 255])
def test_wo_a_scale_outside_bf16_is_refused(copy_of, byte):
    copy = copy_of("tiny_v41")
    copy.edit("layers.4.attn.wo_a.scale", lambda r: [r[0], r[1], bytes([byte]) * len(r[2])])
    with pytest.raises(CheckpointError, match=r"layers\.4\.attn\.wo_a\.weight must be exact"):
        load_params(copy.folder, read_config(copy.folder))


@pytest.mark.parametrize("place", ["host", "mapped"])
def test_tables_outside_the_device_have_the_same_rows(fixtures_dir, place):
    folder = fixtures_dir / "tiny_v41"
    config = read_config(folder)
    device = load_params(folder, config).engram.tables
    host = load_params(folder, config, engram=place).engram.tables
    for ours, reference in zip(host, device, strict=True):
        assert isinstance(ours, HostTable)
        assert ours.is_mapped == (place == "mapped")
        assert isinstance(ours.payload.base, np.memmap) == ours.is_mapped
        values = np.asarray(reference.dequantize())
        ids = np.arange(ours.shape[0]).reshape(-1, 8)
        rows = ours.lookup(ids)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, values[ids])


def test_host_table_is_a_static_leafless_node(fixtures_dir):
    folder = fixtures_dir / "tiny_v41"
    table = load_params(folder, read_config(folder), engram="host").engram.tables[0]
    assert jax.tree.leaves(table) == []
    assert hash(table) == hash(jax.tree.map(lambda leaf: leaf, table))

    @jax.jit
    def rows(table, ids):
        shape = jax.ShapeDtypeStruct((*ids.shape, table.shape[1]), np.float32)
        return jax.pure_callback(table.lookup, shape, ids)

    ids = np.array([[0, 383], [7, 7]], np.int32)
    np.testing.assert_array_equal(rows(table, ids), table.lookup(ids))
    assert table.lookup(np.zeros((0,), np.int32)).shape == (0, 32)


@pytest.mark.parametrize("ids", [[-1], [384]])
def test_row_outside_the_table_is_refused(fixtures_dir, ids):
    folder = fixtures_dir / "tiny_v41"
    table = load_params(folder, read_config(folder), engram="mapped").engram.tables[0]
    with pytest.raises(InputError, match=r"row ids lie in \[0, 384\)"):
        table.lookup(np.array(ids))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["device", "mapped"])
def test_progress_reports_every_tensor_once(fixtures_dir, name, place):
    folder = fixtures_dir / name
    calls = []
    load_params(
        folder, read_config(folder), engram=place, progress=lambda *call: calls.append(call)
    )
    totals = {total for _, total, _ in calls}
    names = [name for *_, name in calls]
    assert len(names) == len(set(names)) == len(open_store(folder))
    assert totals == {calls[-1][0]}
    assert [done for done, *_ in calls] == sorted(done for done, *_ in calls)


def test_nothing_stays_after_a_failure(fixtures_dir, monkeypatch):
    folder = fixtures_dir / "tiny_v41"
    alive = []
    original = loader._Loader.leaf

    def leaf(self, spec, config):
        if len(alive) == 3:
            raise CheckpointError("late failure")
        array = original(self, spec, config)
        alive.append(weakref.ref(array))
        return array

    monkeypatch.setattr(loader._Loader, "leaf", leaf)
    with pytest.raises(CheckpointError, match="late failure") as caught:
        load_params(folder, read_config(folder))
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in alive] == [None, None, None]


def test_shards_of_a_mesh_get_their_rows(fixtures_dir):
    """A placement is asked for payload and scale of every leaf; parts are read by range."""
    folder = fixtures_dir / "tiny_v41"
    config = read_config(folder)
    asked = []

    def placement(spec, shape):
        asked.append((spec.names[0], shape))
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    load_params(folder, config, placement=placement)
    assert ("layers.0.attn.wkv.weight", (10, 64, 64)) in asked
    assert ("layers.0.attn.wkv.weight", (10, 2, 2)) in asked
    store = open_store(folder)
    entries = [store[f"layers.{layer}.attn.wq_b.weight"] for layer in range(4)]
    index = (slice(1, 3), slice(32, 96), slice(8, 40))
    part = loader._gather(entries, (4,), (4, 256, 96), index)
    whole = np.stack([entry.read() for entry in entries])
    np.testing.assert_array_equal(part.view(np.uint8), whole[index].view(np.uint8))


def test_plain_tensors_equal_the_library(fixtures_dir):
    folder = fixtures_dir / "tiny_v41"
    params = load_params(folder, read_config(folder))
    shard = folder / open_store(folder)["layers.0.hc_attn_fn"].path.name
    with safe_open(shard, "np") as file:
        expected = file.get_tensor("layers.0.hc_attn_fn")
    np.testing.assert_array_equal(params.layers.hc_attn.fn[0], expected)
