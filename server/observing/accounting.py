"""What is told of each request once it is over: its access line, its place among the counters, the recorder's and the
trace's. Thread: loop."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from core.errors import ErrorKind, ServiceError
from core.types import FinishReason, Usage
from server.clock import Clock
from server.gate.auth import LOCAL_CALLER, Caller
from server.gate.deadlines import OwnDeadlineExceeded
from server.gate.keys import mask_keys
from server.gate.tenants import LOCAL_NAME
from server.observing.flight_recorder import Flight, FlightRecorder, intervals_of
from server.observing.logs import AccessRecord, access_is_logged, log_access
from server.observing.metrics import OUR_REFUSALS, Finished, Metrics
from server.observing.request_ids import client_request_id
from server.observing.timing import MS_NS, S_NS, StageClock
from server.observing.trace_context import TraceContext
from server.wire.messages import Headers, HttpRequest
from server.wire.peer import Peer
from server.wire.stream import HttpStream

OUR_FAULTS = frozenset({ErrorKind.ENGINE, ErrorKind.UNAVAILABLE})  # of what can break a generation off
PROBES = frozenset({"/health", "/ready"})  # asked every few seconds: that one says no is no request refused
# Stands in the access line for what never became a request
NO_REQUEST = HttpRequest(stream_id=0, method="-", path="-", query="", headers=(), has_body=False)

CLIENT_GONE = 499  # nginx's word for it; in logs and the ledger only


class Outcome(msgspec.Struct, frozen=True):
    """How a generation ended.

    Args:
        finish_reasons: that its choices gave, each once.
        error: what broke it off; told in the stream already where the head was out.
        is_refused: its reservation failed in the ledger: what was computed meanwhile is not billed.
        is_billed: False: there is a ledger, and it could not be written there.
    """

    usage: Usage
    finish_reasons: tuple[FinishReason, ...] = ()
    error: ServiceError | None = None
    is_refused: bool = False
    is_billed: bool = True


@dataclass(slots=True, kw_only=True)
class Account:
    """What the access line tells of a request.

    Args:
        client: the real one, for whom a trusted proxy may have asked.
        caller: None: nobody has been asked who it is, or it could not say.
        trace: None: it belongs to none.
    """

    request: HttpRequest
    client: Peer
    request_id: str
    timings: StageClock
    trace: TraceContext | None = None
    caller: Caller | None = None
    outcome: Outcome | None = None  # of a generation
    asks_generation: bool = False
    refused_status: int | None = None  # what the connection answered, over the handler's head
    http2_error: str | None = None  # and the code of HTTP/2 that it sent instead

    @property
    def identity_headers(self) -> Headers:
        """Its id: the client's own, if it is sane, or ours; and its trace, where it came with one."""
        named = ((b"x-request-id", (client_request_id(self.request) or self.request_id).encode()),)
        return named if self.trace is None or self.trace.parent_id is None else (*named, self.trace.response_header)

    @property
    def tenant(self) -> str:
        return LOCAL_NAME if self.caller is None else self.caller.tenant.name


@dataclass(slots=True)
class Accounting:
    """Every request passes `close` once.

    Args:
        export: takes each generation that is over; None: nobody does.
    """

    metrics: Metrics
    clock: Clock
    recorder: FlightRecorder = field(init=False)
    export: Callable[[Flight], None] | None = None

    def __post_init__(self) -> None:
        self.recorder = FlightRecorder(self.clock.monotonic)

    def close(self, account: Account, status: int, error_code: str | None) -> None:
        now_s = self.clock.monotonic()
        account.timings.finish(now_s)
        self.metrics.count_request(_finished(account, status, error_code))
        has_failed = error_code is not None and (account.outcome is not None or status == 500)
        is_kept = account.outcome is not None or has_failed
        if not is_kept and not access_is_logged():
            return  # nobody is told
        record = _record(account, status, error_code)
        log_access(record)
        if not is_kept:
            return
        flight = Flight(
            record=record,
            ended_s=now_s,
            started_unix_s=self.clock.unix() - account.timings.total_ns / S_NS,
            tenant=account.tenant,
            model=self.metrics.model_name,
            intervals=intervals_of(account.timings),
            detokenize_ms=round(account.timings.detokenize_s * 1e3, 3),
            prefill_chunks=account.timings.num_prefill_chunks,
            has_failed=has_failed,
            trace=account.trace,
            alias=client_request_id(account.request),
        )
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
        stages_ms=timings.stages_ms(),
    )


def _finished(account: Account, status: int, error_code: str | None) -> Finished:
    outcome = account.outcome
    return Finished(
        tenant=account.tenant,
        status=status,
        timings=account.timings,
        usage=None if outcome is None else outcome.usage,
        is_billed=outcome is None or outcome.is_billed,
        error_code=None if account.request.path in PROBES else error_code,
        is_our_fault=_is_our_fault(account, error_code),
    )


def _is_our_fault(account: Account, error_code: str | None) -> bool:
    """Of a generation, or of one that was refused."""
    if account.outcome is None:
        return account.asks_generation and error_code in OUR_REFUSALS
    error = account.outcome.error
    return error is not None and (error.kind in OUR_FAULTS or isinstance(error, OwnDeadlineExceeded))


def status_told(stream: HttpStream) -> int:
    """As it is logged and counted: a head that went out is not an answer that arrived."""
    return CLIENT_GONE if stream.has_lost_peer else stream.status or 500  # without one, the connection answers a fault
