"""Several processes as one job: who is in it, the start, and plans from the first to the others.

The processes are started by something else (a shell, SLURM, Kubernetes, Ray); each calls `join`
before anything else of jax. They run the same programs in the same order; a host channel carries
what the first decides (parallelism.md 6).
"""

import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import jax

from sharding.errors import ShardingError

#: Environment variables of our own; each wins over what a launcher sets.
VARIABLES = ("DEEPINFER_COORDINATOR", "DEEPINFER_PROCESSES", "DEEPINFER_PROCESS")
#: What a process of a broken job ends with; supervisors start the whole job again.
LOST_PEER = 134
#: Bytes of one entry of the coordinator's store, which takes messages of up to 4 MiB.
PART_BYTES = 2**20
#: Messages that stay in the store.
KEPT = 1024
#: Seconds after which a silent process counts as dead.
HEARTBEAT_SECONDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The job: address of its first process, how many there are, which of them this one is.

    device: the one of its host's devices that it uses; None uses all it can see.
    """

    coordinator: str
    count: int
    index: int
    device: int | None = None


def find_processes(
    environment: Mapping[str, str] | None = None,
    *,
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
) -> Processes | None:
    """Returns the job that this process belongs to, None if it is alone.

    Arguments win over `VARIABLES`, those over SLURM's; all three values come from one source.

    Raises:
        ShardingError: a source that has some of the values and not all, or impossible ones.
    """
    environment = os.environ if environment is None else environment
    given = {"coordinator": coordinator, "count": count, "index": index}
    own = dict(zip(given, (environment.get(name) for name in VARIABLES), strict=True))
    names = dict(zip(given, VARIABLES, strict=True))
    for source, values in (("arguments", given), ("environment", own), ("SLURM", None)):
        found = _slurm(environment) if values is None else values
        if found is None or all(value is None for value in found.values()):
            continue
        missing = [key for key, value in found.items() if value is None]
        if missing:
            raise ShardingError(
                "a job of several processes needs coordinator (host:port), count and index",
                f"{', '.join(missing)} missing from {source}",
                "give all three, or set " + ", ".join(names[key] for key in missing),
            )
        return _checked(found, source, _own_device(environment))
    return None


def _own_device(environment: Mapping[str, str]) -> int | None:
    """Returns the device of this process where SLURM starts several on a host, else None.

    One process of a host gets all its devices, where jax would give it the first alone.
    """
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE"))
    place = environment.get("SLURM_LOCALID", "")
    if not place.isdigit() or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    return None if tasks and re.fullmatch(r"1(\(x\d+\))?", tasks) else int(place)


def _checked(found: Mapping[str, Any], source: str, device: int | None) -> Processes | None:
    try:
        one = Processes(
            coordinator=str(found["coordinator"]),
            count=int(found["count"]),
            index=int(found["index"]),
            device=device,
        )
    except ValueError as error:
        raise ShardingError(
            "count and index of a job are whole numbers",
            f"{found['count']!r} and {found['index']!r} from {source}",
            "correct them",
        ) from error
    if not 0 <= one.index < one.count or ":" not in one.coordinator:
        raise ShardingError(
            "a coordinator is host:port, and 0 <= index < count",
            f"{one.coordinator!r}, index {one.index} of {one.count} from {source}",
            "correct them",
        )
    return one if one.count > 1 else None


def _slurm(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns what a SLURM step says; its first host coordinates, the port follows the job."""
    if "SLURM_STEP_NODELIST" not in environment and "SLURM_NTASKS" not in environment:
        return None
    hosts, job = environment.get("SLURM_STEP_NODELIST"), environment.get("SLURM_JOB_ID", "0")
    port = 61440 + int(job) % 4096 if job.isdigit() else 61440
    return {
        "coordinator": None if hosts is None else f"{first_host(hosts)}:{port}",
        "count": environment.get("SLURM_NTASKS"),
        "index": environment.get("SLURM_PROCID"),
    }


def first_host(hosts: str) -> str:
    """Returns the first name of a SLURM host list: "gpu[07-12,15],x1" is "gpu07"."""
    head, bracket, rest = hosts.partition("[")
    if not bracket or "," in head:
        return hosts.split(",")[0]
    first = rest.split("]")[0].split(",")[0].split("-")[0]
    return head + first


def join(processes: Processes, *, wait_seconds: int = 300) -> None:
    """Joins the job; before anything else of jax. Every device of every process is in `devices`.

    JAX_LOCAL_DEVICE_IDS="0,1" of the environment names the devices of a process outside SLURM.

    Raises:
        ShardingError: jax was used before.
    """
    try:
        jax.distributed.initialize(
            coordinator_address=processes.coordinator,
            num_processes=processes.count,
            process_id=processes.index,
            local_device_ids=processes.device,
            cluster_detection_method="deactivate",  # it would guess devices (`_own_device`)
            initialization_timeout=wait_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        raise ShardingError(
            "a process joins its job before it uses jax",
            str(error).splitlines()[0],
            "call join first",
        ) from error


class Channel:
    """Numbered messages from the first process to the others, through the job's coordinator.

    It does not depend on device work: a process that waits for a message holds no collective.
    """

    _opened: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str = "plan") -> None:
        """Opens the channel; every process of the job opens it alike, and as often."""
        from jax._src import distributed  # the one private name; jax has no public channel

        self._client: Any = distributed.global_state.client
        self._name, self._next = f"{name}.{self._opened[name]}", 0
        self._opened[name] += 1
        if self._client is None:
            raise ShardingError(
                "a channel needs a job of several processes", "none", "call join first"
            )

    @property
    def step(self) -> int:
        """Number of the next message."""
        return self._next

    def send(self, message: bytes) -> int:
        """Sends to all others; returns the number of the message. The first process calls it."""
        number = self._next
        parts = [message[i : i + PART_BYTES] for i in range(0, len(message), PART_BYTES)] or [b""]
        for place, part in enumerate(parts):
            is_last = place == len(parts) - 1
            self._client.key_value_set_bytes(self._key(number, place), bytes([is_last]) + part)
        if number >= KEPT:  # read long ago: no process is more than a few steps behind
            self._client.key_value_delete(f"{self._name}/{number - KEPT}/")
        self._next += 1
        return number

    def receive(self, seconds: float = 3600.0) -> bytes:
        """Returns the next message; waits for it.

        Raises:
            TimeoutError: it did not come.
        """
        parts: list[bytes] = []
        end = time.monotonic() + seconds
        while not parts or not parts[-1][0]:
            parts.append(self._wait(self._key(self._next, len(parts)), end))
        self._next += 1
        return b"".join(part[1:] for part in parts)

    def meet(self, seconds: float = 1800.0) -> None:
        """Returns when every process has called this after the same message.

        The first exchange of a program has to begin within 30 s everywhere, and compiling takes
        longer: processes meet after it.
        """
        self._client.wait_at_barrier(f"{self._name}/after/{self._next}", int(1000 * seconds))

    def _key(self, number: int, part: int) -> str:
        return f"{self._name}/{number}/{part}"

    def _wait(self, key: str, end: float) -> bytes:
        while True:
            left = min(max(end - time.monotonic(), 0.001), 60.0)
            try:
                return self._client.blocking_key_value_get_bytes(key, int(1000 * left))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() >= end:
                    raise TimeoutError(f"message {key} did not come in time") from error


def run_or_end(work: Callable[[], Any], step: Callable[[], int]) -> Any:
    """Returns work(); if it fails, says at which step and ends the process at once.

    What is left of a job that lost a process cannot be used: its next collective would wait for
    ever, and a regular exit waits for the lost one. Exit code `LOST_PEER`.
    """
    try:
        return work()
    except Exception:
        _end(step())


def _end(step: int) -> NoReturn:
    index, count = jax.process_index(), jax.process_count()
    traceback.print_exc()
    print(
        f"process {index} of {count} ends at step {step}: a process of a job that fails ends the "
        "job, because the others would wait for it. Start all processes again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(LOST_PEER)
