"""The errors a request can end with, as kinds; which HTTP status a kind becomes is the server's (server/app.py)."""

import enum


class ErrorKind(enum.StrEnum):
    """What went wrong, by who can mend it. One kind becomes one status on every surface."""

    INVALID_REQUEST = "invalid_request"
    AUTHENTICATION = "authentication"
    PERMISSION = "permission"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    REQUEST_TIMEOUT = "request_timeout"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ENGINE = "engine"


class ServiceError(Exception):
    """A request that cannot be served, told to the one who sent it.

    Args:
        kind: decides the status.
        message: says what is wrong and what to do about it.
        code: the machine-readable name of this very case, e.g. "context_length_exceeded".
        param: path of the field to mend, e.g. "messages[0].content".
        retry_after_s: when trying again can help.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceError):
    """A field that is missing, of the wrong type, out of range, or that asks for what is not supported."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(ErrorKind.INVALID_REQUEST, message, code, param)


class ContextLengthExceeded(ServiceError):
    """The prompt leaves no room in the model's context for even one new token."""

    def __init__(self, num_tokens: int, limit: int, param: str | None = None) -> None:
        super().__init__(
            ErrorKind.INVALID_REQUEST,
            f"This model's context is {limit} tokens, but the prompt has {num_tokens}. Shorten the prompt.",
            "context_length_exceeded",
            param,
        )
        self.num_tokens = num_tokens
        self.limit = limit


class StartupError(Exception):
    """The server cannot start. Told to the operator as two lines: the cause, and what to do about it.

    Args:
        cause: what is wrong, with the values found.
        fix: what to change, with computed values where there are any.
    """

    exit_code = 1

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause} Fix: {fix}")
        self.cause = cause
        self.fix = fix


class UnsupportedModel(StartupError):
    """config.json asks for something that would be computed wrongly here."""

    exit_code = 3


class BadCheckpoint(StartupError):
    """Files of the model's directory are missing, malformed, or do not fit its config.json."""

    exit_code = 4


class DeviceUnavailable(StartupError):
    """The device or the number format asked for is not there."""

    exit_code = 5


class NotEnoughMemory(StartupError):
    """The weights, or the KV cache of one sequence, do not fit."""

    exit_code = 6
