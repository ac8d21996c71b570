"""The safetensors reader: values, row ranges, and every way a file or an index can be damaged."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer_jax.checkpoint.safetensors import open_store, read_header
from deepinfer_jax.errors import CheckpointError


def write(path, header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + body)
    return path


def record(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_values_ranges_and_views_equal_the_library(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "f32": rng.standard_normal((7, 5)).astype(np.float32),
        "bf16": rng.standard_normal((4, 3, 2)).astype(ml_dtypes.bfloat16),
        "i64": rng.integers(-9, 9, (6,)),
        "i32": rng.integers(-9, 9, (2, 2)).astype(np.int32),
        "u8": rng.integers(0, 255, (3, 8)).astype(np.uint8),
        "f16": rng.standard_normal((2,)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.5, np.float32),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    store = open_store(tmp_path)
    assert sorted(store) == sorted(arrays)
    for name, expected in arrays.items():
        entry = store[name]
        np.testing.assert_array_equal(entry.read(), expected)
        np.testing.assert_array_equal(entry.mapped(), expected)
        assert entry.read().dtype == expected.dtype
        assert not entry.mapped().flags.writeable or not expected.size
    for rows in (
        slice(0, 7),
        slice(2, 5),
        slice(6, 20),
        slice(3, 3),
        slice(None, 4),
        slice(-2, None),
    ):
        np.testing.assert_array_equal(store["f32"].read(rows), arrays["f32"][rows])
    with pytest.raises(ValueError, match="step 1"):
        store["f32"].read(slice(0, 4, 2))


def test_eight_bit_formats_keep_their_bytes(tmp_path):
    codes = bytes(range(256))
    header = {
        "w": record("F8_E4M3", [16, 16], 0, 256),
        "s": record("F8_E8M0", [256], 256, 512),
        "p": record("I8", [256], 512, 768),
    }
    write(tmp_path / "model.safetensors", header, codes * 3)
    store = open_store(tmp_path)
    assert [store[n].read().dtype.name for n in "wsp"] == ["float8_e4m3fn", "uint8", "int8"]
    assert all(store[name].read().tobytes() == codes for name in "wsp")


GOOD = record("F32", [2], 0, 8)
MALFORMED = {
    "not JSON": b"{",
    "not an object": [1],
    "not UTF-8": b"\xff\xff",
    "record is a list": {"a": []},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "unknown dtype": {"a": record("F4", [2], 0, 8)},
    "size is not that of the shape": {"a": record("F32", [3], 0, 8)},
    "negative size": {"a": record("F32", [-2], 0, 8)},
    "offsets run backwards": {"a": record("F32", [2], 8, 0)},
    "boolean in the shape": {"a": record("F32", [True, 2], 0, 8)},
    "three offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}},
    "gap": {"a": record("F32", [1], 4, 8)},
    "overlap": {"a": GOOD, "b": record("F32", [1], 4, 8)},
    "repeated name": b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}',
    "trailing bytes": {"a": record("F32", [1], 0, 4)},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused(tmp_path, case):
    path = write(tmp_path / "model.safetensors", MALFORMED[case], bytes(8))
    with pytest.raises(CheckpointError, match="well-formed"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_file_shorter_than_its_header_is_truncated(tmp_path, size):
    path = write(tmp_path / "model.safetensors", {"a": GOOD}, bytes(8))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize("length", [2**63, 10**9, 200])
def test_header_length_outside_the_file_is_refused(tmp_path, length):
    path = write(tmp_path / "model.safetensors", {"a": GOOD}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match="length of its header"):
        read_header(path)


def test_truncated_shard_says_how_many_bytes_are_there(copy_of):
    copy = copy_of("tiny_v41")
    path = copy.folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"are listed.*00002-of-00003.*truncated"):
        open_store(copy.folder)


def test_shard_that_shrinks_after_opening_is_noticed(copy_of):
    copy = copy_of("tiny_v41")
    store = open_store(copy.folder)
    entry = max(store.values(), key=lambda e: e.offset)
    entry.path.write_bytes(entry.path.read_bytes()[: entry.offset + 1])
    with pytest.raises(CheckpointError, match="must not shrink"):
        entry.read()


def test_absent_shard_is_named(copy_of):
    copy = copy_of("tiny_v41")
    (copy.folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"00003-of-00003.safetensors \(\d+ tensors\) is absent"
    ):
        open_store(copy.folder)


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither is there"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']
)
def test_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="the index must"):
        open_store(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "..", ""])
def test_index_may_not_leave_its_folder(tmp_path, shard):
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="only files of its own folder"):
        open_store(tmp_path)


def test_model_prefix_is_stripped(copy_of):
    copy = copy_of("tiny_v4")
    before = {name: entry.read().tobytes() for name, entry in open_store(copy.folder).items()}
    copy.rename(lambda name: name if name == "norm.weight" else f"model.{name}")
    after = {name: entry.read().tobytes() for name, entry in open_store(copy.folder).items()}
    assert after == before


def test_collision_after_stripping_is_refused(copy_of):
    copy = copy_of("tiny_v4")
    copy.add("model.norm.weight", ["BF16", [64], bytes(128)])
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' collide|'norm\.weight' coll"):
        open_store(copy.folder)
