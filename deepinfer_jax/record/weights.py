"""The identity of weights: a Merkle root of SHA-256 hashes, one leaf of the tree per array.

The arrays are those that run, under the names a converted checkpoint gives them, sorted: weights
that were dequantised or rearranged at load are other arrays than the stored ones, so a root belongs
to one `numerics` and one `kernels`. A leaf hashes name, dtype, shape and bytes in C order; an odd
node moves up unchanged. A mesh changes no root: what it repeats of experts and tables, to divide
them, is left out.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np

from deepinfer_jax.errors import InputError
from deepinfer_jax.model.engram.table import HostTable
from sharding.gather import host_parts, is_here

_LEAF, _NODE = b"\0", b"\1"  # so that no leaf can pass for a node


def weights_root(params: Any, tables: Sequence[int] = (), *, together: bool = False) -> str:
    """Returns the root of a parameter tree, 64 hexadecimal digits.

    Copies one array after the other to the host and reads every byte: about a second per GB.

    Args:
        params: the tree.
        tables: rows of its Engram tables, which a mesh may have padded.
        together: all processes of a job call this, because each holds a part.

    Raises:
        InputError: this process holds a part only, and the others are not asked.
    """
    named = _named(params)
    hashes = [
        _leaf_hash(name, array, _kept(named, name, tables), together)
        for name, array in sorted(named.items())
    ]
    while len(hashes) > 1:
        pairs = [hashes[i : i + 2] for i in range(0, len(hashes), 2)]
        hashes = [_sha256((_NODE, *pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return hashes[0].hex()


class WeightsHash:
    """The root of the weights an engine runs, computed when it is first asked for."""

    def __init__(self, params: Any, tables: Sequence[int] = ()) -> None:
        """Keeps the parameters until then; arguments as `weights_root`."""
        self._params, self._tables, self._root = params, tuple(tables), ""

    def root(self, *, together: bool = False) -> str:
        """Returns `weights_root`.

        Raises:
            InputError: the engine has other weights by now, and nobody asked before; or as there.
        """
        if not self._root:
            if self._params is None:
                raise InputError(
                    "a record names the weights that ran, and these were replaced before their "
                    "hash was taken: read an output's record before replace_params"
                )
            found = weights_root(self._params, self._tables, together=together)
            self._root, self._params = found, None
        return self._root

    def release(self) -> None:
        """Lets go of the parameters, which are replaced."""
        self._params = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the root alone: a pickled output does not carry the weights."""
        return {"_params": None, "_tables": (), "_root": self.root()}


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
    return {name: leaf for name, leaf in found.items() if ".replicas." not in name}


def _kept(named: Mapping[str, Any], name: str, tables: Sequence[int]) -> tuple[int, ...]:
    """Returns how much of an array is the model's: the shape that one device has."""
    shape, parts = tuple(named[name].shape), name.split(".")
    if "experts" in parts:
        gate = named.get(name.partition(".experts.")[0] + ".gate")
        return shape if gate is None else (shape[0], gate.shape[1], *shape[2:])
    if "tables" in parts and tables:
        return (tables[int(parts[parts.index("tables") + 1])], *shape[1:])
    return shape


def _leaf_hash(name: str, array: Any, kept: tuple[int, ...], together: bool) -> bytes:
    if not together and not is_here(array):
        raise InputError(
            f"weights are named by their hash, and this process holds a part of {name} only: read "
            "the records of an engine, which takes it with all processes, or ask in a job of one"
        )
    head = f"{name} {array.dtype.name} {list(kept)}\n".encode()
    parts = (part.reshape(-1).view(np.uint8) for part in host_parts(array, kept))
    return _sha256(chain((_LEAF, head), parts))


def _sha256(parts: Iterable[bytes | np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
