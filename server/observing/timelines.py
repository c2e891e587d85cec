"""How requests went, and how those that run are getting on: what /v1/requests/{id} and /admin/requests show.
Thread: loop."""

from collections.abc import Iterable, Sequence
from urllib.parse import parse_qs

import msgspec
import orjson

from core.errors import ErrorKind, ServiceError
from server.clock import Clock
from server.observing.accounting import Account
from server.observing.flight_recorder import MAX_ASKED, Flight, FlightRecorder, intervals_of
from server.observing.request_ids import client_request_id

_SHOWN_CHARS = 200  # of an id that nobody has, in the error that repeats it
DEFAULT_ASKED = 20


def timeline_reply(
    request_id: str, tenant: str | None, running: Iterable[Account], recorder: FlightRecorder, clock: Clock
) -> bytes:
    """One request of the tenant's, by our id or the client's own.

    Args:
        tenant: None: of any.

    Raises:
        ServiceError: it has none of that id, or none that is kept.
    """
    named = (one for one in running if request_id in (one.request_id, client_request_id(one.request)))
    account = next((one for one in named if tenant in (None, one.tenant)), None)
    if account is not None:
        return orjson.dumps(_running_json(account, clock))
    flight = recorder.find(request_id, tenant)
    if flight is None:
        message = f"No request {request_id[:_SHOWN_CHARS]!r} is in progress, or kept of those that were."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
    return orjson.dumps(_flight_json(flight))


def requests_reply(query: str, running: Sequence[Account], recorder: FlightRecorder, clock: Clock) -> bytes:
    """Of all tenants: those that run, oldest first, the slowest of the last hour, and the failed, the latest first.

    Raises:
        ServiceError: the query is not one of ours.
    """
    number = _asked_number(query)
    oldest = sorted(running, key=lambda one: one.timings.accepted_s)
    reply = {
        "object": "list",
        "running": [_running_json(one, clock) for one in oldest[:number]],
        "slowest": [_flight_json(one) for one in recorder.slowest(number)],
        "failed": [_flight_json(one) for one in recorder.failed(number)],
    }
    return orjson.dumps(reply)


def _asked_number(query: str) -> int:
    values = parse_qs(query, keep_blank_values=True)
    text = values.pop("slowest", [str(DEFAULT_ASKED)])[-1]
    if values or not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_ASKED:
        message = f"Ask for /admin/requests?slowest=N, with N from 1 to {MAX_ASKED}."
        raise ServiceError(ErrorKind.INVALID_REQUEST, message, "invalid_query", "slowest")
    return int(text)


def _flight_json(flight: Flight) -> dict[str, object]:
    record = msgspec.structs.asdict(flight.record)
    told = {name: value for name, value in record.items() if value is not None and name != "stages_ms"}
    head = {"id": told.pop("request_id"), "object": "request", "state": "failed" if flight.has_failed else "done"}
    return {
        **head,
        **told,
        "tenant": flight.tenant,
        "model": flight.model,
        "started": round(flight.started_unix_s, 3),
        "prefill_chunks": flight.prefill_chunks,
        "detokenize_ms": flight.detokenize_ms,
        "stages": [msgspec.structs.asdict(one) for one in flight.intervals],
    }


def _running_json(account: Account, clock: Clock) -> dict[str, object]:
    """The stages that it has left, and as its state the one that it is in."""
    timings = account.timings
    return {
        "id": account.request_id,
        "object": "request",
        "state": timings.stage,
        "method": account.request.method,
        "path": account.request.path,
        "tenant": account.tenant,
        "started": round(clock.unix() - (clock.monotonic() - timings.accepted_s), 3),
        "prefill_chunks": timings.num_prefill_chunks,
        "stages": [msgspec.structs.asdict(one) for one in intervals_of(timings)],
    }
