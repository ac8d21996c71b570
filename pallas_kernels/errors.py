"""Errors of pallas_kernels; deepinfer_jax re-raises them under its own error tree."""


class KernelError(ValueError):
    """An operation of this package was called with arguments it cannot honour."""


class KernelUnsupported(KernelError):
    """A named implementation that does not exist or cannot run what it was given.

    Attributes:
        op: the operation, for example ``"block_scaled_matmul"``.
        implementation: the name that was asked for, for example ``"mosaic_sm90"``.
        rule: what the implementation needs.
        got: what it was given instead.
        remedy: what the caller can do.
        fields: the five together, in this order.
    """

    def __init__(self, op: str, implementation: str, rule: str, got: str, remedy: str) -> None:
        super().__init__(f"{op} {implementation!r}: {rule}, got {got}: {remedy}")
        self.fields = (op, implementation, rule, got, remedy)
        self.op = op
        self.implementation = implementation
        self.rule = rule
        self.got = got
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str, str]]:
        # an exception is otherwise rebuilt from its one message when it crosses a process
        return type(self), self.fields


def require_named(op: str, implementation: str, implementations: tuple[str, ...]) -> None:
    """Checks that an op has an implementation of that name.

    Raises:
        KernelUnsupported: it has not.
    """
    if implementation not in implementations:
        raise KernelUnsupported(
            op,
            implementation,
            f"an implementation is one of {implementations}",
            repr(implementation),
            "name one of them",
        )
