"""`--mesh` and `--distributed`: the devices of a command, those of one process or of a job."""

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sharding.processes import Processes

MeshOption = Annotated[
    str | None,
    typer.Option(metavar="SIZES", help='Devices, as "er=1,dp=4,cp=2"; one if not given.'),
]
DistributedOption = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="This is one of the processes of a job that its environment names: "
        "DEEPINFER_COORDINATOR, _PROCESSES and _PROCESS, or SLURM's variables.",
    ),
]


def read_sizes(text: str) -> dict[str, int]:
    """Returns the sizes that `--mesh` gives.

    Raises:
        ConfigError: it is no list of sizes.
    """
    from deepinfer_jax.errors import ConfigError

    found = re.findall(r"(\w+)=(\d+)", text)
    if ",".join(f"{axis}={size}" for axis, size in found) != text.replace(" ", ""):
        raise ConfigError(f'--mesh is a list like "er=1,dp=8,cp=1", got {text!r}')
    return {axis: int(size) for axis, size in found}


def enter_devices(
    mesh: str | None, distributed: bool
) -> "tuple[Processes | None, dict[str, int] | None]":
    """Returns (the job that this process has joined, sizes for `load(mesh=)`), None for neither.

    To be called before anything else of jax. Without `--mesh` all devices of a job share the
    experts.

    Raises:
        ConfigError: the environment names no job, or an option is no mesh.
    """
    from deepinfer_jax.errors import ConfigError
    from sharding.errors import ShardingError
    from sharding.processes import VARIABLES, find_processes, join

    sizes = None if mesh is None else read_sizes(mesh)
    if not distributed:
        return None, sizes
    try:
        job = find_processes()
        if job is None:
            raise ConfigError(
                "--distributed needs a job of several processes, and the environment names none: "
                f"set {', '.join(VARIABLES)} in each of them, or start them with srun"
            )
        _keep_stdout()
        join(job)
    except ShardingError as error:
        raise ConfigError(f"--distributed: {error}") from error
    if sizes is None:
        import jax

        sizes = {"dp": jax.device_count()}
    return job, sizes


def _keep_stdout() -> None:
    """Leaves stdout to what Python writes; gloo, for one, prints there that it is connected."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding)
