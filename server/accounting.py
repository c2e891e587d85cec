"""What is told of each request once it is over: its access line, and its place among the counters. Thread: loop."""

import re
from dataclasses import dataclass

from core.errors import ErrorKind
from server.answer import Outcome
from server.auth import LOCAL_CALLER, Caller
from server.lifecycle import Clock
from server.logs import AccessRecord, log_access
from server.messages import HttpRequest
from server.metrics import Finished, Metrics
from server.peer import Peer
from server.stream import HttpStream
from server.tenants import LOCAL_NAME
from server.timing import MS_NS, StageClock

OUR_FAULTS = frozenset({ErrorKind.ENGINE, ErrorKind.UNAVAILABLE})  # of what can break a generation off
CLIENT_GONE = 499  # nginx's word for it; in the log only
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")
# Stands in the access line for what never became a request
NO_REQUEST = HttpRequest(stream_id=0, method="-", path="-", query="", headers=(), has_body=False)


@dataclass(slots=True, kw_only=True)
class Account:
    """What the access line tells of a request.

    Args:
        client: the real one, for whom a trusted proxy may have asked.
        caller: None: nobody has been asked who it is, or it could not say.
    """

    request: HttpRequest
    client: Peer
    request_id: str
    timings: StageClock
    caller: Caller | None = None
    outcome: Outcome | None = None  # of a generation
    refused_status: int | None = None  # what the connection answered, over the handler's head

    @property
    def request_id_header(self) -> tuple[bytes, bytes]:
        """The client's own, if it is sane; ours otherwise."""
        theirs = self.request.header(b"x-request-id")
        if theirs is None or not SANE_REQUEST_ID.fullmatch(theirs):
            theirs = self.request_id.encode()
        return (b"x-request-id", theirs)


class Accounting:
    """Every request passes `close` once."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def close(self, account: Account, status: int, error_code: str | None) -> None:
        account.timings.finish(self._clock.monotonic())
        self._metrics.count_request(_finished(account, status, error_code))
        log_access(self._record(account, status, error_code))

    def _record(self, account: Account, status: int, error_code: str | None) -> AccessRecord:
        timings, outcome, certificate = account.timings, account.outcome, account.client.certificate
        usage = None if outcome is None else outcome.usage
        caller = None if account.caller is LOCAL_CALLER else account.caller
        return AccessRecord(
            request_id=account.request_id,
            method=account.request.method,
            path=account.request.path,
            status=status,
            duration_ms=timings.total_ns / MS_NS,
            ttft_ms=None if timings.ttft_s is None else timings.ttft_s * 1e3,
            num_prompt_tokens=None if usage is None else usage.num_prompt_tokens,
            num_cached_tokens=None if usage is None else usage.num_cached_tokens,
            num_completion_tokens=None if usage is None else usage.num_completion_tokens,
            finish_reason=None if outcome is None else ",".join(outcome.finish_reasons) or None,
            error_code=error_code,
            tenant=None if caller is None else caller.tenant.name,
            key_id=None if caller is None else caller.key_id,
            stages_ms=timings.stages_ms(),
            client=str(account.client),
            certificate_subject=None if certificate is None else certificate.subject,
        )


def _finished(account: Account, status: int, error_code: str | None) -> Finished:
    outcome = account.outcome
    return Finished(
        tenant=LOCAL_NAME if account.caller is None else account.caller.tenant.name,
        status=status,
        timings=account.timings,
        usage=None if outcome is None else outcome.usage,
        error_code=error_code,
        is_our_fault=outcome is not None and outcome.error is not None and outcome.error.kind in OUR_FAULTS,
    )


def status_told(stream: HttpStream) -> int:
    """As it is logged and counted: a head that went out is not an answer that arrived."""
    return CLIENT_GONE if stream.has_lost_peer else stream.status or 500  # without one, the connection answers a fault
