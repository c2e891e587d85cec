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
    """The server cannot start as it was asked to, told to the operator.

    Args:
        cause: what is wrong, with the values found.
        fix: what to do about it.
        exit_code: the process's, by class of error.
    """

    def __init__(self, cause: str, fix: str, exit_code: int = 1) -> None:
        super().__init__(f"{cause}. Fix: {fix}")
        self.cause = cause
        self.fix = fix
        self.exit_code = exit_code
