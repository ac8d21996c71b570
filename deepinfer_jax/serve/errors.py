"""Errors as HTTP answers, in the envelope of the protocol that was spoken."""

import re
from typing import Any

from deepinfer_jax.errors import DeepInferError, InputError, TokenizerError
from deepinfer_jax.grammar.aliases import ConstraintError

#: Status -> (OpenAI's type, Anthropic's type).
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("overloaded_error", "overloaded_error"),
}
_FAILURE = ("server_error", "api_error")
#: How messages of this package begin: the field, and the rule it breaks.
_FIELD = re.compile(r"([a-z][a-z0-9_]*(?:\[\d+\]|\.[a-z0-9_]+)*) (?:must|may|needs|promises)")


class ApiError(Exception):
    """What is answered instead of a result.

    status: of HTTP. param: the field at fault. code: a word for programs. retry_after_s: when to
    come back.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Keeps what is answered."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def envelope(self, *, is_anthropic: bool) -> dict[str, Any]:
        """Returns the answer's JSON."""
        openai, anthropic = _TYPES.get(self.status, _FAILURE)
        if is_anthropic:
            return {"type": "error", "error": {"type": anthropic, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": openai,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_field(param: str, rule: str, value: object, advice: str = "") -> ApiError:
    """Returns the 400 that says which field breaks which rule."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    end = f": {advice}" if advice else ""
    return ApiError(400, f"{param} must be {rule}, got {shown}{end}", param=param)


def as_api_error(error: BaseException) -> ApiError:
    """Returns the answer to an error of this package: 400 for the client's, 500 for the rest."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConstraintError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, InputError | TokenizerError):
        message = str(error)
        found = _FIELD.match(message)
        return ApiError(400, message, param=found[1] if found else None)
    if isinstance(error, DeepInferError):
        return ApiError(500, str(error), code=type(error).__name__)
    return ApiError(500, f"the server failed with {type(error).__name__}", code="internal_error")
