"""The one place that knows which Pallas Mosaic-GPU API this jax has (kernels.md 1.6 and 2.1).

Imported lazily, by implementations only: importing ``pallas_kernels`` must not import Mosaic.
Everything a kernel needs from jax's unstable modules comes through the names below.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

__all__ = [
    "H200_SMS",
    "SMEM_LIMIT",
    "load",
    "pl",
    "plgpu",
    "round_up",
    "run_interpreted",
    "tiled",
]

#: The unstable API itself; untyped, because its annotations promise less than it takes.
plgpu: Any = mosaic_gpu
#: Streaming multiprocessors of an H200; kernels take ``num_sms`` so that they trace on a CPU.
H200_SMS = 132
#: Shared memory that one block may use on sm_90 and sm_100, in bytes.
SMEM_LIMIT = 232_448


def load(ref: Any, index: Any = (), **options: Any) -> jax.Array:
    """Returns ``ref[index]`` as a register array; the same call under jax 0.11 and 0.12.

    Args:
        ref: a GMEM or SMEM reference.
        index: anything ``ref.at`` takes; () loads the whole reference.
        **options: ``layout=`` and ``optimized=`` of ``plgpu.load``.
    """
    return plgpu.load(ref.at[index] if index != () else ref, **options)


def tiled(minor: int, dtype: Any, swizzle: int | None = None) -> tuple[Any, ...]:
    """Returns the SMEM transforms of an MMA operand whose last axis has ``minor`` elements.

    Args:
        minor: elements of the last axis.
        dtype: element type.
        swizzle: bytes (128, 64, 32); None takes the largest that divides a row.
    """
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    chosen = plgpu.find_swizzle(minor * bits) if swizzle is None else swizzle
    return (
        plgpu.TilingTransform((8, chosen * 8 // bits)),
        plgpu.SwizzleTransform(chosen),
    )


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


def run_interpreted(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns ``fn(*args)`` with every Mosaic kernel inside run by the CPU interpreter.

    Scratch starts as NaN, reads out of bounds raise, and races are an error.

    Raises:
        AssertionError: the interpreter recorded a race (jax 0.11 does not raise by itself).
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    params = plgpu.InterpretGPUParams(detect_races=True)
    try:
        with plgpu.force_gpu_interpret_mode(params):
            out = jax.block_until_ready(fn(*args))
    except Exception:
        # otherwise every later kernel of this process fails too
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
    races = interpret_pallas_call.get_races()
    if races is not None and races.races_found:
        raise AssertionError(f"the interpreter found a data race in {fn}: see its printed report")
    return out
