"""The routes of requests in progress and past: how they went, their streams again, their cancellation. Thread: loop."""

from typing import Any

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.incident import Explanation
from server.api import models
from server.api.replies import EVENTS
from server.app import Exchange, Operation, Route
from server.gate.identity import Caller, Scope
from server.observing.accounting import NumAsked, ToldRequest, ToldRequests, requests_reply, timeline_reply
from server.switches import explain_request

REPLY_PREFIXES = (
    "chatcmpl-",
    "cmpl-",
    "resp_",
    "msg_",
    "embd-",
    "rerank-",
    "score-",
)  # ids of answers are accepted as they were shown
SHOWN_CHARS = 200  # of what a client asked for, in errors that repeat it


async def list_requests(exchange: Exchange) -> None:
    server = exchange.server
    query, recorder = exchange.request.query, server.accounting.recorder
    exchange.send(requests_reply(query, server.generating(), recorder, server.clock))


async def show_request(exchange: Exchange) -> None:
    server, (shown, _, what) = exchange.server, exchange.argument.partition("/")
    request_id, tenant = _plain_id(shown), _tenant_of(exchange.known_caller)
    if what == "stream":
        last_id = exchange.request.header(b"last-event-id") or b"0"
        if not last_id.isdigit() or len(last_id) > 18:
            raise InvalidRequest("Last-Event-ID must be the number of an event of this stream.", "Last-Event-ID")
        own = exchange.known_caller.tenant.name  # whatever else the caller may see
        events = server.served.resumable.find(own, request_id)
        if exchange.request.method == "HEAD":  # whoever reads goes on
            exchange.send(b"", media_type=EVENTS)
        else:
            await events.send_to(exchange.stream, int(last_id))
        return
    if what == "why":
        await explain_request(exchange, request_id, tenant)
        return
    exchange.send(timeline_reply(request_id, tenant, server.generating(), server.accounting.recorder, server.clock))


async def delete_request(exchange: Exchange) -> None:
    """Cancel by our id alone: other clients could guess a client's own id, and retries repeat it."""
    if not exchange.server.served.cancel(_plain_id(exchange.argument), _tenant_of(exchange.known_caller)):
        message = (
            f"No request {exchange.argument[:SHOWN_CHARS]!r} is in progress. It may have ended already. "
            "Use the response's id, which each event of its stream shows, not x-request-id."
        )
        raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
    exchange.send(b'{"status":"cancelled"}')


def _tenant_of(caller: Caller) -> str | None:
    """The tenant whose requests the caller may see and cancel; None: all tenants."""
    return None if Scope.ADMIN in caller.scopes else caller.tenant.name


def _plain_id(shown: str) -> str:
    for prefix in REPLY_PREFIXES:
        shown = shown.removeprefix(prefix)
    return shown


_REQUEST = Operation("A request's progress and timings", answer=ToldRequest, below="{request_id}")
_AGAIN = Operation(
    "Resume its stream after Last-Event-ID",
    answer=None,
    events=dict[str, Any],
    below="{request_id}/stream",
)
_WHY = Operation("What made a request slow, by simulation", answer=Explanation, below="{request_id}/why")
_CANCEL = Operation("Cancel a request", answer=models.Status, below="{request_id}")

_LIST = Operation("Requests in progress, the slowest and the failed", answer=ToldRequests, query={"slowest": NumAsked})
ROUTES = {
    "/admin/requests": {"GET": Route(list_requests, Scope.ADMIN, needs_model=False, operations=(_LIST,))},
}
PREFIXES = {
    "/admin/requests/": {
        "GET": Route(show_request, Scope.ADMIN, needs_model=False, operations=(_REQUEST, _AGAIN, _WHY)),
        "DELETE": Route(delete_request, Scope.ADMIN, operations=(_CANCEL,)),
    },
    "/v1/requests/": {
        "GET": Route(show_request, Scope.INFERENCE, needs_model=False, operations=(_REQUEST, _AGAIN, _WHY)),
        "DELETE": Route(delete_request, Scope.INFERENCE, operations=(_CANCEL,)),
    },
}
