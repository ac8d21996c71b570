"""One process at a time may measure: others compile meanwhile, on cores of their own."""

import contextlib
import faulthandler
import fcntl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds after which a point that holds the devices is ended: it hangs, and the others wait.
LONGEST_TURN = 120


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Holds the lock file, if there is one."""
    if lock is None:
        yield
        return
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Holds the devices, and ends this process with a traceback if that takes too long."""
    with alone(lock):
        faulthandler.dump_traceback_later(LONGEST_TURN, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class Work:
    """What a point is given: where to put lines and files, when to stop, whose turn it is."""

    put: Callable[[dict[str, Any]], None]
    folder: Path
    lock: Path | None
    until: float  # time.time() after which nothing new begins
    small: bool
    devices: int
    took: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keeps the seconds of a part of a point, and says in its log when it begins."""
        begin = time.time()
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        yield
        self.took[name] = round(self.took.get(name, 0.0) + time.time() - begin, 1)
