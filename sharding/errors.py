"""Errors of sharding; deepinfer_jax re-raises them under its own error tree."""


class ShardingError(ValueError):
    """A mesh, placement or plan that cannot be honoured.

    Attributes:
        rule: what must hold.
        got: what was given instead.
        remedy: what the caller can do.
    """

    def __init__(self, rule: str, got: str, remedy: str) -> None:
        super().__init__(f"{rule}, got {got}: {remedy}")
        self.rule = rule
        self.got = got
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        # an exception is otherwise rebuilt from its one message when it crosses a process
        return type(self), (self.rule, self.got, self.remedy)
