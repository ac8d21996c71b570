"""The two XLA custom calls: registered once, called with their failures made one type."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from native_ascend import runtime
from native_ascend.errors import error_of
from native_ascend.operators import OPERATORS
from native_ascend.plan import PlanBuilder

#: Milliseconds until a device that does not answer is given up.
TIMEOUT_MS = 600_000
_registered: list[ctypes.CDLL] = []


def target(operator: str) -> str:
    """Returns the custom call's name of an operator: aclnnRmsNorm is deepinfer.ascend.RmsNorm."""
    return f"deepinfer.ascend.{operator.removeprefix('aclnn')}"


STEP_TARGET = target("step")


def register(library: ctypes.CDLL) -> None:
    """Registers the custom calls on the CPU platform; again is harmless.

    The CPU client is made first: a library that it refuses then fails alone, rather than keep JAX
    from starting (ascend.md F2).
    """
    import jax

    if library in _registered:
        return
    jax.devices("cpu")
    call = jax.ffi.pycapsule(library.dij_call)
    for name in OPERATORS:
        jax.ffi.register_ffi_target(target(name), call, platform="cpu")
    step = jax.ffi.pycapsule(library.dij_step)
    jax.ffi.register_ffi_target(STEP_TARGET, step, platform="cpu")
    _registered.append(library)


def guarded(run: Callable[[], Any]) -> Any:
    """Returns what `run` returns, computed; failures of the bridge become `AscendError`.

    The same failure is a `JaxRuntimeError` or, from a cached call, a `ValueError`, at the call or
    only where the result is read (ascend.md F3, F4).
    """
    import jax

    try:
        return jax.block_until_ready(run())
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        found = error_of(str(error))
        if found is None:
            raise
        raise found from error


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function, such as a jitted one, whose bridge failures are `AscendError`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return guarded(lambda: function(*args, **kwargs))

    return call


def staged(builder: PlanBuilder, *operands: Any, timeout_ms: int = TIMEOUT_MS) -> list[Any]:
    """Returns the results of a plan whose operands and results pass through the host.

    Works under `jit`, `scan`, `vmap` (one call after another) and `shard_map`, where a device runs
    on the Ascend device of its own number. Eager calls raise `AscendError`; a transformed function
    is to be wrapped in `checked` for that.
    """
    import jax
    from jax.core import Tracer

    runtime.current().require(builder.used)
    shapes = [jax.ShapeDtypeStruct(shape, _jax_type(dtype)) for shape, dtype in builder.results]
    names = builder.text()

    def run() -> Any:
        call = jax.ffi.ffi_call(target(builder.used[-1]), shapes, vmap_method="sequential")
        return call(*operands, plan=builder.words(), names=names, timeout_ms=np.int64(timeout_ms))

    if any(isinstance(operand, Tracer) for operand in operands):
        return run()
    return guarded(run)


def _jax_type(dtype: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(dtype)
