"""One process at a time may measure: others compile meanwhile, on cores of their own."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Holds the lock file, if there is one."""
    if lock is None:
        yield
        return
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
