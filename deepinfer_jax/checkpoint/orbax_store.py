"""Named arrays in one Orbax checkpoint, and the manifest that says which they are.

Orbax is imported at first use.

Orbax stores float8_e4m3fn, bfloat16 and uint8 in their own dtype, bit for bit (tested), so there is
no detour through bytes. It refuses arrays without elements: the caller leaves those out.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.errors import CheckpointError

#: Largest chunk of a stored array. Whoever needs a part of a leaf reads whole chunks.
CHUNK_BYTES = 256 * 2**20
FORMAT = "deepinfer-jax converted checkpoint"
FORMAT_VERSION = 1

Leaves = dict[str, jax.ShapeDtypeStruct]


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays (JAX or NumPy) by name into a new folder, each in its own dtype.

    Raises:
        CheckpointError: They cannot be written.
    """
    import orbax.checkpoint as ocp

    save = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(arrays), save_args=save))
    except Exception as error:
        raise CheckpointError(
            f"the arrays of a converted checkpoint must be writable to {folder}, Orbax could not: "
            f"{_reason(error)}. Free space or choose another folder."
        ) from error


def describe_arrays(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every stored array without reading its values.

    Raises:
        CheckpointError: The folder holds no readable Orbax checkpoint.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found: Any = reader.metadata(folder.absolute()).item_metadata
        return {
            name: jax.ShapeDtypeStruct(tuple(array.shape), np.dtype(array.dtype))
            for name, array in found.tree.items()
        }
    except Exception as error:
        raise _unreadable(folder, error) from error


def read_arrays(
    folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array | np.ndarray]:
    """Returns the arrays `targets` names, each read straight into the sharding of its target.

    A target without a sharding gives a NumPy array in host memory.

    Raises:
        CheckpointError: An array cannot be read.
    """
    import orbax.checkpoint as ocp

    def how(target: jax.ShapeDtypeStruct) -> Any:
        if target.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype
        )

    restore = ocp.args.PyTreeRestore(
        item=dict(targets),
        restore_args={name: how(target) for name, target in targets.items()},
        partial_restore=True,  # `targets` may name a part of the arrays
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder.absolute(), args=restore)
    except Exception as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the arrays of a converted checkpoint must be readable by Orbax, {folder} is not: "
        f"{_reason(error)}. The folder is incomplete or damaged: convert the checkpoint again."
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:400] if lines else type(error).__name__


def nbytes(leaf: Any) -> int:
    """Returns the bytes of an array or of its description."""
    return leaf.size * leaf.dtype.itemsize


def check_leaves(expected: Leaves, found: Leaves, where: str, remedy: str) -> None:
    """Checks that both have the same names, shapes and dtypes.

    Raises:
        CheckpointError: They differ; names what, `where`, and the `remedy`.
    """
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is unknown" for name in found if name not in expected]
    for name in filter(found.__contains__, expected):
        wanted, got = _describe(expected[name]), _describe(found[name])
        if wanted != got:
            faults.append(f"{name} is {got} instead of {wanted}")
    if faults:
        more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise CheckpointError(
            f"a converted checkpoint must hold the {len(expected)} leaves its config implies; in "
            f"{where}: {'; '.join(faults[:4])}{more}. {remedy}"
        )


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _sha256(array: Any) -> str:
    """Returns the hash of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def check_hashes(folder: Path, arrays: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Checks the bytes of arrays against the manifest's hashes.

    Raises:
        CheckpointError: A leaf differs.
    """
    wrong = [name for name, array in arrays.items() if _sha256(array) != hashes[name]]
    if wrong:
        raise CheckpointError(
            f"every leaf must have the SHA-256 of the manifest: {', '.join(wrong[:4])} of "
            f"{len(wrong)} differing leaves, in {folder}. The arrays are damaged or the "
            "files of two checkpoints were mixed: convert the checkpoint again."
        )


def manifest(
    model_type: str, arrays: Mapping[str, Any], progress: Callable[[int, int, str], None] | None
) -> dict[str, Any]:
    """Returns the manifest of named arrays, a SHA-256 of the bytes of each included."""
    leaves, done = {}, 0
    total = sum(map(nbytes, arrays.values()))
    for name, array in arrays.items():
        leaves[name] = {
            "shape": list(array.shape),
            "dtype": np.dtype(array.dtype).name,
            "sha256": _sha256(array),
        }
        done += nbytes(array)
        if progress is not None:
            progress(done, total, name)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": version("deepinfer-jax"),
        "model_type": model_type,
        "leaves": leaves,
    }


def read_manifest(path: Path) -> tuple[Leaves, dict[str, str]]:
    """Returns the leaves a manifest lists, and their hashes.

    Raises:
        CheckpointError: It is absent or damaged, or of a newer format.
    """
    try:
        manifest = json.loads(path.read_text())
        number, writer = int(manifest["format_version"]), str(manifest["package_version"])
        leaves: Iterable[tuple[str, Any]] = manifest["leaves"].items()
        is_ours = manifest["format"] == FORMAT
        if is_ours and number <= FORMAT_VERSION:
            return (
                {
                    n: jax.ShapeDtypeStruct(tuple(r["shape"]), np.dtype(r["dtype"]))
                    for n, r in leaves
                },
                {name: str(record["sha256"]) for name, record in leaves},
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"a converted checkpoint has a manifest that lists its leaves, {path} cannot be read "
            f"({type(error).__name__}: {error}): the folder is incomplete or damaged. Convert the "
            "checkpoint again."
        ) from error
    if not is_ours:
        raise CheckpointError(f"{path} must be a manifest of {FORMAT!r}: convert it again.")
    raise CheckpointError(
        f"this version reads converted checkpoints up to format {FORMAT_VERSION}, {path} has "
        f"format {number}, written by deepinfer-jax {writer}: upgrade deepinfer-jax, or convert "
        "the checkpoint again."
    )
