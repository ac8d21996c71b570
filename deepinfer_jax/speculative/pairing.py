"""Which target a set of draft stages was trained for (engine.md 3).

`train draft` writes `dspark_target.json` beside the weights, and `load` compares it: drafts of
another target change no token, but are hardly ever accepted, and nothing else would say why.
Checkpoints without the file, the released ones among them, load as they are.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.checkpoint.inventory import spec_leaves, spec_tree
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.draft import draft_settings
from deepinfer_jax.model.registry import AnyParams
from pallas_kernels.core.quant_array import QuantArray

FILE_NAME = "dspark_target.json"
_FORMAT = 1


def plain_digest(specs: Any, held: Any) -> str:
    """Returns a SHA-256 of the leaves that every form of a checkpoint holds as they are.

    Norms, heads, routers, residual mixing, by name and as float32, so that neither the numerics nor
    a conversion changes it.
    """
    digest = hashlib.sha256()
    leaves = jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, QuantArray))
    for spec, leaf in zip(spec_leaves(specs), leaves, strict=True):
        if spec.format == "plain":
            digest.update(spec.names[0].encode())
            digest.update(np.ascontiguousarray(np.asarray(leaf).astype(np.float32)).tobytes())
    return digest.hexdigest()


def target_identity(params: AnyParams, config: ModelConfig) -> str:
    """Returns a SHA-256 that changes whenever the backbone's layers are trained again.

    Experts are left out: kernels may have rearranged them.
    """
    specs, held = spec_tree(config).layers, params.layers
    return plain_digest(replace(specs, experts=None), replace(held, experts=None))


def write_target(folder: Path, params: AnyParams, config: ModelConfig) -> Path:
    """Writes which target the drafts of a checkpoint belong to, and returns the path."""
    path, settings = folder / FILE_NAME, draft_settings(config)
    record = {"format": _FORMAT, "identity": target_identity(params, config)}
    record |= {"block_size": settings.dspark_block_size, "head": settings.dspark_head}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def check_target(folder: Path, params: AnyParams, config: ModelConfig) -> None:
    """Checks that the drafts of a checkpoint were trained for its backbone, where it says so.

    Raises:
        CheckpointError: The file is damaged, or names another target, block size or head.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"not of format {_FORMAT}")
        written = {name: record[name] for name in ("identity", "block_size", "head")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} must hold what `train draft` writes, and it cannot be read ({error}): delete "
            "it, or train the drafts again"
        ) from error
    settings = draft_settings(config)
    found = {"identity": target_identity(params, config)}
    found |= {"block_size": settings.dspark_block_size, "head": settings.dspark_head}
    for name, value in found.items():
        if written[name] != value:
            raise CheckpointError(
                f"draft stages must be those of the model they stand beside: {path} has "
                f"{name}={written[name]!r}, the checkpoint {value!r}. Train them for it with "
                "`train draft`, or delete the file to load them all the same."
            )
