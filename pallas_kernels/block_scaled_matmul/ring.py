"""The ring of shared-memory stages between the copying and the computing warpgroups."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import pl, plgpu

LINE = 32  # scales (of four bytes) of one copy, 128 bytes: the least that keeps slots aligned
ALIGNED = 4  # a TMA copy begins at 16 bytes; elsewhere the GPU stops with an illegal instruction
COPY_REGISTERS = 40
MOST_REGISTERS = 240


def compute_registers(warpgroups: int) -> int:
    """Returns the registers a thread of a computing warpgroup gets beside the copying one.

    A block can only share out what it was launched with; asking for more waits for ever.
    """
    launched = min(65536 // (128 * (warpgroups + 1)) // 8 * 8, MOST_REGISTERS)
    free = launched * (warpgroups + 1) - COPY_REGISTERS
    return min(free // warpgroups // 8 * 8, MOST_REGISTERS)


def release_barrier(stages: int, warpgroups: int, cluster: int) -> Any:
    """Returns the barriers by which computing warpgroups give stages back, one a stage.

    Those of every block of a cluster, since its blocks share what is copied.
    """
    if cluster > 1:
        return plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=warpgroups, num_barriers=stages
        )
    return plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)


def line_of(index: jax.Array) -> Any:
    """Returns the scales that one copy fetches for the scale ``index``, which is among them."""
    return pl.ds(lax.div(index, jnp.int32(ALIGNED)) * ALIGNED, LINE)


def place_in_line(index: jax.Array) -> jax.Array:
    """Returns where the scale ``index`` lies in what ``line_of`` fetched."""
    return lax.rem(index, jnp.int32(ALIGNED))


class Ring:
    """Slots of stages in use order, each with a barrier for filled and one for read.

    A slot is carried through loops as int32 and advanced by ``after``: a remainder of a step
    count would cost more than the rest of a step's bookkeeping.
    """

    def __init__(self, stages: int, full: Any, empty: Any) -> None:
        self.stages, self.full, self.empty = stages, full, empty

    def after(self, slot: jax.Array) -> jax.Array:
        """Returns the slot that follows."""
        return jnp.where(slot == self.stages - 1, 0, slot + 1)

    def acquire(self, slot: jax.Array, step: jax.Array) -> None:
        """Producer: waits until the slot, used before unless ``step`` is small, has been read."""

        @pl.when(step >= self.stages)
        def _reused() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

    def wait(self, slot: jax.Array) -> None:
        """Consumer: waits until the slot has been filled."""
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot: jax.Array) -> None:
        """Consumer: gives a slot back."""
        plgpu.barrier_arrive(self.empty.at[slot])

    def drain(self, slot: jax.Array, steps: jax.Array) -> None:
        """Producer: waits for the last reads, so that no barrier ends in an unseen phase.

        Args:
            slot: the slot after the last step's.
            steps: how many steps there were.
        """

        def one(_: jax.Array, slot: jax.Array) -> jax.Array:
            plgpu.barrier_wait(self.empty.at[slot])
            return self.after(slot)

        first = jnp.where(steps >= self.stages, slot, 0)
        lax.fori_loop(jnp.int32(0), jnp.minimum(steps, self.stages), one, first)
