"""A V4.1 model on a device: weights and cache stay there, one custom call a step (ascend.md 2)."""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from native_ascend import ffi, layers, runtime, selftest
from native_ascend import library as native
from native_ascend.errors import AscendError
from native_ascend.handles import DeviceCache, DeviceWeights
from native_ascend.inputs import EngramIds, Rotation, input_arrays, input_tensors
from native_ascend.network import Context, Network, Sizes
from native_ascend.ops import call_format_cast, mx_scale_shape
from native_ascend.plan import PlanBuilder, byte_count
from native_ascend.weights import Prepared

_WORDS = ctypes.POINTER(ctypes.c_int64)
_HANDLES = ctypes.POINTER(ctypes.c_uint32)


class DeviceStep:
    """A plan that the native side keeps, and the jitted call that runs it."""

    def __init__(self, builder: PlanBuilder, device: int) -> None:
        """Hands the plan over.

        Raises:
            AscendUnsupported: the runtime lacks one of its operators.
            AscendUnverified: one never ran on hardware and this is hardware.
        """
        import jax
        import jax.numpy as jnp

        loaded = runtime.current()
        loaded.require(builder.used)
        self._library = loaded.library
        words, number = builder.words(), ctypes.c_int64()
        pointer, text = words.ctypes.data_as(_WORDS), builder.text().encode()
        native.call(self._library, "dij_plan_keep", pointer, len(words), text, ctypes.byref(number))
        self.number: int | None = number.value
        shapes = [jax.ShapeDtypeStruct((1,), jnp.int32)]
        shapes += [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in builder.results]
        call = jax.ffi.ffi_call(ffi.STEP_TARGET, shapes, has_side_effect=True)
        attributes = {"plan": self.number, "device": device, "timeout_ms": ffi.TIMEOUT_MS}
        numbers = {name: np.int64(value) for name, value in attributes.items()}
        self._run = ffi.checked(jax.jit(partial(call, **numbers)))

    def __call__(self, handles: np.ndarray, order: Any, *operands: np.ndarray) -> list[Any]:
        """Returns (the next order, results); `order` threads through the steps of a sequence."""
        return self._run(handles, order, *operands)

    def close(self) -> None:
        """Forgets the plan; again is harmless."""
        if self.number is not None:
            native.call(self._library, "dij_plan_drop", self.number)
            self.number = None


def cache_shapes(net: Network, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the buffers of one sequence; a page more than it needs takes rows nobody keeps."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for number, layer in enumerate(net.layers):
        window = (sizes.pages(1) + 1, sizes.page, 1, net.head_dim)
        shapes[f"window.{number}"] = (window, "bfloat16")
        if not layer.owner:
            continue
        pages = (sizes.pages(layer.ratio) + 1, sizes.page, 1)
        shapes[f"main.{number}"] = ((*pages, net.head_dim), "bfloat16")
        index = (*pages, net.index_dim)
        shapes[f"index.{number}"] = (index, "float4_e2m1fn")
        shapes[f"index_scale.{number}"] = (mx_scale_shape(index), "float8_e8m0fnu")
        if layer.ratio > 1:
            for part in ("wgate", "wkv"):
                shapes[f"tail.{part}.{number}"] = ((sizes.tail_rows, net.head_dim), "float32")
    return shapes


class Session:
    """Sequences of a model on one device, one at a time. `close` frees everything.

    tokens: ids of each sequence, whose rows are in its cache.
    """

    def __init__(
        self,
        net: Network,
        prepared: Prepared,
        engram_ids: EngramIds,
        rotation: Rotation,
        *,
        max_len: int,
        sequences: int = 1,
        chunk: int = 8,
        device: int = 0,
    ) -> None:
        """Uploads the weights, clears the caches and builds the steps of 1 and `chunk` rows.

        Raises:
            AscendUnavailable: no runtime is loaded.
            AscendUnsupported: the network needs a step that no operator expresses.
            AscendError: the device packs, rounds or orders otherwise (`selftest`).
        """
        net.require_supported(max_len)
        selftest.before_first_use(runtime.current())
        self.net, self.max_len, self.chunk, self.device = net, max_len, chunk, device
        self._engram_ids, self._rotation = engram_ids, rotation
        self._steps: dict[int, DeviceStep] = {}
        self.tokens = [np.zeros(0, np.int32) for _ in range(sequences)]
        self.order: Any = np.zeros(1, np.int32)
        self.weights = DeviceWeights(prepared.arrays, prepared.dtypes, device)
        self.caches: list[DeviceCache] = []
        try:
            self._convert(prepared.nz)
            for _ in range(sequences):
                self.caches.append(DeviceCache(cache_shapes(net, self._sizes(1)), device))
            for rows in {1, chunk}:
                self._steps[rows] = self._build(rows)
        except AscendError:
            self.close()
            raise

    def extend(self, ids: Sequence[int], sequence: int = 0) -> np.ndarray:
        """Returns float32 logits [v] behind the last of `ids`, which follow what came before."""
        if not self.caches or not len(ids):
            raise AscendError("a session that is open takes at least one token")
        tokens = self.tokens[sequence]
        if len(tokens) + len(ids) > self.max_len:
            raise AscendError(
                f"a sequence holds {self.max_len} tokens, received {len(ids)} more than "
                f"{len(tokens)}: open the session with a larger max_len"
            )
        handles = np.concatenate([self.weights.handles(), self.caches[sequence].handles()])
        done, logits = 0, None
        while done < len(ids):
            rows = self.chunk if len(ids) - done >= self.chunk else 1
            first = len(tokens)
            tokens = np.concatenate([tokens, np.asarray(ids[done : done + rows], np.int32)])
            operands = input_arrays(
                self.net, self._sizes(rows), tokens, first, self._engram_ids, self._rotation
            )
            self.order, logits = self._steps[rows](handles, self.order, *operands)
            self.tokens[sequence] = tokens
            done += rows
        return np.asarray(logits)[0]

    def restart(self, sequence: int = 0) -> None:
        """Begins another sequence in the place of one."""
        if self.caches:
            self.caches[sequence].clear()
        self.tokens[sequence] = np.zeros(0, np.int32)

    def copy(self, source: int, target: int) -> None:
        """Makes a sequence equal to another, through host memory."""
        for name, (shape, dtype) in self.caches[source].shapes.items():
            staging = np.zeros(byte_count(shape, dtype), np.uint8)
            self.caches[source].read(name, staging)
            self.caches[target].write(name, staging)
        self.tokens[target] = self.tokens[source]

    def shorten(self, length: int, sequence: int = 0) -> None:
        """Takes back rows beyond `length` tokens: the next ones overwrite them.

        Raises:
            AscendError: more than `chunk` rows, whose compressor inputs are no longer held.
        """
        tokens = self.tokens[sequence]
        if not len(tokens) - self.chunk <= length <= len(tokens):
            raise AscendError(
                f"a sequence of {len(tokens)} tokens can give up {self.chunk}, received "
                f"length={length}: restart it"
            )
        self.tokens[sequence] = tokens[:length]

    def close(self) -> None:
        """Frees plans, caches and weights; again is harmless."""
        for step in self._steps.values():
            step.close()
        for cache in self.caches:
            cache.close()
        self.caches = []
        self.weights.close()

    def _sizes(self, rows: int) -> Sizes:
        return Sizes(rows=rows, max_len=self.max_len, tail_rows=2 * self.chunk + 2)

    def _build(self, rows: int) -> DeviceStep:
        builder, sizes = PlanBuilder(), self._sizes(rows)
        context = Context(
            builder=builder,
            net=self.net,
            sizes=sizes,
            weights=self.weights,
            cache=self.caches[0],  # the places of all others are the same
            inputs=input_tensors(builder, self.net, sizes),
            topk=builder.scratch((rows, 1, self.net.index_topk), "int32"),
        )
        layers.step(context, builder.result((1, self.net.vocab), "float32"))
        return DeviceStep(builder, self.device)

    def _convert(self, names: list[str]) -> None:
        """Converts expert weights to FRACTAL_NZ, one after the other, in place."""
        handles = self.weights.handles()
        pointer = handles.ctypes.data_as(_HANDLES)
        for name in names:
            builder = PlanBuilder()
            weight = self.weights.tensor(builder, name)
            copy = builder.scratch(weight.shape, weight.dtype)
            builder.call("aclnnInplaceCopy", selfRef=copy, src=weight)
            call_format_cast(builder, copy, weight)
            runtime.current().require(builder.used)
            step = DeviceStep(builder, self.device)
            library = runtime.current().library
            try:
                native.call(
                    library,
                    "dij_plan_run",
                    step.number,
                    self.device,
                    pointer,
                    len(handles),
                    ffi.TIMEOUT_MS,
                )
            finally:
                step.close()
