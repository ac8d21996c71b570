"""The software double as the tests see it, and where both libraries are."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / ".cache" / "ascend" / "double"
KINDS = ("blocks", "tensors", "lists", "arrays", "scalars", "executors", "events")


@dataclass(frozen=True)
class Double:
    """Controls of one build of the double."""

    path: Path

    @property
    def _library(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.path))
        for name in ("calls", "live", "violations"):
            getattr(library, f"dij_double_{name}").restype = ctypes.c_int64
        return library

    def set(self, name: str, value: int) -> None:
        self._library.dij_double_set(name.encode(), ctypes.c_int64(value))

    def set_text(self, name: str, value: str) -> None:
        self._library.dij_double_set_text(name.encode(), value.encode())

    def fault(self, name: str, nth: int, code: int, *, on_device: bool = False) -> None:
        number = ctypes.c_int64(nth)
        self._library.dij_double_fault(name.encode(), number, code, int(on_device))

    def calls(self, name: str) -> int:
        return self._library.dij_double_calls(name.encode())

    def live(self) -> dict[str, int]:
        return {kind: self._library.dij_double_live(kind.encode()) for kind in KINDS}

    def live_bytes(self) -> int:
        return self._library.dij_double_live(b"bytes")

    def violations(self) -> list[str]:
        text = ctypes.create_string_buffer(65536)
        self._library.dij_double_violations(text, ctypes.c_int64(65536))
        return text.value.decode().splitlines()

    def reset(self) -> None:
        self._library.dij_double_reset()


def bridge_of(folder: Path) -> Path:
    return folder / "libdij_ascend.so"


def double_of(folder: Path) -> Double:
    return Double(folder / "libdij_acl_double.so")
