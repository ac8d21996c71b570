"""Quantised weights as one pytree leaf pair: bytes, block scales and the name of the layout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.codes import as_bytes, decode_e2m1, decode_e4m3, scale_by_e8m0
from pallas_kernels.core.codes import unpack_nibbles as _unpack
from pallas_kernels.errors import KernelError

# layout -> (rows per scale, channels per scale, channels per payload byte)
_LAYOUTS = {
    "fp8_block32": (32, 32, 1),
    "fp8_block128": (128, 128, 1),
    "fp8_row32": (1, 32, 1),
    "fp4_row32": (1, 32, 2),
}
FORMATS = tuple(_LAYOUTS)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["payload", "scale"], meta_fields=["format"]
)
@dataclasses.dataclass(frozen=True)
class QuantArray:
    """A quantised array with E8M0 scales (model.md 2.6); leading axes stack independent arrays.

    Attributes:
        payload: codes. fp8_*: E4M3 [..., N, K] (uint8 or float8_e4m3fn; fp8_row32 also [K]);
            fp4_row32: two E2M1 codes a byte, [..., N, K / 2] (uint8 or int8), low nibble even.
        scale: E8M0 bytes (uint8, or any 8-bit dtype). fp8_block32 [..., ceil(N / 32),
            ceil(K / 32)], fp8_block128 the same with 128, the row formats [..., K / 32].
        format: one of FORMATS.

    The fields may hold anything while JAX flattens and rebuilds the record, so nothing is checked
    at construction; ``dequantize`` checks.
    """

    payload: Any
    scale: Any
    format: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: that of the dequantised array."""
        *lead, last = self.payload.shape
        return (*lead, last * self._layout[2])

    @property
    def ndim(self) -> int:
        """Logical rank."""
        return self.payload.ndim

    @property
    def dtype(self) -> Any:
        """Logical dtype: float32, whatever the storage is."""
        return jnp.dtype(jnp.float32)

    @property
    def _layout(self) -> tuple[int, int, int]:
        if self.format not in _LAYOUTS:
            raise KernelError(f"QuantArray.format must be one of {FORMATS}, got {self.format!r}")
        return _LAYOUTS[self.format]

    @property
    def _kept_axes(self) -> int:
        """Number of trailing axes that indexing must leave alone."""
        return 1 if self.format == "fp8_row32" else 2

    def __getitem__(self, index: Any) -> "QuantArray":
        """Returns the array with its leading axes indexed, payload and scale alike.

        Only stack axes may be indexed (fp8_row32: also the row axis); scale blocks cover the
        others. Raises KernelError otherwise.
        """
        items = index if isinstance(index, tuple) else (index,)
        # an index array may not be compared with ==, hence the identity tests
        has_ellipsis = any(item is Ellipsis for item in items)
        used = sum(1 for item in items if item is not None)
        if has_ellipsis or used > self.ndim - self._kept_axes:
            raise KernelError(
                f"only the leading {self.ndim - self._kept_axes} axes of a {self.format} array of "
                f"shape {self.shape} may be indexed, got {index!r}: dequantize it first"
            )
        return QuantArray(self.payload[index], self.scale[index], self.format)

    def dequantize(self) -> jax.Array:
        """Returns the logical array as float32; exact, subnormal products included.

        Raises:
            KernelError: the scale's shape does not belong to the payload's.
        """
        rows, channels, packed = self._layout
        codes = as_bytes(self.payload)
        values = decode_e2m1(_unpack(codes)) if packed == 2 else decode_e4m3(codes)
        scale = as_bytes(self.scale)
        expected = (*self.shape[:-1], -(-self.shape[-1] // channels))
        if rows > 1:
            expected = (*expected[:-2], -(-self.shape[-2] // rows), expected[-1])
        if scale.shape != expected:
            raise KernelError(
                f"a {self.format} array of shape {self.shape} needs scales of shape {expected}, "
                f"got {scale.shape}"
            )
        return scale_by_e8m0(values, _spread(scale, self.shape, rows, channels))


def _spread(scale: jax.Array, shape: tuple[int, ...], rows: int, channels: int) -> jax.Array:
    """Repeats block scales over their blocks and cuts the last ones at the edges of ``shape``."""
    if rows > 1:
        scale = jnp.repeat(scale, rows, axis=-2)[..., : shape[-2], :]
    return jnp.repeat(scale, channels, axis=-1)[..., : shape[-1]]


def dequantize(x: "QuantArray | jax.Array") -> jax.Array:
    """Returns a QuantArray or a plain array of any float dtype as float32; exact for both."""
    return x.dequantize() if isinstance(x, QuantArray) else jnp.asarray(x).astype(jnp.float32)


def slice_channels(w: "QuantArray | jax.Array", start: Any, size: int) -> "QuantArray | jax.Array":
    """Returns channels [start, start + size) of the last axis; ``start`` may be traced.

    For a QuantArray, ``start`` must be a multiple of the scale's channel block.
    """

    def cut(leaf: jax.Array, per_leaf: int) -> jax.Array:
        # ceil: the last block of a scale may cover fewer channels
        length = min(-(-size // per_leaf), leaf.shape[-1])
        return jax.lax.dynamic_slice_in_dim(leaf, start // per_leaf, length, axis=-1)

    if not isinstance(w, QuantArray):
        return cut(jnp.asarray(w), 1)
    _, channels, packed = w._layout
    return QuantArray(cut(w.payload, packed), cut(w.scale, channels), w.format)
