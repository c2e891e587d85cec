"""Requests that have come: how they get on, their cancellation, and what a tenant used. Thread: loop."""

from datetime import UTC, datetime

from core.errors import ErrorKind, ServiceError
from server.app_state import AppState
from server.exchange import Exchange
from server.gate.identity import Caller, Scope
from server.ledger.usage import NO_LEDGER, parse_usage, read_usage, usage_reply
from server.observing.accounting import requests_reply, timeline_reply

REPLY_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # an answer's id is taken as it was shown
_SHOWN_CHARS = 200  # of an id that nobody has, in the error that repeats it


async def list_requests(state: AppState, exchange: Exchange) -> None:
    recorder, query = state.accounting.recorder, exchange.request.query
    exchange.send(requests_reply(query, state.generating(), recorder, state.clock))


async def show_request(state: AppState, exchange: Exchange) -> None:
    request_id, tenant = _plain_id(exchange.argument), _tenant_of(exchange.known_caller)
    recorder = state.accounting.recorder
    exchange.send(timeline_reply(request_id, tenant, state.generating(), recorder, state.clock))


async def delete_request(state: AppState, exchange: Exchange) -> None:
    """By our id alone: a client's own others could guess, and retries repeat it."""
    if not state.served.cancel(_plain_id(exchange.argument), _tenant_of(exchange.known_caller)):
        message = (
            f"No request {exchange.argument[:_SHOWN_CHARS]!r} is in progress. It may have ended already. "
            "Use the response's id, which each event of its stream shows, not x-request-id."
        )
        raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
    exchange.send(b'{"status":"cancelled"}')


async def show_usage(state: AppState, exchange: Exchange) -> None:
    """Of the caller's tenant, by ?by=day|model|key and ?since=."""
    ledger, now = state.served.ledger, datetime.fromtimestamp(state.clock.unix(), UTC)
    query = parse_usage(exchange.request.query, exchange.known_caller.tenant.name, now)
    if ledger is None:
        raise NO_LEDGER
    lines = await state.served.offload(lambda: read_usage(ledger.path, query))
    exchange.send(usage_reply(query, lines))


def _tenant_of(caller: Caller) -> str | None:
    """Whose requests it may see and end; None: everybody's."""
    return None if Scope.ADMIN in caller.scopes else caller.tenant.name


def _plain_id(shown: str) -> str:
    for prefix in REPLY_PREFIXES:
        shown = shown.removeprefix(prefix)
    return shown
