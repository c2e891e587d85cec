"""Errors as OpenAI's surfaces write them: kind to status and type, the envelope, the event that breaks a stream off.

Thread: loop.
"""

from typing import Any

from core.errors import ErrorKind, ServiceError
from core.types import FinishReason
from server.wire import sse

# ErrorKind -> (status, the envelope's type)
STATUSES: dict[ErrorKind, tuple[int, str]] = {
    ErrorKind.INVALID_REQUEST: (400, "invalid_request_error"),
    ErrorKind.AUTHENTICATION: (401, "authentication_error"),
    ErrorKind.PERMISSION: (403, "permission_error"),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error"),
    ErrorKind.METHOD_NOT_ALLOWED: (405, "invalid_request_error"),
    ErrorKind.REQUEST_TIMEOUT: (408, "timeout_error"),
    ErrorKind.CONFLICT: (409, "conflict_error"),
    ErrorKind.BODY_TOO_LARGE: (413, "invalid_request_error"),
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: (415, "invalid_request_error"),
    ErrorKind.KEY_REUSED: (422, "invalid_request_error"),
    ErrorKind.CANCELLED: (499, "invalid_request_error"),  # nginx's; a status that no SDK retries
    ErrorKind.RATE_LIMITED: (429, "rate_limit_error"),
    ErrorKind.ENGINE: (500, "server_error"),
    ErrorKind.UNAVAILABLE: (503, "service_unavailable_error"),
    ErrorKind.DEADLINE_EXCEEDED: (504, "timeout_error"),
}

# What is refused below any kind, before there is a request: status -> code
PROTOCOL_CODES = {
    400: "malformed_request",
    408: "request_timeout",
    414: "request_line_too_long",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    501: "not_implemented",
    503: "draining",
}
_TYPES = dict(STATUSES.values())

# The finish reasons that the wire knows; the others end a request as errors.
WIRE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER})


def status_of(error: ServiceError) -> int:
    return STATUSES[error.kind][0]


def error_object(error: ServiceError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}."""
    return _envelope(error.message, STATUSES[error.kind][1], error.param, error.code)


def error_body(error: ServiceError) -> bytes:
    return sse.json_line(error_object(error))


def protocol_error_body(status: int, message: str) -> bytes:
    """For a status of PROTOCOL_CODES, some of which no kind of error has."""
    error_type = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return sse.json_line(_envelope(message, error_type, None, PROTOCOL_CODES[status]))


def _envelope(message: str, error_type: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_event(error: ServiceError) -> bytes:
    """The last event of a stream that breaks off; no [DONE] follows."""
    return sse.event(error_body(error))


def cut_short(reason: FinishReason, cause: str | None = None) -> ServiceError:
    """The error that a request ends with whose sequence ended for a reason that the wire does not know.

    Args:
        reason: not one of WIRE_REASONS.
        cause: what the engine says of it, fit for the client.
    """
    if reason is FinishReason.CANCELLED:
        return ServiceError(ErrorKind.CANCELLED, "The request was cancelled before it ended.", "request_cancelled")
    if reason is FinishReason.DEADLINE:
        message = "The request's deadline has passed. Ask for fewer tokens or allow more time."
        return ServiceError(ErrorKind.DEADLINE_EXCEEDED, cause or message, "deadline_exceeded")
    if reason is FinishReason.ERROR:
        message = "The engine failed on this request. Try again; if it fails again, tell the operator."
        return ServiceError(ErrorKind.ENGINE, cause or message, "engine_error")
    raise AssertionError(f"{reason} is a reason that the wire knows")
