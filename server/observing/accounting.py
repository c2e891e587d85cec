"""The account of each request: what is recorded of it when it ends, and shown while it runs. Thread: loop.

Each request is recorded once, when it is over: in the access log, the metrics, the flight recorder and the trace
exporter. The flight recorder keeps, for an hour, the requests that somebody may ask about (GET /v1/requests/{id},
/admin/requests): the latest, the failed, and the slowest of each window of five minutes.
"""

import heapq
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Generic, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec

from core.errors import ErrorKind, ServiceError
from core.types import FinishReason, Usage
from server.clock import Clock
from server.gate.identity import LOCAL_CALLER, Caller, mask_keys
from server.gate.tenants import LOCAL_NAME, OwnDeadlineExceeded
from server.observing.logs import AccessRecord, RequestOutcome, access_is_logged, log_access
from server.observing.metrics import OUR_REFUSALS, Metrics
from server.observing.timing import MS_NS, S_NS, Stage, StageClock
from server.wire.messages import Headers, HttpRequest, Peer
from server.wire.stream import HttpStream

T = TypeVar("T")

HOUR_S = 3600.0
WINDOW_S = 300.0
SLOWEST_PER_WINDOW = 32
MAX_FAILED = 256
MAX_RECENT = 1000
REFUSED_EVERY_S = 1.0
MAX_ASKED = SLOWEST_PER_WINDOW  # of the slowest: so many are exact, even if all were in one window
DEFAULT_ASKED = 20
_SHOWN_CHARS = 200  # of an unknown id, in the error that repeats it
CLIENT_GONE = 499  # nginx's status for it; in logs and the ledger only
_OUR_ERRORS = frozenset({ErrorKind.ENGINE, ErrorKind.UPSTREAM, ErrorKind.UNAVAILABLE})
PROBES = frozenset({"/health", "/ready"})  # asked every few seconds: their 503 is not a refused request
# In the access line of bytes that never became a request
NO_REQUEST = HttpRequest(stream_id=0, method="-", path="-", query="", headers=(), has_body=False)
TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SANE = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")


def client_request_id(request: HttpRequest) -> str | None:
    """The client's x-request-id, if it is safe in headers, logs and files."""
    theirs = request.header(b"x-request-id")
    return None if theirs is None or not _SANE.fullmatch(theirs) else theirs.decode()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace of a request: W3C Trace Context, section 3.2; traceresponse is trace-context-2's.

    Args:
        trace_id: 32 hex digits.
        span_id: our span's, 16 hex digits.
        parent_id: the caller's span; None: the trace begins here.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    is_sampled: bool

    @property
    def value(self) -> bytes:
        """Of traceparent towards others, and of traceresponse."""
        flags = SAMPLED if self.is_sampled else 0
        return f"00-{self.trace_id}-{self.span_id}-{flags:02x}".encode()

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        return b"traceresponse", self.value


# Of the request whose task this is: for requests to upstreams
current_trace: ContextVar[TraceContext | None] = ContextVar("trace", default=None)
current_hops: ContextVar[int] = ContextVar("hops", default=0)  # gateways that it has come through
HOPS = b"steploop-hops"  # tells them


def hops_of(request: HttpRequest) -> int:
    """The gateways that a request has come through, as the last one tells."""
    told = request.header(HOPS) or b""
    return int(told) if told.isdigit() and len(told) < 4 else 0


def continue_trace(traceparent: bytes, span_id: str) -> TraceContext | None:
    """The trace that the caller's header names; None: it is invalid, and to be ignored."""
    match = TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, parent_id, flags = (part.decode() for part in match.groups()[:4])
    has_rest = match[5] is not None
    if version == "ff" or (version == "00" and has_rest) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, parent_id, bool(int(flags, 16) & SAMPLED))


class Interval(msgspec.Struct, frozen=True):
    """A stage of a request; times since its first byte."""

    stage: str
    start_ms: float
    duration_ms: float


class ToldRequest(RequestOutcome, frozen=True, kw_only=True, omit_defaults=True):
    """A request as GET /v1/requests/ID tells it; what is missing was not so, or has not come so far.

    Args:
        state: its stage; or `done`, or `failed`: by our fault, or broken off.
        started: unix time of its first byte.
        prefill_chunks: steps that computed some of its prompt.
        detokenize_ms: the loop's work on its tokens, within other stages.
        stages: those it has left, in order.
        status: see AccessRecord.
    """

    id: str
    object: Literal["request"]
    state: str
    method: str
    path: str
    tenant: str
    started: float
    prefill_chunks: int
    stages: tuple[Interval, ...]
    model: str | None = None
    detokenize_ms: float | None = None
    status: int | None = None
    duration_ms: float | None = None


class ToldRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Of all tenants: in progress, the oldest first; the slowest of the last hour; the failed, the latest first."""

    object: Literal["list"]
    running: list[ToldRequest]
    slowest: list[ToldRequest]
    failed: list[ToldRequest]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over.

    Args:
        ended_s: monotonic.
        started_unix_s: when its first byte came.
        tenant: on an open server, `local`.
        has_failed: by our fault, or broken off.
        alias: the client's own id.
    """

    record: AccessRecord
    ended_s: float
    started_unix_s: float
    tenant: str
    model: str
    timings: StageClock
    has_failed: bool
    trace: TraceContext | None = None
    alias: str | None = None

    @property
    def request_id(self) -> str:
        return self.record.request_id


def intervals_of(timings: StageClock) -> tuple[Interval, ...]:
    """The stages left so far, in order."""
    first_ns = round(timings.accepted_s * S_NS)
    return tuple(
        Interval(stage.value, round((start - first_ns) / MS_NS, 3), round((end - start) / MS_NS, 3))
        for stage, start, end in timings.intervals()
    )


class Ring(Generic[T]):
    """The latest things, and how many there ever were."""

    def __init__(self, most: int) -> None:
        self.things: deque[T] = deque(maxlen=most)
        self.num_ever = 0

    def put(self, thing: T) -> None:
        self.things.append(thing)
        self.num_ever += 1

    def since(self, num_seen: int) -> tuple[int, list[T]]:
        """How many there ever were, and those after so many, oldest first, as far as they are kept."""
        num_new = min(self.num_ever - num_seen, len(self.things))
        return self.num_ever, list(islice(self.things, len(self.things) - num_new, None))


class FlightRecorder:
    """Keeps the requests of the last hour that somebody may ask about, by the monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._serials = itertools.count()
        # Oldest first: the window's number, and a heap of its slowest: (duration, serial, record)
        self._windows: deque[tuple[int, list[tuple[float, int, RequestRecord]]]] = deque()
        self._failed: deque[RequestRecord] = deque(maxlen=MAX_FAILED)
        self._refused_s: dict[tuple[str, str | None], float] = {}
        self.recent: Ring[RequestRecord] = Ring(MAX_RECENT)

    def keep_refused(self, flight: RequestRecord) -> None:
        """Of a tenant's refusals with one code, one a second: a flood of them shall not push out all else."""
        kind = flight.tenant, flight.record.error_code
        if flight.ended_s >= self._refused_s.get(kind, -math.inf) + REFUSED_EVERY_S:
            if len(self._refused_s) >= MAX_RECENT:
                self._refused_s.clear()
            self._refused_s[kind] = flight.ended_s
            self.recent.put(flight)

    def keep(self, flight: RequestRecord) -> None:
        self.recent.put(flight)
        if flight.has_failed:
            self._failed.append(flight)
        number = int(flight.ended_s // WINDOW_S)
        if not self._windows or self._windows[-1][0] != number:
            self._windows.append((number, []))
            self._forget()
        slowest = self._windows[-1][1]
        heapq.heappush(slowest, (flight.record.duration_ms, next(self._serials), flight))
        if len(slowest) > SLOWEST_PER_WINDOW:
            heapq.heappop(slowest)

    def slowest(self, number: int) -> list[RequestRecord]:
        """Of the last hour, the slowest first; of equal durations, the later first."""
        kept = [entry for _, window in self._windows for entry in window]
        return list(self._of_last_hour(flight for _, _, flight in sorted(kept, reverse=True)))[:number]

    def failed(self, number: int) -> list[RequestRecord]:
        """Of the last hour, the latest first."""
        return list(self._of_last_hour(reversed(self._failed)))[:number]

    def find(self, request_id: str, tenant: str | None) -> RequestRecord | None:
        """The latest of the tenant's requests (None: any tenant's) with that id, ours or the client's."""
        kept = (flight for _, window in self._windows for _, _, flight in window)
        for flight in self._of_last_hour(itertools.chain(reversed(self.recent.things), reversed(self._failed), kept)):
            if request_id in (flight.request_id, flight.alias) and tenant in (None, flight.tenant):
                return flight
        return None

    def _of_last_hour(self, records: Iterable[RequestRecord]) -> Iterable[RequestRecord]:
        oldest_s = self._clock() - HOUR_S
        return (flight for flight in records if flight.ended_s >= oldest_s)

    def _forget(self) -> None:
        oldest = int((self._clock() - HOUR_S) // WINDOW_S)
        while self._windows and self._windows[0][0] < oldest:
            self._windows.popleft()


class Outcome(msgspec.Struct, frozen=True):
    """How a generation ended.

    Args:
        finish_reasons: of its choices, each once.
        model: as it was asked for; None: the one that there is.
        error: what broke it off; if the head was out, the stream has told it.
        is_refused: its reservation failed in the ledger: what was computed meanwhile is not billed.
        is_billed: False: the ledger could not record it.
    """

    usage: Usage
    finish_reasons: tuple[FinishReason, ...] = ()
    model: str | None = None
    error: ServiceError | None = None
    is_refused: bool = False
    is_billed: bool = True


@dataclass(slots=True, kw_only=True)
class Account:
    """What is known of a request.

    Args:
        client: the real one, if a trusted proxy sent the request.
        trace: None: it belongs to none.
        caller: None: not identified.
        outcome: of a generation.
        refused_status: what the connection answered in place of the handler's head.
        http2_error: the code of the RST_STREAM or GOAWAY that was sent instead.
    """

    request: HttpRequest
    client: Peer
    request_id: str
    timings: StageClock
    trace: TraceContext | None = None
    caller: Caller | None = None
    outcome: Outcome | None = None
    asks_generation: bool = False
    refused_status: int | None = None
    http2_error: str | None = None

    @property
    def identity_headers(self) -> Headers:
        """The request's id, the client's if it sent one; and its trace, if it came with one."""
        named = ((b"x-request-id", (client_request_id(self.request) or self.request_id).encode()),)
        return named if self.trace is None or self.trace.parent_id is None else (*named, self.trace.response_header)

    @property
    def tenant(self) -> str:
        return LOCAL_NAME if self.caller is None else self.caller.tenant.name


@dataclass(slots=True)
class Accounting:
    """Records each request once, by `close`.

    Args:
        export: takes each generation that is over.
    """

    metrics: Metrics
    clock: Clock
    recorder: FlightRecorder = field(init=False)
    export: Callable[[RequestRecord], None] | None = None

    def __post_init__(self) -> None:
        self.recorder = FlightRecorder(self.clock.monotonic)

    def close(self, account: Account, status: int, error_code: str | None) -> None:
        now_s = self.clock.monotonic()
        account.timings.finish(now_s)
        outcome = account.outcome
        self.metrics.count_request(
            tenant=account.tenant,
            status=status,
            timings=account.timings,
            usage=None if outcome is None else outcome.usage,
            is_billed=outcome is None or outcome.is_billed,
            error_code=None if account.request.path in PROBES else error_code,
            is_our_fault=_is_our_fault(account, error_code),
        )
        has_failed = error_code is not None and (outcome is not None or status == 500)
        is_kept = outcome is not None or has_failed
        is_refused = not is_kept and account.asks_generation and account.caller is not None
        if not (is_kept or is_refused or access_is_logged()):
            return
        record = _record(account, status, error_code)
        log_access(record)
        if not (is_kept or is_refused):
            return
        flight = RequestRecord(
            record=record,
            ended_s=now_s,
            started_unix_s=self.clock.unix() - account.timings.total_ns / S_NS,
            tenant=account.tenant,
            model=(outcome and outcome.model) or self.metrics.model_name or "",
            timings=account.timings,
            has_failed=has_failed,
            trace=account.trace,
            alias=client_request_id(account.request),
        )
        if is_refused:
            self.recorder.keep_refused(flight)
            return
        self.recorder.keep(flight)
        if self.export is not None:
            self.export(flight)


def _record(account: Account, status: int, error_code: str | None) -> AccessRecord:
    timings, outcome, certificate = account.timings, account.outcome, account.client.certificate
    usage = None if outcome is None else outcome.usage
    caller = None if account.caller == LOCAL_CALLER else account.caller
    return AccessRecord(
        request_id=account.request_id,
        method=account.request.method,
        path=mask_keys(account.request.path),
        status=status,
        duration_ms=round(timings.total_ns / MS_NS, 3),
        ttft_ms=None if timings.ttft_s is None else round(timings.ttft_s * 1e3, 3),
        num_prompt_tokens=None if usage is None else usage.num_prompt_tokens,
        num_cached_tokens=None if usage is None else usage.num_cached_tokens,
        num_completion_tokens=None if usage is None else usage.num_completion_tokens,
        finish_reason=None if outcome is None else ",".join(outcome.finish_reasons) or None,
        error_code=error_code,
        http2_error=account.http2_error,
        tenant=None if caller is None else caller.tenant.name,
        key_id=None if caller is None else caller.key_id,
        client=str(account.client),
        certificate_subject=None if certificate is None else certificate.subject,
        trace_id=None if account.trace is None else account.trace.trace_id,
        upstream=timings.upstream,
        stages_ms=timings.stages_ms() if access_is_logged() else None,
    )


def _is_our_fault(account: Account, error_code: str | None) -> bool:
    if account.outcome is None:
        return account.asks_generation and error_code in OUR_REFUSALS
    error = account.outcome.error
    return error is not None and (error.kind in _OUR_ERRORS or isinstance(error, OwnDeadlineExceeded))


def status_told(stream: HttpStream) -> int:
    """As it is logged and counted: 499 if the client left, even after the head; 500 if there was no answer."""
    return CLIENT_GONE if stream.has_lost_peer else stream.status or 500


def timeline_reply(
    request_id: str, tenant: str | None, running: Iterable[Account], recorder: FlightRecorder, clock: Clock
) -> bytes:
    """One request of the tenant's (None: any tenant's), by our id or the client's. Raises ServiceError (not found)."""
    named = (one for one in running if request_id in (one.request_id, client_request_id(one.request)))
    account = next((one for one in named if tenant in (None, one.tenant)), None)
    if account is not None:
        return msgspec.json.encode(_told_running(account, clock))
    return msgspec.json.encode(_told_ended(known_flight(request_id, tenant, recorder)))


def known_flight(request_id: str, tenant: str | None, recorder: FlightRecorder) -> RequestRecord:
    """As FlightRecorder.find. Raises ServiceError (not found)."""
    flight = recorder.find(request_id, tenant)
    if flight is None:
        message = f"No request {request_id[:_SHOWN_CHARS]!r} is in progress or was recorded in the last hour."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
    return flight


def requests_reply(query: str, running: Sequence[Account], recorder: FlightRecorder, clock: Clock) -> bytes:
    """ToldRequests. Raises ServiceError (invalid_query)."""
    number = _asked_number(query)
    oldest = sorted(running, key=lambda one: one.timings.accepted_s)
    reply = ToldRequests(
        object="list",
        running=[_told_running(one, clock) for one in oldest[:number]],
        slowest=[_told_ended(one) for one in recorder.slowest(number)],
        failed=[_told_ended(one) for one in recorder.failed(number)],
    )
    return msgspec.json.encode(reply)


NumAsked = Annotated[int, msgspec.Meta(ge=1, le=MAX_ASKED)]


def _asked_number(query: str) -> int:
    values = parse_qs(query, keep_blank_values=True)
    text = values.pop("slowest", [str(DEFAULT_ASKED)])[-1]
    if values or not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_ASKED:
        message = f"Use /admin/requests?slowest=N, with N from 1 to {MAX_ASKED}."
        raise ServiceError(ErrorKind.INVALID_REQUEST, message, "invalid_query", "slowest")
    return int(text)


def _told_ended(flight: RequestRecord) -> ToldRequest:
    record = msgspec.structs.asdict(flight.record)
    told = {name: record[name] for name in ToldRequest.__struct_fields__ if name in record}
    return ToldRequest(
        **told
        | {
            "id": flight.request_id,
            "object": "request",
            "state": "failed" if flight.has_failed else "done",
            "tenant": flight.tenant,
            "model": flight.model,
            "started": round(flight.started_unix_s, 3),
            "prefill_chunks": flight.timings.num_prefill_chunks,
            "detokenize_ms": flight.timings.detokenize_ms,
            "stages": intervals_of(flight.timings),
        }
    )


def _told_running(account: Account, clock: Clock) -> ToldRequest:
    """Its completed stages, and the current one as `state`."""
    timings = account.timings
    return ToldRequest(
        id=account.request_id,
        object="request",
        state=timings.stage or Stage.HEAD,
        method=account.request.method,
        path=account.request.path,
        tenant=account.tenant,
        started=round(clock.unix() - (clock.monotonic() - timings.accepted_s), 3),
        prefill_chunks=timings.num_prefill_chunks,
        stages=intervals_of(timings),
    )
