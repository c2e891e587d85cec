"""Exports generations as OpenTelemetry spans by OTLP over HTTP: the request, and each stage below it. Thread: loop.

Needs OpenTelemetry, which the extra `otel` installs. Another thread makes the spans and sends them. Traces must not
delay answers: when that thread falls behind, or the collector fails, they are dropped and logged.
"""

import asyncio
import logging
import secrets
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from core.errors import ExitCode, StartupError
from server import __version__
from server.observing.accounting import RequestRecord, intervals_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # generations
MAX_BATCH = 64  # generations in one request: some thousand spans
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 0.5  # the exit does not wait for a slow collector
_OPERATIONS = dict.fromkeys(("/v1/completions", "/completions", "/infill"), "text_completion")  # all others: chat
_NS_PER_MS = 1_000_000


class TraceExporter:
    """Sends batches of requests.

    Args:
        endpoint: see server.values.otlp_endpoint.
    """

    def __init__(self, endpoint: str) -> None:
        """Raises StartupError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            fix = f"{sys.executable} -m pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
            cause = "--otlp-endpoint needs opentelemetry-sdk and its exporter, which are not installed"
            raise StartupError(cause, fix, ExitCode.VERSION) from error
        self._exporter = OTLPSpanExporter(endpoint, timeout=SEND_TIMEOUT_S)
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, "otlp")
        self._waiting: deque[RequestRecord] = deque()
        self._sending: asyncio.Future[None] | None = None
        self._num_dropped = 0

    def put(self, flight: RequestRecord) -> None:
        """Send it in its turn, unless its caller does not sample it or too many wait."""
        if flight.trace is None or not flight.trace.is_sampled:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_dropped += 1
            if self._num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th...
                logger.warning("%d traces dropped: %s is too slow", self._num_dropped, self._endpoint)
            return
        self._waiting.append(flight)
        if self._sending is None:
            self._send_next()

    async def close(self) -> None:
        """Send what waits, for CLOSE_TIMEOUT_S at most."""
        deadline_s = self._loop.time() + CLOSE_TIMEOUT_S
        while self._sending is not None and self._loop.time() < deadline_s:
            await asyncio.wait((self._sending,), timeout=deadline_s - self._loop.time())
        self._waiting.clear()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # untyped
        self._executor.shutdown(wait=False)

    def _send_next(self, _: object = None) -> None:
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        self._sending = None
        if batch:
            self._sending = self._loop.run_in_executor(self._executor, self._send, batch)
            self._sending.add_done_callback(self._send_next)

    def _send(self, flights: Sequence[RequestRecord]) -> None:
        """Thread: the exporter's own."""
        try:
            self._exporter.export([span for flight in flights for span in spans_of(flight)])
        except Exception:  # whatever its HTTP client raises: later batches may go through
            logger.exception("%d traces cannot be sent to %s", len(flights), self._endpoint)


def spans_of(flight: RequestRecord) -> list["ReadableSpan"]:
    """The request's span, and one for each of its stages.

    Built as data: they are over, and have ids already, which a Tracer would not take. Attributes follow OpenTelemetry's
    semantic conventions for generative AI and HTTP.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanKind, Status, StatusCode

    trace = flight.trace
    assert trace is not None, "only requests of a trace are sent"
    resource = Resource({"service.name": "steploop", "service.version": __version__})
    scope = InstrumentationScope("steploop", __version__)
    started_ns = round(flight.started_unix_s * 1e9)
    own = _context(trace.trace_id, trace.span_id)
    operation = _OPERATIONS.get(flight.record.path, "chat")
    request = ReadableSpan(
        f"{operation} {flight.model}",
        own,
        parent=None if trace.parent_id is None else _context(trace.trace_id, trace.parent_id, is_remote=True),
        resource=resource,
        attributes=_attributes(flight, operation),
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR if flight.has_failed else StatusCode.UNSET),
        start_time=started_ns,
        end_time=started_ns + round(flight.record.duration_ms * _NS_PER_MS),
        instrumentation_scope=scope,
    )
    stages = [
        ReadableSpan(
            one.stage,
            _context(trace.trace_id, secrets.token_hex(8)),
            parent=own,
            resource=resource,
            attributes={"steploop.stage": one.stage},
            start_time=started_ns + round(one.start_ms * _NS_PER_MS),
            end_time=started_ns + round((one.start_ms + one.duration_ms) * _NS_PER_MS),
            instrumentation_scope=scope,
        )
        for one in intervals_of(flight.timings)
    ]
    return [request, *stages]


def _attributes(flight: RequestRecord, operation: str) -> dict[str, str | int | float | Sequence[str]]:
    record = flight.record
    attributes: dict[str, str | int | float | Sequence[str] | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "steploop",
        "gen_ai.request.model": flight.model,
        "gen_ai.response.model": flight.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": None if record.finish_reason is None else record.finish_reason.split(","),
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error_code,
        "steploop.tenant": flight.tenant,
        "steploop.prefill_chunks": flight.timings.num_prefill_chunks,
        "steploop.ttft_ms": record.ttft_ms,
        "steploop.detokenize_ms": flight.timings.detokenize_ms,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _context(trace_id: str, span_id: str, is_remote: bool = False) -> "SpanContext":
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
