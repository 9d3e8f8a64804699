"""The one error shape of the HTTP API: OpenAI's error object with stable string codes."""

from __future__ import annotations

import json
from collections.abc import Mapping

INVALID_REQUEST = "invalid_request_error"

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_MAX_QUOTED_CHARS = 64


class ApiError(Exception):
    """An answer other than 200. `code` is stable; `param` names the request field; messages carry the
    values."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers: dict[str, str] = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's class of the error, from the status. All 4xx but 401, 403 and 429 are one type."""
        return _TYPE_OF_STATUS.get(self.status, INVALID_REQUEST if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """The JSON body. ASCII only, so no control or bidirectional character reaches a terminal or a log."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request says something impossible."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, why: str = "is not supported by this server") -> ApiError:
    """400: a field we know and do not serve; never ignored silently."""
    return ApiError(400, f"{param} {why}.", code="unsupported_parameter", param=param)


def context_length_exceeded(prompt: int | str, budget: int, limit: int, param: str) -> ApiError:
    """400: prompt and budget do not fit. `prompt` is a count, or words such as "at least 5000"."""
    return ApiError(
        400,
        f"This model's context length is {limit} tokens, but the request needs {prompt} tokens of prompt "
        f"plus {short(budget)} of completion. Shorten the prompt or lower max_tokens.",
        code="context_length_exceeded",
        param=param,
    )


def model_not_found(name: str) -> ApiError:
    """404: the model is not served here."""
    return ApiError(404, f"The model {quoted(name)} does not exist.", code="model_not_found", param="model")


def overloaded(
    message: str, *, retry_after_s: float, code: str = "server_is_overloaded", status: int = 503
) -> ApiError:
    """503 (or 429 for one caller's own limit): the same request can succeed later."""
    # Whole seconds in Retry-After for proxies, the exact time in OpenAI's own header.
    headers = {
        "retry-after": str(max(1, round(retry_after_s))),
        "retry-after-ms": str(max(1, round(retry_after_s * 1000))),
        "x-should-retry": "true",
    }
    return ApiError(status, message, code=code, headers=headers)


def internal_error(code: str = "internal_error", message: str | None = None) -> ApiError:
    """500: our fault. Says nothing of the inside; repeating it would only cost twice."""
    text = message or "The server had an internal error. The request id identifies it in the server's log."
    return ApiError(500, text, code=code, headers={"x-should-retry": "false"})


def quoted(text: str) -> str:
    """A client's text inside a message: cut, and with control characters escaped."""
    cut = text[:_MAX_QUOTED_CHARS] + ("..." if len(text) > _MAX_QUOTED_CHARS else "")
    return json.dumps(cut)


def short(value: object) -> str:
    """A value for a message: its kind for containers, itself (cut) for scalars."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "a number beyond 64 bits"
    return quoted(value) if isinstance(value, str) else repr(value)
