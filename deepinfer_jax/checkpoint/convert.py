"""A checkpoint in the form it is loaded in: the stacked tree in Orbax, with config and tokenizer.

    config.json, tokenizer.json, tokenizer_config.json    as in Hugging Face layout
    deepinfer_converted.json                              manifest: versions, leaves, hashes
    orbax_params/                                         the arrays, one flat Orbax tree

The tree is the one `load_params` returns: quantised leaves stay quantised, so both arithmetics
start from it. A restart reads a few dozen stacked arrays instead of one tensor per expert.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.checkpoint.abstract import abstract_leaf
from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.checkpoint.loader import EngramPlace, Placement, Progress
from deepinfer_jax.checkpoint.orbax_store import (
    Leaves,
    check_hashes,
    check_leaves,
    describe_arrays,
    manifest,
    nbytes,
    read_arrays,
    read_manifest,
    write_arrays,
)
from deepinfer_jax.config.hf_write import config_to_hf
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.model.spec import ParamSpec
from pallas_kernels.core.quant_array import QuantArray

MANIFEST = "deepinfer_converted.json"
ARRAYS = "orbax_params"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
#: Leaves are restored in groups of about this size, so that progress can be reported.
GROUP_BYTES = 2**30


def is_converted(folder: str | Path) -> bool:
    """Returns whether a folder was written by `save_converted`, damaged or not."""
    folder = Path(folder)
    return (folder / MANIFEST).is_file() or (folder / ARRAYS).is_dir()


def save_converted(
    params: Any,
    config: ModelConfig,
    folder: str | Path,
    *,
    tokenizer_from: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes a converted checkpoint and returns its folder; a failed write leaves nothing behind.

    Args:
        params: The tree of `load_params`, or a model that holds it as `.params`. Engram tables on
            the host or mapped are written like those on the device.
        config: Its config; `execution` is not stored.
        folder: Where to write. It may exist only if it is empty.
        tokenizer_from: Folder whose tokenizer files are copied; needed with Engram, whose hash is
            built from the tokenizer.
        overwrite: Replace `folder` if it is a converted checkpoint; anything else is left alone.
        progress: Called as `(done_bytes, total_bytes, name)` for every leaf that was hashed.

    Raises:
        CheckpointError: The target is in use, the tree is not in its stored form, a tokenizer is
            missing, or the arrays cannot be written.
    """
    target = check_target(folder, overwrite=overwrite)
    arrays = _arrays(getattr(params, "params", params))
    check_leaves(
        _expected(config),
        {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()},
        "the parameter tree",
        'Save the tree of a model loaded with numerics="checkpoint", or of `load_params`: one that '
        'was expanded by numerics="float32" no longer has its stored form.',
    )
    copies = _tokenizer_files(config, tokenizer_from)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_json(partial / "config.json", config_to_hf(config))
        for path in copies:
            shutil.copyfile(path, partial / path.name)
        _write_json(partial / MANIFEST, manifest(config.model_type, arrays, progress))
        write_arrays(partial / ARRAYS, {n: a for n, a in arrays.items() if a.size})
        _swap(partial, target)
    except OSError as error:
        raise CheckpointError(
            f"a converted checkpoint must be writable to {target}, it is not: {error}. Free space "
            "or choose another folder; nothing was changed."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def load_converted(
    folder: str | Path,
    config: ModelConfig,
    *,
    progress: Progress | None = None,
    engram: EngramPlace = "device",
    placement: Placement | None = None,
    verify: bool = False,
) -> Any:
    """Returns the parameters of a converted checkpoint; the same tree as `load_params`.

    Names, shapes and dtypes of all leaves are compared with the config, in the manifest and in the
    store, before an array is read.

    Args:
        folder: Folder written by `save_converted`.
        config: Its config.
        progress: Called as `(done_bytes, total_bytes, name)` for every leaf that was read.
        engram: Where Engram tables live: "device" or "host"; stored chunks cannot be "mapped".
        placement: Sharding of each array; None puts everything on the default device.
        verify: Also compare the SHA-256 of every leaf with the manifest.

    Raises:
        CheckpointError: The folder is incomplete, damaged, of a newer format, or of another config.
    """
    folder = Path(folder)
    if engram == "mapped":
        raise CheckpointError(
            'Engram tables of a converted checkpoint live on the "device" or in "host" memory, '
            f'received "mapped" for {folder}: choose one of them, or load the checkpoint in '
            "Hugging Face layout."
        )
    listed, hashes = read_manifest(folder / MANIFEST)
    expected, remedy = _expected(config), "Convert the checkpoint again."
    check_leaves(expected, listed, str(folder / MANIFEST), remedy)
    stored = {name: leaf for name, leaf in expected.items() if leaf.size}
    check_leaves(stored, describe_arrays(folder / ARRAYS), str(folder / ARRAYS), remedy)
    targets = _targets(config, placement or _default_placement, on_host=engram == "host")
    arrays: dict[str, Any] = {}
    total = sum(map(nbytes, targets.values()))
    for group in _groups(targets):
        arrays |= _read_group(folder, group)
        if verify:
            check_hashes(folder / ARRAYS, {name: arrays[name] for name in group}, hashes)
        if progress is not None:
            progress(sum(map(nbytes, arrays.values())), total, next(reversed(group)))
    return _assemble(config, arrays)


def check_target(folder: str | Path, *, overwrite: bool) -> Path:
    """Returns the absolute target folder after checking that it may be written.

    Raises:
        CheckpointError: It is a file, or not empty and not ours to replace.
    """
    target = Path(folder).absolute()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    if not (target / MANIFEST).is_file():
        raise CheckpointError(
            f"a converted checkpoint is written to a new or empty folder, {target} holds something "
            "else: choose another folder. It is not replaced, with or without overwrite."
        )
    if not overwrite:
        raise CheckpointError(
            f"a converted checkpoint is written to a new or empty folder, {target} holds an older "
            "one: choose another folder, or overwrite it (overwrite=True, --overwrite)."
        )
    return target


def _swap(partial: Path, target: Path) -> None:
    """Puts the finished folder in place; an older one is removed only afterwards."""
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists() and any(target.iterdir()):
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)
    else:
        partial.rename(target)  # over an empty folder too


def _tokenizer_files(config: ModelConfig, folder: str | Path | None) -> list[Path]:
    found = [Path(folder) / name for name in TOKENIZER_FILES] if folder is not None else []
    found = [path for path in found if path.is_file()]
    if config.engram is not None and "tokenizer.json" not in {path.name for path in found}:
        raise CheckpointError(
            "a converted checkpoint with Engram needs tokenizer.json, from which its hash is "
            f"built: received tokenizer_from={folder!s}. Name the folder that holds it."
        )
    return found


def _named_specs(config: ModelConfig) -> Iterator[tuple[str, ParamSpec, Any]]:
    """Yields (dotted path, spec, leaf without data) of the parameter tree, in its order."""
    specs, _ = jax.tree_util.tree_flatten_with_path(
        spec_tree(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    for path, spec in specs:
        yield _dotted(path), spec, abstract_leaf(spec)


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _parts(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of one leaf by name."""
    if isinstance(leaf, QuantArray | HostTable):
        yield f"{name}.payload", leaf.payload
        yield f"{name}.scale", leaf.scale
    else:
        yield name, leaf


def _expected(config: ModelConfig) -> Leaves:
    return dict(part for name, _, leaf in _named_specs(config) for part in _parts(name, leaf))


def _targets(config: ModelConfig, placement: Placement, *, on_host: bool) -> Leaves:
    """Returns the arrays to restore with their shardings; without one they stay on the host."""
    targets = {}
    for leaf_name, spec, leaf in _named_specs(config):
        stays = on_host and spec.format == "fp8_row32"
        for name, part in _parts(leaf_name, leaf):
            sharding = None if stays else placement(spec, part.shape)
            targets[name] = jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding)
    return targets


def _default_placement(spec: ParamSpec, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _arrays(params: Any) -> dict[str, Any]:
    """Returns every array of a parameter tree by name; tables on the host as NumPy arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, QuantArray | HostTable)
    )
    arrays = dict(part for path, leaf in leaves for part in _parts(_dotted(path), leaf))
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            arrays[name] = np.asarray(array)  # a mapped file as a plain view
        elif not array.is_fully_addressable:
            raise CheckpointError(
                f"a converted checkpoint is written by one process that holds all of it, {name} "
                "spans several: load the checkpoint in a single process and save it there."
            )
    return arrays


def _assemble(config: ModelConfig, arrays: Mapping[str, Any]) -> Any:
    leaves = []
    for name, spec, leaf in _named_specs(config):
        if not isinstance(leaf, QuantArray):
            leaves.append(arrays[name])
            continue
        payload, scale = arrays[f"{name}.payload"], arrays[f"{name}.scale"]
        if isinstance(payload, np.ndarray):
            leaves.append(HostTable(payload, scale, is_mapped=False))
        else:
            leaves.append(QuantArray(payload, scale, spec.format))
    structure = jax.tree.structure(
        spec_tree(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    return jax.tree.unflatten(structure, leaves)


def _groups(targets: Leaves) -> Iterator[Leaves]:
    group: Leaves = {}
    for name, target in targets.items():
        group[name] = target
        if sum(map(nbytes, group.values())) >= GROUP_BYTES:
            yield group
            group = {}
    if group:
        yield group


def _read_group(folder: Path, group: Leaves) -> dict[str, Any]:
    arrays = read_arrays(folder / ARRAYS, {n: t for n, t in group.items() if t.size})
    for name, target in group.items():
        if not target.size:  # Orbax stores no empty arrays
            empty = np.zeros(target.shape, target.dtype)
            arrays[name] = jax.device_put(empty, target.sharding) if target.sharding else empty
    return arrays


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")
