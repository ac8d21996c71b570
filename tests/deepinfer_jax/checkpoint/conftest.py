"""Helpers that copy a tiny checkpoint and damage it."""

import json
import shutil
from pathlib import Path

import pytest

INDEX = "model.safetensors.index.json"


class Copy:
    """A writable copy of a checkpoint whose shards and index can be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_index(self):
        return json.loads((self.folder / INDEX).read_text())

    def write_index(self, index):
        (self.folder / INDEX).write_text(json.dumps(index))

    def shard_of(self, name):
        return self.folder / self.read_index()["weight_map"][name]

    def read_shard(self, path):
        """Returns {name: [dtype, shape, bytes]} of one shard."""
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        body = data[8 + length :]
        return {
            name: [r["dtype"], r["shape"], body[r["data_offsets"][0] : r["data_offsets"][1]]]
            for name, r in header.items()
        }

    def write_shard(self, path, tensors):
        header, parts, offset = {}, [], 0
        for name, (dtype, shape, data) in tensors.items():
            header[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + len(data)],
            }
            parts.append(data)
            offset += len(data)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))

    def edit(self, name, change):
        """Applies `change(record) -> record | None` to one tensor of its shard."""
        path = self.shard_of(name)
        tensors = self.read_shard(path)
        record = change(tensors.pop(name))
        if record is not None:
            tensors[name] = record
        self.write_shard(path, tensors)

    def rename(self, change):
        """Renames every tensor in the shards and the index; `change(name) -> name`."""
        index = self.read_index()
        for shard in set(index["weight_map"].values()):
            path = self.folder / shard
            tensors = self.read_shard(path)
            self.write_shard(path, {change(name): record for name, record in tensors.items()})
        index["weight_map"] = {change(name): s for name, s in index["weight_map"].items()}
        self.write_index(index)

    def add(self, name, record):
        """Adds a tensor to the first shard and to the index."""
        index = self.read_index()
        shard = min(index["weight_map"].values())
        tensors = self.read_shard(self.folder / shard)
        tensors[name] = record
        self.write_shard(self.folder / shard, tensors)
        index["weight_map"][name] = shard
        self.write_index(index)


@pytest.fixture
def copy_of(fixtures_dir, tmp_path):
    """Returns a function that copies a fixture checkpoint by name."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        for path in (fixtures_dir / name).iterdir():
            if path.name == "config.json" or path.name.startswith("model"):
                shutil.copyfile(path, folder / path.name)
        return Copy(folder)

    return make
