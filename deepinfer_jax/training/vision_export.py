"""Writes a model with a trained image encoder: the files of its language part, and one more."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.inventory import spec_leaves, spec_tree
from deepinfer_jax.checkpoint.safetensors import open_store
from deepinfer_jax.config.hf import config_to_hf
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import VisionParams
from deepinfer_jax.training.export import Tensor, write_safetensors

VISION_FILE = "model-vision.safetensors"
_INDEX = "model.safetensors.index.json"


def export_vision(vision: VisionParams, config: ModelConfig, source: Path, folder: Path) -> Path:
    """Writes `source` with this image encoder into a new or empty folder; returns it.

    Every file of `source` that holds language tensors, the tokenizer's and the drafts' are copied
    unchanged. Files with nothing but tensors of an earlier encoder are left out.

    Args:
        vision: float32 parameters; they are rounded to BF16.
        config: of the model with the encoder.
        source: folder of the model, with an index file.
        folder: where to write.

    Raises:
        CheckpointError: no index file, a file with language and image tensors, or a parameter that
            is not finite.
    """
    if not (source / _INDEX).is_file():
        raise CheckpointError(
            f"an image encoder is added to a checkpoint in shards, and {source} has no {_INDEX}: "
            "export it with this package first"
        )
    tensors = _tensors(vision, config)
    names = {name for name, _, _ in tensors}
    entries = open_store(source)
    shards: dict[Path, set[str]] = {}
    for name, entry in entries.items():
        shards.setdefault(entry.path, set()).add(name)
    kept = [path for path, held in shards.items() if not held <= names]
    mixed = [path.name for path in kept if shards[path] & names]
    if mixed:
        raise CheckpointError(
            f"files with language and image tensors cannot be copied unchanged: {mixed}. Name a "
            "checkpoint without an image encoder, or one that `train vision` wrote"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*kept, *source.glob("*.json")):
        shutil.copyfile(path, folder / path.name)
    write_safetensors(folder / VISION_FILE, tensors)
    weight_map = {entries[name].name: path.name for path in kept for name in sorted(shards[path])}
    weight_map |= dict.fromkeys((tensor[0] for tensor in tensors), VISION_FILE)
    total = sum(entry.nbytes for entry in entries.values() if entry.path in kept)
    total += sum(array.nbytes for _, _, array in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / _INDEX, index)
    _write_json(folder / "config.json", config_to_hf(config))
    return folder


def _tensors(vision: VisionParams, config: ModelConfig) -> list[Tensor]:
    """Returns the tensors in the released layout, BF16."""
    found: list[Tensor] = []
    leaves = jax.tree.leaves(vision)
    for spec, leaf in zip(spec_leaves(spec_tree(config).vision), leaves, strict=True):
        values = np.asarray(leaf, np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"only finite parameters are written, {spec.names[0]} is not")
        stack = values.astype(ml_dtypes.bfloat16).reshape(-1, *spec.shape)
        found += [(name, "BF16", stack[place]) for place, name in enumerate(spec.names)]
    return found


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
