"""What is told of each request once it is over: its access line, and its place among the counters. Thread: loop."""

from dataclasses import dataclass

from server.answer import CLIENT_GONE, Outcome
from server.auth import LOCAL_CALLER, Caller
from server.lifecycle import Clock
from server.logs import AccessRecord, log_access
from server.messages import HttpRequest
from server.metrics import Metrics
from server.peer import Peer
from server.request_ids import client_request_id
from server.stream import HttpStream
from server.timing import Timings

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
    timings: Timings
    caller: Caller | None = None
    outcome: Outcome | None = None  # of a generation
    refused_status: int | None = None  # what the connection answered, over the handler's head

    @property
    def request_id_header(self) -> tuple[bytes, bytes]:
        """The client's own, if it is sane; ours otherwise."""
        return (b"x-request-id", (client_request_id(self.request) or self.request_id).encode())


class Accounting:
    """Every request passes `close` once."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def close(self, account: Account, status: int, error_code: str | None) -> None:
        self._metrics.responses[status] += 1
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
            duration_ms=(self._clock.monotonic() - timings.head_s) * 1e3,
            ttft_ms=None if timings.ttft_s is None else timings.ttft_s * 1e3,
            num_prompt_tokens=None if usage is None else usage.num_prompt_tokens,
            num_cached_tokens=None if usage is None else usage.num_cached_tokens,
            num_completion_tokens=None if usage is None else usage.num_completion_tokens,
            finish_reason=None if outcome is None else ",".join(outcome.finish_reasons) or None,
            error_code=error_code,
            tenant=None if caller is None else caller.tenant.name,
            key_id=None if caller is None else caller.key_id,
            client=str(account.client),
            certificate_subject=None if certificate is None else certificate.subject,
        )


def status_told(stream: HttpStream) -> int:
    """As it is logged and counted: a head that went out is not an answer that arrived."""
    return CLIENT_GONE if stream.has_lost_peer else stream.status or 500  # without one, the connection answers a fault
