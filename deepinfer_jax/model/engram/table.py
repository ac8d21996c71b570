"""Engram tables that stay in host memory or on disk (model.md 3.10.4)."""

import jax
import numpy as np

from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics.formats import lookup_fp8


@jax.tree_util.register_static
class HostTable:
    """One Engram table outside the device: NumPy arrays in memory, or views of the file.

    It is a static node of a parameter tree: it has no array leaves, and is equal only to itself.

    Attributes:
        payload: E4M3 codes, [rows, width].
        scale: E8M0 bytes, [rows, width / 32].
        is_mapped: Whether both are views of files.
    """

    __slots__ = ("__weakref__", "is_mapped", "payload", "scale")

    def __init__(self, payload: np.ndarray, scale: np.ndarray, *, is_mapped: bool) -> None:
        """Keeps the arrays without a copy; raises ValueError for shapes that do not belong."""
        rows, width = payload.shape
        if scale.shape != (rows, width // 32) or width % 32:
            raise ValueError(f"payload {payload.shape} and scale {scale.shape} do not belong")
        self.payload = payload
        self.scale = scale
        self.is_mapped = is_mapped

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the table."""
        return (self.payload.shape[0], self.payload.shape[1])

    def __repr__(self) -> str:
        """Returns a short description without the contents."""
        return f"HostTable(shape={self.shape}, is_mapped={self.is_mapped})"

    def lookup(self, ids: np.ndarray | jax.Array) -> np.ndarray:
        """Returns the dequantised rows of `ids` as float32 [*ids.shape, width]; exact.

        Fit for `jax.pure_callback`, which hands over JAX arrays.

        Raises:
            InputError: An id lies outside the table.
        """
        rows, chosen = self.shape[0], np.asarray(ids)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= rows):
            raise InputError(
                f"Engram row ids lie in [0, {rows}): received {chosen.min()} to {chosen.max()}. "
                "Form them with the hash constants of the same config."
            )
        return lookup_fp8(np.asarray(self.payload[chosen]), np.asarray(self.scale[chosen]))
