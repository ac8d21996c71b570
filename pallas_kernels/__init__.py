"""Kernels of the network and their fixed-order primitives (jax and numpy only).

Importing this package imports neither jax nor Mosaic; an op's implementation is imported when it
first runs.
"""

from pallas_kernels.dispatch import SWITCHES, report, resolve
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.tables import COVERED, Widths

__all__ = [
    "COVERED",
    "SWITCHES",
    "KernelError",
    "KernelUnsupported",
    "Widths",
    "report",
    "resolve",
]
