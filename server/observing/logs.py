"""Log records as lines, in text or JSON: one shape for all modules, one access line per request. Any thread.

Never prompts, completions, keys or query strings. What clients chose (paths, aliases) is escaped: no line is forged,
and masked where it looks like a key (server/gate/keys.py).
"""

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec
import orjson

NO_REQUEST = "-"
# Set where a request's task starts; records of code that knows its request better pass extra={"request_id": ...}.
current_request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)

current_trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)  # likewise; None: it has none

LEAST_SHOWN_MS = 0.005  # of a stage, in a line for people; JSON has them all
OUR_LOGGERS = ("server", "core", "gpu", "bench")
access_logger = logging.getLogger("server.access")


class AccessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its access line tells it. Times in milliseconds from its first byte; None: it never came so far.

    Args:
        status: as sent; 499 when the client left first.
        finish_reason: of a generation, over all its sequences.
        http2_error: the code of the RST_STREAM or GOAWAY that was sent instead of an answer with that status.
        tenant: whose request it was; None: nobody, or there are no tenants and no keys.
        key_id: the prefix of the key that it showed.
        client: its address, and its port where it is known.
        certificate_subject: of the client's certificate.
        trace_id: of the trace that it came with, or began.
        stages_ms: where its time went: all of it.
    """

    request_id: str
    method: str
    path: str
    status: int
    duration_ms: float
    ttft_ms: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_completion_tokens: int | None = None
    finish_reason: str | None = None
    error_code: str | None = None
    http2_error: str | None = None
    tenant: str | None = None
    key_id: str | None = None
    client: str | None = None
    certificate_subject: str | None = None
    trace_id: str | None = None
    stages_ms: dict[str, float] | None = None


def access_line(record: AccessRecord) -> str:
    """`POST /v1/chat/completions 200 1234.5ms ttft=45.1ms prompt=12 completion=34 finish=stop stages=auth:0.10,...`.

    What is None is left out.
    """
    parts = [escape(record.method), escape(record.path), str(record.status), f"{record.duration_ms:.1f}ms"]
    if record.ttft_ms is not None:
        parts.append(f"ttft={record.ttft_ms:.1f}ms")
    counts = (
        ("prompt", record.num_prompt_tokens),
        ("cached", record.num_cached_tokens),
        ("completion", record.num_completion_tokens),
    )
    parts += [f"{name}={value}" for name, value in counts if value is not None]
    words = (
        ("finish", record.finish_reason),
        ("error", record.error_code),
        ("http2", record.http2_error),
        ("tenant", record.tenant),
        ("key", record.key_id),
        ("client", record.client),
        ("certificate", record.certificate_subject),
        ("trace", record.trace_id),
    )
    parts += [f"{name}={escape(value)}" for name, value in words if value is not None]
    stages = [f"{name}:{ms:.2f}" for name, ms in (record.stages_ms or {}).items() if ms >= LEAST_SHOWN_MS]
    if stages:
        parts.append(f"stages={','.join(stages)}")
    return " ".join(parts)


def access_is_logged() -> bool:
    return access_logger.isEnabledFor(logging.INFO)


def log_access(record: AccessRecord) -> None:
    """Write the one access line of a request."""
    if access_is_logged():
        access_logger.info(access_line(record), extra={"request_id": record.request_id, "access": record})


def escape(text: str) -> str:
    """What a client chose, fit for one line: everything but visible ASCII as a backslash escape."""
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(
        character if "!" <= character <= "~" else character.encode("unicode_escape").decode().replace(" ", "\\x20")
        for character in text
    )


class TextFormatter(logging.Formatter):
    """`2025-01-31T12:00:00.123Z INFO server.app [request id] message`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record)} {record.levelname} {record.name} [{_request_id(record)}] {record.getMessage()}"
        return head if not record.exc_info else f"{head}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; an access record's fields stand beside the others."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": _request_id(record),
            "message": record.getMessage(),
        }
        trace_id = current_trace_id.get()
        if trace_id is not None:
            fields["trace_id"] = trace_id
        access = getattr(record, "access", None)
        if isinstance(access, AccessRecord):
            fields |= {name: value for name, value in msgspec.structs.asdict(access).items() if value is not None}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(_without_surrogates(fields)).decode()


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send our loggers' records of this level and above to the stream (default: stderr), replacing what was set.

    Of other packages' records only warnings and worse: what torch has to say at "info" is nobody's here.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for former in root.handlers[:]:
        root.removeHandler(former)
    root.addHandler(handler)
    ours = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(ours, logging.WARNING))
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(ours)


def _utc(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", current_request_id.get()))


def _without_surrogates(fields: dict[str, Any]) -> dict[str, Any]:
    """orjson refuses lone surrogates, and a log line must never fail."""
    return {
        key: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for key, value in fields.items()
    }
