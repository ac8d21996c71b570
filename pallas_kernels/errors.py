"""Errors of pallas_kernels; deepinfer_jax re-raises them under its own error tree."""


class KernelError(ValueError):
    """An operation of this package was called with arguments it cannot honour."""


class KernelUnsupported(KernelError):
    """A named implementation exists but cannot run here (backend, shape or determinism level)."""
