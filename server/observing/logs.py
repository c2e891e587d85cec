"""Log records as lines of text or JSON, and one access line per request. Any thread.

Never prompts, completions, keys or query strings. Text that clients chose (paths, aliases) is escaped, so that no line
can be forged, and masked where it looks like a key (server/gate/identity.py).

Logging never waits: a thread of its own writes the lines. Lines that the log's reader does not take in time are
dropped and counted, and their number is logged once it reads again.
"""

import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import msgspec
import orjson

from server.values import escape

NO_REQUEST = "-"
# Set where a request's task starts; code that runs elsewhere passes extra={"request_id": ...}
current_request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)
current_trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)  # likewise

MAX_WAITING_BYTES = 4 * 1024 * 1024  # of lines that the log's reader has not taken
GATHER_S = 0.005  # lines of so long are written at once
FLUSH_S = 1.0  # at the exit, for a reader that has stopped
LEAST_SHOWN_MS = 0.005  # of a stage, in text; JSON has them all
OUR_LOGGERS = ("server", "core", "gpu", "bench")
# Fields of AccessRecord as its line has them, in its order
_LABELS = {
    "num_prompt_tokens": "prompt",
    "num_cached_tokens": "cached",
    "num_completion_tokens": "completion",
    "finish_reason": "finish",
    "error_code": "error",
    "http2_error": "http2",
    "tenant": "tenant",
    "key_id": "key",
    "client": "client",
    "certificate_subject": "certificate",
    "trace_id": "trace",
    "upstream": "upstream",
}
access_logger = logging.getLogger("server.access")


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request went. Times in milliseconds from its first byte; None: it never came so far.

    Args:
        finish_reason: of a generation's sequences, each once.
        http2_error: the code of the RST_STREAM or GOAWAY that was sent instead of an answer with that status.
        key_id: Caller.key_id.
        client: its address, and its port if known.
        certificate_subject: of the client's certificate.
        trace_id: of the trace that it came with, or began.
        upstream: that answered, and its version.
    """

    ttft_ms: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_completion_tokens: int | None = None
    finish_reason: str | None = None
    error_code: str | None = None
    http2_error: str | None = None
    key_id: str | None = None
    client: str | None = None
    certificate_subject: str | None = None
    trace_id: str | None = None
    upstream: str | None = None


class AccessRecord(RequestOutcome, frozen=True, kw_only=True):
    """The fields of an access line.

    Args:
        status: as sent; 499 if the client left first.
        tenant: None: not identified, or an open server's.
        stages_ms: add up to its whole time.
    """

    request_id: str
    method: str
    path: str
    status: int
    duration_ms: float
    tenant: str | None = None
    stages_ms: dict[str, float] | None = None


def access_line(record: AccessRecord) -> str:
    """`POST /v1/chat/completions 200 1234.5ms ttft=45.1ms prompt=12 completion=34 finish=stop stages=auth:0.10,...`.

    What is None is left out.
    """
    parts = [escape(record.method), escape(record.path), str(record.status), f"{record.duration_ms:.1f}ms"]
    if record.ttft_ms is not None:
        parts.append(f"ttft={record.ttft_ms:.1f}ms")
    told = ((label, getattr(record, name)) for name, label in _LABELS.items())
    parts += [f"{label}={escape(str(value))}" for label, value in told if value is not None]
    stages = [f"{name}:{ms:.2f}" for name, ms in (record.stages_ms or {}).items() if ms >= LEAST_SHOWN_MS]
    if stages:
        parts.append(f"stages={','.join(stages)}")
    return " ".join(parts)


def access_is_logged() -> bool:
    return access_logger.isEnabledFor(logging.INFO)


def log_access(record: AccessRecord) -> None:
    if access_is_logged():
        access_logger.info(access_line(record), extra={"request_id": record.request_id, "access": record})


class TextFormatter(logging.Formatter):
    """`2025-01-31T12:00:00.123Z INFO server.app [request id] message`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record)} {record.levelname} {record.name} [{_request_id(record)}] {record.getMessage()}"
        return head if not record.exc_info else f"{head}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with an access record's fields beside the others."""

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


class LogHandler(logging.Handler):
    """Formats on the caller's thread, writes on its own, and never waits for the stream's reader.

    Attributes:
        num_dropped: lines.
    """

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.num_dropped = 0
        self._stream = stream
        self._queue: SimpleQueue[tuple[TextIO, str] | threading.Event | None] = SimpleQueue()
        self._num_put = 0  # characters, under the handler's lock
        self._num_taken = 0  # by the thread alone
        self._num_told = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
        else:
            self.put(text)

    def put(self, text: str, stream: TextIO | None = None) -> None:
        """Have it written to the log's stream or another one; drop it if too much waits."""
        self.acquire()
        try:
            if self._is_closed or self._num_put - self._num_taken > MAX_WAITING_BYTES:
                self.num_dropped += 1
                return
            self._num_put += len(text)
            self._queue.put((stream or self._stream, text))
        finally:
            self.release()

    def flush(self) -> None:
        """Wait until all is written, for FLUSH_S at most."""
        if not self._is_closed:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_S)

    def close(self) -> None:
        """Write what waits, for FLUSH_S at most. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._thread.join(FLUSH_S)
        super().close()

    def _write(self) -> None:
        """Thread: its own."""
        while True:
            entry = self._queue.get()
            if isinstance(entry, tuple) and not self._is_closed:
                time.sleep(GATHER_S)
            gathered: dict[TextIO, list[str]] = {}
            with contextlib.suppress(Empty):
                while isinstance(entry, tuple):
                    gathered.setdefault(entry[0], []).append(entry[1])
                    entry = self._queue.get_nowait()
            for stream, texts in gathered.items():
                text = "".join(texts)
                if not _write_out(stream, text):
                    self.num_dropped += len(texts)
                self._num_taken += len(text)
            self._tell_drops()
            if entry is None:
                return
            if isinstance(entry, threading.Event):
                entry.set()

    def _tell_drops(self) -> None:
        """Log the number of dropped lines once less than half of the room is taken."""
        num_new = self.num_dropped - self._num_told
        if num_new and self._num_put - self._num_taken < MAX_WAITING_BYTES // 2:
            message = f"{num_new} log lines are lost: their reader is too slow"
            if _write_out(self._stream, self.format(_record(message, logging.WARNING)) + "\n"):
                self._num_told += num_new


def _write_out(stream: TextIO, text: str) -> bool:
    """False: it failed. Bypasses the stream's buffer, whose lock could block the process's end."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):  # in memory
        stream.write(text)
        return True
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select((), (descriptor,), ())
        except OSError:
            return False
    return True


def _record(message: str, level: int) -> logging.LogRecord:
    name = logging.getLevelName(level)
    return logging.makeLogRecord({"name": __name__, "levelno": level, "levelname": name, "msg": message})


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> LogHandler:
    """Send our loggers' records of this level and above to the stream (default: stderr), in place of former handlers.

    Of other packages' loggers, warnings and above.
    """
    handler = LogHandler(stream or sys.stderr, JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for former in root.handlers[:]:
        root.removeHandler(former)
        if isinstance(former, LogHandler):
            former.close()
    root.addHandler(handler)
    ours = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(ours, logging.WARNING))
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(ours)
    return handler


def num_lines_dropped() -> int:
    return sum(one.num_dropped for one in logging.getLogger().handlers if isinstance(one, LogHandler))


def tell(lines: list[str], stream: TextIO, level: int = logging.INFO) -> None:
    """Print lines whatever the log level; where the log is JSON, as a JSON record."""
    text = "\n".join(lines)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            is_json = isinstance(handler.formatter, JsonFormatter)
            handler.put(f"{handler.format(_record(text, level)) if is_json else text}\n", stream)
            return
    print(text, file=stream, flush=True)


def log_everything() -> None:
    """Log Python's warnings, and exceptions in threads and finalizers."""
    logging.captureWarnings(True)
    logger = logging.getLogger(__name__)

    def tell_thread(failed: threading.ExceptHookArgs) -> None:
        error = failed.exc_value or failed.exc_type()
        logger.error("a thread has failed: %r", failed.thread, exc_info=error)

    def tell_unraisable(failed: "sys.UnraisableHookArgs") -> None:
        logger.error("%s: %r", failed.err_msg or "exception ignored", failed.object, exc_info=failed.exc_value)

    threading.excepthook = tell_thread
    sys.unraisablehook = tell_unraisable


class LoggedLines(io.TextIOBase):
    """A stream that logs each line."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self._logger.info(line)
        return len(text)


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
