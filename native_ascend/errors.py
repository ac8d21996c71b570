"""Errors of the Ascend bridge: its own, since it imports nothing of deepinfer_jax."""

import re

_STATUS = re.compile(r"^\s*(?:XLA:CPU \w+ )?([A-Z_]+): (.*ascend: .*)$", re.DOTALL)
_CALL = re.compile(r"ascend: (\w+) returned (-?\d+)")
_WHERE = re.compile(r"\[op=(\S+) device=(-?\d+) cann=(\S+?)( double)?\]")


class AscendError(RuntimeError):
    """A failure in the bridge, in ACL or in an operator.

    Attributes:
        code: Number that the call returned, None if no call failed.
        call: Name of that call, "" if none.
        status: Status name of the FFI, such as "RESOURCE_EXHAUSTED".
        op: Operator, "" or "-" if none.
        device: Device number, -1 if none.
        is_double: Whether a test double stood in for CANN.
    """

    def __init__(
        self,
        text: str,
        *,
        code: int | None = None,
        call: str = "",
        status: str = "FAILED_PRECONDITION",
        op: str = "",
        device: int = -1,
        is_double: bool = False,
    ) -> None:
        """Keeps the parts beside the text."""
        super().__init__(text)
        self.code = code
        self.call = call
        self.status = status
        self.op = op
        self.device = device
        self.is_double = is_double


class AscendUnavailable(AscendError):
    """There is no bridge library, no CANN, no device, or a version the bridge is not for."""


class AscendUnsupported(AscendError):
    """An operator, data type, shape or model option outside the operator table."""


class AscendUnverified(AscendError):
    """An operator that has not been verified on hardware was about to run on hardware."""


def error_of(text: str) -> AscendError | None:
    """Returns the error of a text that the bridge wrote, None for any other text.

    text: of a `JaxRuntimeError`, of the `ValueError` that a cached call raises for the same
    failure, or of the C interface.
    """
    found = _STATUS.match(text)
    if found is None:
        return None
    status, rest = found.groups()
    call, where = _CALL.search(rest), _WHERE.search(rest)
    kind = {"UNIMPLEMENTED": AscendUnsupported, "UNAVAILABLE": AscendUnavailable}.get(
        status, AscendError
    )
    return kind(
        text.strip(),
        code=int(call.group(2)) if call else None,
        call=call.group(1) if call else "",
        status=status,
        op=where.group(1) if where else "",
        device=int(where.group(2)) if where else -1,
        is_double=bool(where and where.group(4)),
    )
