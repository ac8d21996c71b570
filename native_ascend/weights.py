"""Weights in the layouts that CANN's operators take, from the checkpoint's bytes; all exact."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from native_ascend.errors import AscendUnsupported
from native_ascend.ops import mx_scale_shape


@dataclass(slots=True)
class Prepared:
    """Arrays to upload, and what the device takes them for where NumPy has no such type."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    nz: list[str] = field(default_factory=list)  # to be converted to FRACTAL_NZ after the upload

    def plain(self, name: str, array: np.ndarray, dtype: Any = None) -> None:
        """Adds an array, converted to a data type if one is given."""
        self.arrays[name] = np.ascontiguousarray(array if dtype is None else array.astype(dtype))

    def codes(self, name: str, codes: np.ndarray, scale: np.ndarray) -> None:
        """Adds E4M3 codes [n, k] (bytes) with one E8M0 byte for every row and 32 channels."""
        self.arrays[name] = np.ascontiguousarray(codes).view(np.uint8)
        self.dtypes[name] = (tuple(codes.shape), "float8_e4m3fn")
        self._scale(name, scale, tuple(codes.shape))

    def fp4(self, name: str, packed: np.ndarray, scale: np.ndarray) -> None:
        """Adds E2M1 codes [g, n, k / 2], two a byte, with scales [g, n, k / 32]."""
        shape = (*packed.shape[:-1], 2 * packed.shape[-1])
        self.arrays[name] = np.ascontiguousarray(packed).view(np.uint8)
        self.dtypes[name] = (shape, "float4_e2m1fn")
        self._scale(name, scale, shape)
        self.nz.append(name)

    def _scale(self, name: str, scale: np.ndarray, shape: tuple[int, ...]) -> None:
        paired = mx_scale_shape(shape)
        flat = np.zeros((*shape[:-1], 2 * paired[-2]), np.uint8)
        flat[..., : scale.shape[-1]] = scale
        self.arrays[f"{name}.scale"] = flat.reshape(paired)
        self.dtypes[f"{name}.scale"] = (paired, "float8_e8m0fnu")


def row_scales(scale: np.ndarray, rows: int, block: int = 32) -> np.ndarray:
    """Returns scale bytes [n, k / 32] of blocks of 32 x 32: every row gets its block's."""
    if block != 32:
        raise AscendUnsupported(
            f"scale blocks are 32 x 32, received {block} x {block}: only V4.1 checkpoints are read",
            status="UNIMPLEMENTED",
        )
    return np.repeat(scale, block, axis=0)[:rows]


def constants(prepared: Prepared, sizes: Mapping[str, int]) -> None:
    """Adds what the network multiplies by: identity, ones, and constants of indexer and gate.

    sizes: "head_dim", "hidden", "index_heads", "index_dim".
    """
    dim = sizes["head_dim"]
    one = np.uint8(0x38)  # 1.0 in E4M3
    scale = np.full((dim, dim // 32), 127, np.uint8)
    prepared.codes("identity", np.eye(dim, dtype=np.uint8) * one, scale)
    prepared.plain("first_mix", np.eye(1, 4, dtype=np.float32)[0])
    prepared.arrays["ones"] = np.full(sizes["hidden"], 0x3F80, np.uint16)
    prepared.dtypes["ones"] = ((sizes["hidden"],), "bfloat16")
    index = sizes["index_dim"] ** -0.5 * sizes["index_heads"] ** -0.5
    prepared.plain("index_constant", np.asarray([index], np.float32))
    prepared.plain("engram_constant", np.asarray([sizes["hidden"] ** -0.5], np.float32))
