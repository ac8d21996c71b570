"""The identity of weights: a Merkle root of SHA-256 hashes, one leaf of the tree per array.

The arrays are those that run, under the names a converted checkpoint gives them, sorted: weights
that were dequantised or rearranged at load are other arrays than the stored ones, so a root belongs
to one `numerics` and one `kernels`. A leaf hashes name, dtype, shape and bytes in C order; an odd
node moves up unchanged.
"""

import hashlib
from typing import Any

import jax
import numpy as np

from deepinfer_jax.errors import InputError
from deepinfer_jax.model.engram.table import HostTable

_LEAF, _NODE = b"\0", b"\1"  # so that no leaf can pass for a node


def weights_root(params: Any) -> str:
    """Returns the root of a parameter tree, 64 hexadecimal digits.

    Copies one array after the other to the host and reads every byte: about a second per GB.
    """
    hashes = [_leaf_hash(name, array) for name, array in sorted(_named(params).items())]
    while len(hashes) > 1:
        pairs = [hashes[i : i + 2] for i in range(0, len(hashes), 2)]
        hashes = [_sha256(_NODE, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return hashes[0].hex()


class WeightsHash:
    """The root of the weights an engine runs, computed when it is first asked for."""

    def __init__(self, params: Any) -> None:
        """Keeps the parameters until then."""
        self._params, self._root = params, ""

    def root(self) -> str:
        """Returns `weights_root`.

        Raises:
            InputError: the engine has other weights by now, and nobody asked before.
        """
        if not self._root:
            if self._params is None:
                raise InputError(
                    "a record names the weights that ran, and these were replaced before their "
                    "hash was taken: read an output's record before replace_params"
                )
            self._root, self._params = weights_root(self._params), None
        return self._root

    def release(self) -> None:
        """Lets go of the parameters, which are replaced."""
        self._params = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the root alone: a pickled output does not carry the weights."""
        return {"_params": None, "_root": self.root()}


def _named(params: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, HostTable)
    )
    found = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(leaf, HostTable):
            found |= {f"{name}.payload": leaf.payload, f"{name}.scale": leaf.scale}
        else:
            found[name] = leaf
    return found


def _leaf_hash(name: str, array: Any) -> bytes:
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        raise InputError(
            f"a record names weights by their hash, and this process holds a part of {name} only: "
            "read records in a job of one process"
        )
    array = np.ascontiguousarray(jax.device_get(array))
    head = f"{name} {array.dtype.name} {list(array.shape)}\n".encode()
    return _sha256(_LEAF, head, array.reshape(-1).view(np.uint8))


def _sha256(*parts: bytes | np.ndarray) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
