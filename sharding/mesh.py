"""The one mesh: four axes, their sizes, and the groups that are products of axes.

Devices lie row-major over (er, dp, cp, tp): context and tensor partners are neighbours, expert
groups are contiguous blocks, replicas of the experts are outermost (parallelism.md 1.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.errors import ShardingError

AXES = ("er", "dp", "cp", "tp")
#: Axes over which attention is replicated: each replica has its own sequences and cache.
DATA_AXES = ("er", "dp")
#: Axes over which the experts of one replica group are split.
EXPERT_AXES = ("dp", "cp", "tp")
#: The axis over which the rows of a replica are split.
CONTEXT_AXIS = "cp"
#: Axes over which the rows of a step are split.
ROW_AXES = ("er", "dp", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """Sizes of the four axes; hashable, so that it may be part of a program's identity.

    er: complete copies of the experts. dp: attention replicas that share one copy. cp: devices that
    share the rows of a replica. tp: devices that share a matrix.
    """

    er: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return (self.er, self.dp, self.cp, self.tp)

    @property
    def devices(self) -> int:
        """Devices of the whole mesh."""
        return prod(self.shape)

    @property
    def data_parallel(self) -> int:
        """Attention replicas: er * dp."""
        return self.er * self.dp

    @property
    def expert_parallel(self) -> int:
        """Devices that share one copy of the experts: dp * cp * tp."""
        return self.dp * self.cp * self.tp

    def of(self, axes: Sequence[str]) -> int:
        """Returns the product of the sizes of some axes."""
        return prod(getattr(self, axis) for axis in axes)


def mesh_sizes(mesh: MeshSizes | Mesh | Mapping[str, int]) -> MeshSizes:
    """Returns the axis sizes of a mesh, or of a dict of sizes in which a missing axis has size 1.

    Raises:
        ShardingError: another axis name, an axis missing from a `Mesh`, or a size below 1.
    """
    if isinstance(mesh, MeshSizes):
        return mesh
    is_mesh = isinstance(mesh, Mesh)
    given: dict[str, Any] = dict(mesh.shape) if is_mesh else dict(mesh)
    if sorted(given) != sorted(AXES) if is_mesh else not set(given) <= set(AXES):
        raise ShardingError(
            f"a mesh has {'exactly' if is_mesh else 'no axes but'} the axes {AXES}",
            repr(tuple(given)),
            "name the axes er (copies of the experts), dp, cp and tp",
        )
    for axis, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ShardingError(
                "an axis of a mesh has a whole number of devices, at least 1",
                f"{axis}={size!r}",
                "leave the axis out for size 1",
            )
    return MeshSizes(**{axis: int(size) for axis, size in given.items()})


def build_mesh(
    mesh: MeshSizes | Mesh | Mapping[str, int], devices: Sequence[Any] | None = None
) -> Mesh:
    """Returns the device mesh of some sizes, with axes in the order of `AXES` and of type Auto.

    The program that runs on it is one `shard_map` over all axes; what surrounds that handles
    replicated arrays only, so that no axis needs to be explicit.

    Args:
        mesh: sizes, or a mesh whose devices are used as they lie.
        devices: devices to take in this order; None takes `jax.devices()`.

    Raises:
        ShardingError: `mesh_sizes`, or fewer devices than the mesh needs.
    """
    sizes = mesh_sizes(mesh)
    types = (AxisType.Auto,) * len(AXES)
    if isinstance(mesh, Mesh):
        order = [mesh.axis_names.index(axis) for axis in AXES]
        return Mesh(mesh.devices.transpose(order), AXES, axis_types=types)
    found = list(jax.devices() if devices is None else devices)
    if len(found) < sizes.devices:
        raise ShardingError(
            f"a mesh of {describe_sizes(sizes)} needs {sizes.devices} devices",
            f"{len(found)} ({found[0].device_kind})" if found else "none",
            "make the product of the sizes smaller; on a CPU, devices are emulated with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={sizes.devices}",
        )
    grid = np.asarray(found[: sizes.devices], dtype=object).reshape(sizes.shape)
    return Mesh(grid, AXES, axis_types=types)


def describe_sizes(sizes: MeshSizes) -> str:
    """Returns the sizes in words, axes of size 1 left out: "dp=2, cp=4"."""
    named = [f"{axis}={size}" for axis, size in zip(AXES, sizes.shape, strict=True) if size > 1]
    return ", ".join(named) or "one device"
