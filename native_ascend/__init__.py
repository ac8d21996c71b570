"""Custom-call bridge from JAX to CANN operators on Ascend NPUs.

Status: the Ascend bridge has not run on Ascend hardware. Every operator is marked unverified.
Numerical agreement, performance and stability are unknown.

JAX has no released Ascend backend: a program runs on the host CPU and calls CANN through XLA custom
calls. Importing this package loads nothing native and registers nothing; `load` does. Without CANN
`probe` says why, and everything that needs it raises `AscendUnavailable`.
"""

from native_ascend.errors import (
    AscendError,
    AscendUnavailable,
    AscendUnsupported,
    AscendUnverified,
)
from native_ascend.runtime import (
    AscendRuntime,
    Probe,
    available,
    current,
    diagnostics,
    load,
    probe,
)

#: Fixed wording, which a test looks for in the documentation.
STATUS = (
    "Status: the Ascend bridge has not run on Ascend hardware. Every operator is marked "
    "unverified. Numerical agreement, performance and stability are unknown."
)

__all__ = [
    "STATUS",
    "AscendError",
    "AscendRuntime",
    "AscendUnavailable",
    "AscendUnsupported",
    "AscendUnverified",
    "Probe",
    "available",
    "current",
    "diagnostics",
    "load",
    "probe",
]
