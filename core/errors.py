"""The errors of requests, by kind (server/api/replies.py maps a kind to a status), and of start-up. Any thread."""

import enum


class ErrorKind(enum.StrEnum):
    """What went wrong. One kind becomes one status on every surface."""

    INVALID_REQUEST = "invalid_request"
    AUTHENTICATION = "authentication"
    PERMISSION = "permission"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    KEY_REUSED = "key_reused"  # an idempotency key, with another request
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    REQUEST_TIMEOUT = "request_timeout"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ENGINE = "engine"
    UPSTREAM = "upstream"  # a server that was to answer has failed


class ServiceError(Exception):
    """A request that cannot be served, with the error for its client.

    Args:
        message: what is wrong and what to do about it.
        code: the machine-readable name of this case, e.g. "context_length_exceeded".
        param: path of the field to correct, e.g. "messages[0].content".
        retry_after_s: when a retry can help.
        for_operator: the message for callers with the right `admin`, with what others must not see.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        for_operator: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.for_operator = for_operator


class InvalidRequest(ServiceError):
    """A field is missing, of the wrong type, out of range, or asks for something unsupported."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(ErrorKind.INVALID_REQUEST, message, code, param)


class ContextLengthExceeded(InvalidRequest):
    """It does not fit the model's context: in OpenAI's words, by which client libraries know it (LangChain, LiteLLM).

    Args:
        but: what would not fit, without a full stop.
    """

    def __init__(self, limit: int, but: str, param: str | None = None, advice: str = "Shorten the prompt.") -> None:
        message = f"This model's maximum context length is {limit} tokens. However, {but}. {advice}"
        super().__init__(f"{message} (context_length_exceeded)", param, "context_length_exceeded")


class ExitCode(enum.IntEnum):
    """The process's exit codes. 130 (Ctrl-C) and signals keep the shell's numbers."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        self = int.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self

    OK = 0, "done, or stopped on request"
    INTERNAL = 1, "a bug: run again with --debug for the traceback"
    USAGE = 2, "the command line is wrong: unknown flag or command, missing argument"
    CONFIGURATION = 3, "a setting is unknown, malformed or out of range"
    MODEL = 4, "the model is missing, incomplete or of an unsupported architecture"
    MEMORY = 5, "weights or KV cache do not fit"
    PORT = 6, "the address cannot be listened on"
    DEVICE = 7, "the requested device is missing, or cannot do what was requested"
    VERSION = 8, "a dependency is missing or older than its security floor"
    UNREACHABLE = 9, "no server answers there, it refused, or a request failed (chat, bench)"
    ENGINE = 10, "the engine broke while serving"
    TRANSIENT = 11, "a temporary obstacle: a full disk, or a ledger or directory that another server uses"


MOST_CAUSE = 600  # characters of what is wrong with a model


class StartupError(Exception):
    """The process cannot start as configured; shown to the operator in two lines.

    Args:
        cause: what is wrong, with the computed values.
        fix: what to type or change, as concretely as possible.
        exit_code: an ExitCode; None: that of the class.
    """

    exit_code: int = ExitCode.CONFIGURATION

    def __init__(self, cause: str, fix: str, exit_code: int | None = None) -> None:
        super().__init__(f"{cause} Fix: {fix}")
        self.cause = cause
        self.fix = fix
        if exit_code is not None:
            self.exit_code = exit_code


class _ModelError(StartupError):
    """It quotes a model's files, whose values may be of any length: the middle of a long cause is left out."""

    exit_code = ExitCode.MODEL

    def __init__(self, cause: str, fix: str, exit_code: int | None = None) -> None:
        half = MOST_CAUSE // 2
        shown = cause if len(cause) <= MOST_CAUSE else f"{cause[:half]} ... {cause[-half:]}"
        super().__init__(shown, fix, exit_code)


class UnsupportedModel(_ModelError):
    """The model needs a computation that is not implemented here."""


class BadCheckpoint(_ModelError):
    """Files of the model's directory are missing, malformed, or do not fit its config.json."""


class BadAdapter(StartupError):
    """An adapter's files are missing or malformed, of another model, or ask for what is not computed here."""

    exit_code = ExitCode.MODEL

    def __init__(self, cause: str) -> None:
        super().__init__(cause, "remove this adapter, or convert it")


class DeviceUnavailable(StartupError):
    """The requested device or number format is not available."""

    exit_code = ExitCode.DEVICE


class NotEnoughMemory(StartupError):
    """The weights, or the KV cache of one sequence, do not fit."""

    exit_code = ExitCode.MEMORY
