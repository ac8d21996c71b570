"""Writes trained parameters as a checkpoint in the released layout (model.md 2).

The codes are those of `quantise`, so loading the folder with `numerics="float32"` gives the very
values that the training forward used.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.hf import config_to_hf
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.spec import ParamSpec, scale_name
from deepinfer_jax.training.quantise import quantise, stored_value

#: Payload of one shard; below 4 MiB so that the embedded copy passes the repository's file limit.
SHARD_BYTES = 3_500_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

Tensor = tuple[str, str, np.ndarray]  # name, safetensors dtype, array of that item size


def export_checkpoint(
    params: Params,
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer_from: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes config, shards, index and tokenizer files into a new or empty folder; returns it.

    Args:
        params: Float32 master parameters.
        config: Their config.
        folder: Where to write; files of an earlier export there are replaced.
        tokenizer_from: Folder whose tokenizer files are copied.
        shard_bytes: Payload after which the next shard begins.

    Raises:
        CheckpointError: A parameter is not finite, or `tokenizer_from` has no tokenizer.json.
    """
    if tokenizer_from is not None and not (tokenizer_from / TOKENIZER_FILES[0]).is_file():
        raise CheckpointError(f"tokenizer_from must hold tokenizer.json, {tokenizer_from} has none")
    layers = replace(params.layers, gate_bias_vl=params.layers.gate_bias)
    params = replace(params, layers=layers)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    shards = _shards(stored_tensors(params, config), shard_bytes)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard)
        weight_map |= dict.fromkeys((tensor[0] for tensor in shard), name)
        total += sum(tensor[2].nbytes for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config_to_hf(config))
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file() and tokenizer_from.resolve() != folder.resolve():
                shutil.copyfile(tokenizer_from / name, folder / name)
    return folder


def stored_tensors(params: Params, config: ModelConfig) -> Iterator[Tensor]:
    """Yields every tensor of the checkpoint, each scale after its weight.

    Raises:
        CheckpointError: A parameter is not finite.
    """
    specs = jax.tree.leaves(spec_tree(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    leaves = jax.tree.leaves(params)
    for spec, leaf in zip(specs, leaves, strict=True):
        if not np.isfinite(np.asarray(leaf)).all():
            raise CheckpointError(f"only finite parameters are written, {spec.names[0]} is not")
    stored = _stored_leaves(
        leaves, tuple(specs)
    )  # one program: leaf by leaf would compile hundreds
    for spec, leaf in zip(specs, stored, strict=True):
        yield from _leaf_tensors(spec, leaf)


@partial(jax.jit, static_argnums=1)
def _stored_leaves(leaves: list[Any], specs: tuple[ParamSpec, ...]) -> list[Any]:
    return [
        stored_value(leaf, spec) if spec.format == "plain" else quantise(leaf, spec.format)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def _leaf_tensors(spec: ParamSpec, stored: Any) -> Iterator[Tensor]:
    if spec.format == "plain":
        values = np.asarray(stored)
        if spec.dtype == "BF16":
            values = values.astype(ml_dtypes.bfloat16)  # exact: rounded already
        flat = values.reshape(-1, *spec.shape)
        yield from ((name, spec.dtype, flat[place]) for place, name in enumerate(spec.names))
        return
    payload = np.asarray(stored.payload).reshape(-1, *spec.payload_shape)
    scale = np.asarray(stored.scale).reshape(-1, *(spec.scale_shape or ()))
    for place, name in enumerate(spec.names):
        yield name, spec.dtype, payload[place]
        yield scale_name(name), "F8_E8M0", scale[place]


def _shards(tensors: Iterator[Tensor], limit: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        # A weight and its scale stay together (model.md 2.1, Engram tables).
        if size >= limit and tensor[1] != "F8_E8M0":
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor[2].nbytes
    return shards


def write_safetensors(path: Path, tensors: list[Tensor]) -> None:
    """Writes one shard; our own writer, because F8_E8M0 is not in every safetensors release."""
    header, offset = {}, 0
    for name, dtype, array in tensors:
        stop = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, array in tensors:
            file.write(np.ascontiguousarray(array).tobytes())


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
