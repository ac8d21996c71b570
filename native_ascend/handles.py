"""Arrays that stay on a device: weights, uploaded once, and caches, written by steps.

A handle is (slot, generation), uint32 [2]: data, which may be copied freely and names a buffer only
as long as its owner here is open (ascend.md F11).
"""

import ctypes
import warnings
from collections.abc import Mapping
from typing import Self

import numpy as np

from native_ascend import library as native
from native_ascend import runtime
from native_ascend.errors import AscendError
from native_ascend.plan import PlanBuilder, Tensor, acl_type, byte_count

_HANDLES = ctypes.POINTER(ctypes.c_uint32)
_DIMS = ctypes.POINTER(ctypes.c_int64)


class DeviceArrays:
    """Named buffers of one device, in order. The garbage collector warns; only `close` frees."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]], device: int = 0) -> None:
        """Allocates a buffer for every name.

        Args:
            shapes: name -> (shape, data type as ACL has it).
            device: number of the device.

        Raises:
            AscendError: memory ran out; what was allocated is freed again.
        """
        self.shapes = dict(shapes)
        self.device = device
        self.places = {name: place for place, name in enumerate(self.shapes)}
        self._library = runtime.current().library
        self._handles: dict[str, np.ndarray] = {}
        try:
            for name, (shape, dtype) in self.shapes.items():
                self._handles[name] = self._allocate(shape, dtype)
        except AscendError:
            self.close()
            raise

    def handles(self) -> np.ndarray:
        """Returns the handles, uint32 [n, 2], in the order of the names."""
        return np.stack([self._handle(name) for name in self.shapes])

    def tensor(self, builder: PlanBuilder, name: str, first: int = 0) -> Tensor:
        """Returns the buffer in a plan whose handles hold these from place `first` on."""
        shape, dtype = self.shapes[name]
        return builder.handle(first + self.places[name], shape, dtype)

    def write(self, name: str, array: np.ndarray) -> None:
        """Fills a buffer with the bytes of an array of its size."""
        self._require_size(name, array)
        source = np.ascontiguousarray(array)
        address = source.ctypes.data_as(ctypes.c_void_p)
        handle = self._handle(name).ctypes.data_as(_HANDLES)
        native.call(self._library, "dij_buffer_write", handle, address, source.nbytes)

    def read(self, name: str, into: np.ndarray) -> None:
        """Fills a contiguous array with the bytes of a buffer of its size."""
        self._require_size(name, into)
        address = into.ctypes.data_as(ctypes.c_void_p)
        handle = self._handle(name).ctypes.data_as(_HANDLES)
        native.call(self._library, "dij_buffer_read", handle, address, into.nbytes)

    def close(self) -> None:
        """Frees the buffers; again is harmless.

        Raises:
            AscendError: a step that runs uses one.
        """
        for name in list(self._handles):
            handle = self._handles[name].ctypes.data_as(_HANDLES)
            native.call(self._library, "dij_buffer_free", handle)
            del self._handles[name]

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Frees the buffers."""
        self.close()

    def __del__(self) -> None:
        """Warns about buffers that nobody freed: freeing here could free what a step uses."""
        # at the interpreter's end the module may be gone before the object
        if getattr(self, "_handles", None) and warnings is not None:
            warnings.warn(
                f"{type(self).__name__} was not closed: {len(self._handles)} device buffers stay",
                ResourceWarning,
                stacklevel=2,
            )

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        handle = np.zeros(2, np.uint32)
        dims = np.asarray(shape, np.int64)
        native.call(
            self._library,
            "dij_buffer_create",
            self.device,
            acl_type(dtype),
            dims.ctypes.data_as(_DIMS),
            len(shape),
            handle.ctypes.data_as(_HANDLES),
        )
        return handle

    def _handle(self, name: str) -> np.ndarray:
        if name not in self._handles:
            raise AscendError(
                f"{type(self).__name__} is closed, so {name} is no longer on a device"
            )
        return self._handles[name]

    def _require_size(self, name: str, array: np.ndarray) -> None:
        shape, dtype = self.shapes[name]
        if array.nbytes != byte_count(shape, dtype):
            raise AscendError(
                f"{name} holds {byte_count(shape, dtype)} bytes of {dtype} {shape}, received "
                f"{array.nbytes} of {array.dtype} {array.shape}",
                status="INVALID_ARGUMENT",
            )


class DeviceWeights(DeviceArrays):
    """Arrays uploaded once."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        dtypes: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
        device: int = 0,
    ) -> None:
        """Uploads the arrays.

        Args:
            arrays: name -> array.
            dtypes: name -> (shape, data type) where the device sees other ones, as for E2M1.
            device: number of the device.
        """
        seen = {name: (tuple(a.shape), str(a.dtype)) for name, a in arrays.items()}
        super().__init__(seen | dict(dtypes or {}), device)
        try:
            for name, array in arrays.items():
                self.write(name, array)
        except AscendError:
            self.close()
            raise


class DeviceCache(DeviceArrays):
    """Buffers that steps write; zeros at first."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]], device: int = 0) -> None:
        """Allocates and clears the buffers."""
        super().__init__(shapes, device)
        self.clear()

    def clear(self) -> None:
        """Fills every buffer with zero bytes."""
        for name, (shape, dtype) in self.shapes.items():
            self.write(name, np.zeros(byte_count(shape, dtype), np.uint8))
