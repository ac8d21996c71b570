"""The loaded CANN runtime, one a process: found, checked and loaded on request, never at import."""

import ctypes
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from native_ascend import library as native
from native_ascend.errors import AscendError, AscendUnavailable, AscendUnsupported, AscendUnverified
from native_ascend.operators import OPERATORS

OperatorStatus = Literal["verified", "unverified", "missing"]

_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_SPLIT = ("libopapi_math.so", "libopapi_nn.so", "libopapi_transformer.so")
_ALLOW = "DEEPINFER_ASCEND_ALLOW_UNVERIFIED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found, without loading it.

    Attributes:
        available: Whether `load` is expected to succeed.
        reason: Why not; "" if it is.
        tried: Every path that was looked at, in order.
        bridge: The bridge library, None if it is not built.
    """

    available: bool
    reason: str
    tried: tuple[str, ...]
    bridge: str | None


@dataclass(slots=True)
class AscendRuntime:
    """The loaded runtime. Made by `load`.

    Attributes:
        soc: Name of the chip.
        cann_version: Version that the runtime package states.
        device_count: Devices of this host.
        is_double: Whether a software double stands in for CANN.
        operators: What each operator of the table may do here.
        allow_unverified: Whether operators that never ran on hardware may.
    """

    soc: str
    cann_version: str
    device_count: int
    is_double: bool
    operators: dict[str, OperatorStatus]
    allow_unverified: bool
    library: ctypes.CDLL
    paths: tuple[str, ...]
    is_closed: bool = False
    is_tested: bool = False  # self_test has passed
    _warned: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        """Returns what is loaded; a double says so."""
        double = ", a TEST DOUBLE" if self.is_double else ""
        return f"AscendRuntime({self.soc}, CANN {self.cann_version}{double})"

    def require(self, names: Iterable[str]) -> None:
        """Checks that the operators may run here.

        Raises:
            AscendUnsupported: the loaded libraries lack one. Nothing else computes it.
            AscendUnverified: one has not been verified on hardware and this is hardware.
        """
        if self.is_closed:
            raise AscendUnavailable("the Ascend runtime was closed: start a new process")
        names = list(names)
        missing = [name for name in names if self.operators.get(name, "missing") == "missing"]
        if missing:
            raise AscendUnsupported(
                f"{self!r} lacks {', '.join(missing)}; nothing else computes what they do",
                status="UNIMPLEMENTED",
                op=missing[0],
                is_double=self.is_double,
            )
        if self.is_double:
            return
        unverified = [name for name in names if self.operators[name] == "unverified"]
        if unverified and not (self.allow_unverified or os.environ.get(_ALLOW) == "1"):
            raise AscendUnverified(
                f"{', '.join(unverified)} never ran on Ascend hardware: pass "
                f"allow_unverified=True or set {_ALLOW}=1 to be the first",
                op=unverified[0],
            )
        for name in set(unverified) - self._warned:
            self._warned.add(name)
            warnings.warn(f"{name} is unverified on hardware", UserWarning, stacklevel=3)

    def close(self) -> None:
        """Finalises ACL. Nothing runs in this process afterwards."""
        if not self.is_closed:
            self.is_closed = True
            native.call(self.library, "dij_close")


_loaded: AscendRuntime | None = None


def _candidates(home: str | None) -> list[Path]:
    """Returns the folders that may hold CANN, of `home` or of the environment."""
    homes = [home] if home else [os.environ[name] for name in _HOMES if os.environ.get(name)]
    return [folder for h in homes for folder in (Path(h) / "lib64", Path(h) / "lib", Path(h))]


def _find(home: str | None) -> tuple[list[str], list[str]]:
    """Returns (libraries to load, paths tried); no libraries if there are none.

    Either the split operator libraries or the old single one, never both.
    """
    tried = []
    if home and Path(home).is_file():
        return [home], [home]
    for folder in _candidates(home):
        tried.append(str(folder / "libascendcl.so"))
        if not (folder / "libascendcl.so").is_file():
            continue
        common = [folder / name for name in ("libascendcl.so", "libnnopbase.so")]
        split = [folder / name for name in _SPLIT if (folder / name).is_file()]
        found = common + (split or [folder / "libopapi.so"])
        return [str(path) for path in found if path.is_file()], tried
    if home:
        return [], tried
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return [], [*tried, "libascendcl.so on the loader's path"]
    return ["libascendcl.so", "libnnopbase.so", *_SPLIT], [*tried, "libascendcl.so"]


def probe(home: str | None = None) -> Probe:
    """Says whether an Ascend runtime can be loaded, and if not why. Loads nothing of CANN's."""
    bridge = native.LIBRARY if native.LIBRARY.is_file() else None
    libraries, tried = _find(home)
    reasons = []
    if bridge is None:
        reasons.append(f"there is no bridge library at {native.LIBRARY}: {native.BUILD_HINT}")
    if not libraries:
        reasons.append(
            "CANN was not found: install it and source its set_env.sh, or set ASCEND_HOME_PATH; "
            f"tried {', '.join(tried)}"
        )
    return Probe(
        available=not reasons,
        reason="; ".join(reasons),
        tried=tuple(tried),
        bridge=str(bridge) if bridge else None,
    )


def available(home: str | None = None) -> bool:
    """Says whether an Ascend runtime can be loaded; `probe` says why not."""
    return probe(home).available


def load(
    home: str | None = None,
    *,
    allow_double: bool = False,
    allow_unverified: bool = False,
    bridge: str | None = None,
) -> AscendRuntime:
    """Loads CANN and registers the custom calls; a second call returns the same runtime.

    Args:
        home: CANN's folder, or the file of a double; None: the environment, then the loader's path.
        allow_double: Accept a library that says it is a test double.
        allow_unverified: Run operators that never ran on hardware, with one warning each.
        bridge: The bridge library if not the one that `make ascend` builds.

    Raises:
        AscendUnavailable: no bridge, no CANN, no device, a wrong version or chip.
        AscendError: a double without `allow_double`, or other arguments than the first time.
    """
    global _loaded
    libraries, tried = _find(home)
    if _loaded is not None:
        same = tuple(libraries) == _loaded.paths and allow_unverified == _loaded.allow_unverified
        if same:
            return _loaded
        raise AscendError(f"{_loaded!r} is loaded from {_loaded.paths}: one runtime a process")
    found = native.open_library(Path(bridge) if bridge else native.LIBRARY)
    if not libraries:
        raise AscendUnavailable(
            f"CANN was not found, tried {', '.join(tried)}: install it and source its set_env.sh, "
            "or set ASCEND_HOME_PATH",
            status="UNAVAILABLE",
        )
    allowed = [
        os.environ.get(f"DEEPINFER_ASCEND_ALLOW_{name}", "").encode() for name in ("CANN", "SOC")
    ]
    native.call(found, "dij_load", "\n".join(libraries).encode(), int(allow_double), *allowed)
    soc, version = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)
    devices, is_double = ctypes.c_uint32(), ctypes.c_int()
    native.call(
        found, "dij_facts", soc, version, 128, ctypes.byref(devices), ctypes.byref(is_double)
    )
    operators: dict[str, OperatorStatus] = {
        name: "missing"
        if not found.dij_has_operator(name.encode())
        else "verified"
        if record.verified_on_hardware
        else "unverified"
        for name, record in OPERATORS.items()
    }
    _loaded = AscendRuntime(
        soc=soc.value.decode(),
        cann_version=version.value.decode(),
        device_count=devices.value,
        is_double=bool(is_double.value),
        operators=operators,
        allow_unverified=allow_unverified,
        library=found,
        paths=tuple(libraries),
    )
    from native_ascend import ffi

    ffi.register(found)
    return _loaded


def is_loaded() -> bool:
    """Says whether this process has loaded a runtime."""
    return _loaded is not None


def current() -> AscendRuntime:
    """Returns the loaded runtime.

    Raises:
        AscendUnavailable: none is loaded; says why one could not be.
    """
    if _loaded is None:
        found = probe()
        why = found.reason or "call native_ascend.load() first"
        raise AscendUnavailable(f"no Ascend runtime is loaded: {why}", status="FAILED_PRECONDITION")
    return _loaded


def diagnostics() -> dict[str, str]:
    """Returns what there is and what is loaded, for `deepinfer-jax env` and bug reports."""
    found = probe()
    report = {
        "bridge": found.bridge or "not built",
        "cann": "found" if found.available else found.reason or "not found",
        "abi": "checked against the headers of the build"
        if _loaded and _loaded.library.dij_abi_checked()
        else "not checked (no CANN headers at build time)"
        if _loaded
        else "unknown until a runtime is loaded",
        "loaded": repr(_loaded) if _loaded else "nothing",
    }
    for name in ("HCCL_BUFFSIZE", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", _ALLOW):
        report[name] = os.environ.get(name, "not set")
    if _loaded:
        missing = [name for name, status in _loaded.operators.items() if status == "missing"]
        report["missing operators"] = ", ".join(missing) or "none"
    return report
