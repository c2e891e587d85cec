"""From a request's head to its handler, and from an error to its answer. Thread: loop.

Every request passes here once: route, authentication, readiness, handler, access log line. App is what handlers may use
of the server, Exchange is one request. The handlers and their routes are in routes.py.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from core.errors import ErrorKind, ServiceError
from core.types import EngineStats, Usage
from server.adapters import Adapters
from server.api.decoding import MAX_UNKNOWN_FIELDS
from server.api.fields import RequestLimits
from server.api.known_fields import Name
from server.api.messages import ERRORS as ANTHROPIC_ERRORS
from server.api.models import ServedModel, ServerCard
from server.api.replies import EVENTS, OPENAI_ERRORS, PROTOCOL_CODES, ErrorForm, protocol_error_body
from server.batches.runner import Batches
from server.callers import Gate
from server.clock import Clock
from server.engine_client import EngineClient
from server.gate.admission import LEAST_BACKLOG, Contender
from server.gate.cross_origin import CrossOrigin, is_operators
from server.gate.identity import LOCAL_CALLER, Caller, Scope, mask_keys
from server.gate.quota import Ticket
from server.gate.tenants import OwnDeadlineExceeded
from server.generation import Generations, Offload
from server.ledger.responses import Responses
from server.listening.clients import DENIED
from server.listening.listener import Listener
from server.local_models import LocalModels
from server.observing.accounting import (
    NO_REQUEST,
    Account,
    Accounting,
    TraceContext,
    continue_trace,
    current_hops,
    current_trace,
    hops_of,
    status_told,
)
from server.observing.live import Live
from server.observing.logs import current_request_id, current_trace_id
from server.observing.metrics import Metrics
from server.observing.timing import NO_STORE, Stage, StageClock, answer_headers
from server.values import escape
from server.wire.messages import Headers, Http2ErrorCode, Peer, ResponseHead
from server.wire.stream import JSON_TYPE, ClientDisconnected, HttpStream, content_headers

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_USAGE = Usage(0, 0)
INTERNAL = ServiceError(
    ErrorKind.ENGINE, "The server failed to answer. The fault is not in the request; try again later.", "internal_error"
)


@dataclass(slots=True)
class Readiness:
    """What /ready answers.

    Attributes:
        stage: what the server is doing while it is not ready.
        is_stalled: the engine has been busy with one step for too long; it may recover.
    """

    stage: str = "starting"
    is_ready: bool = False
    is_draining: bool = False
    is_stalled: bool = False

    def check(self) -> None:
        """Raises ServiceError: unavailable; loading or draining."""
        if self.is_draining:
            raise ServiceError(ErrorKind.UNAVAILABLE, "The server is shutting down.", "draining", retry_after_s=5)
        if not self.is_ready:
            message = f"The model is still loading: {self.stage}."
            raise ServiceError(ErrorKind.UNAVAILABLE, message, "loading", retry_after_s=1)


@dataclass(frozen=True, slots=True)
class Load:
    """The server's load, including what it waits for at upstreams.

    Args:
        kv_usage: share of KV blocks in use, 0 to 1.
        expected_s: time to first token that a new request would see; None: unknown.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    expected_s: float | None

    @property
    def weight(self) -> int:
        """haproxy's weight for this server, in percent: 50 if a new request would wait for a second."""
        expected_s = float(self.num_waiting) if self.expected_s is None else self.expected_s
        return max(1, round(100 / (1 + expected_s)))

    def report(self, form: bytes) -> Headers:
        """ORCA load header for a request that asks for it, in the format TEXT or JSON; nothing for other formats."""
        named = {
            "kv_cache_usage_perc": round(self.kv_usage, 4),
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
        }
        match form.strip().upper():
            case b"TEXT":
                value = "TEXT " + ", ".join(f"named_metrics.{name}={number}" for name, number in named.items())
            case b"JSON":
                value = "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
            case _:
                return ()
        return ((b"endpoint-load-metrics", value.encode()),)


@dataclass(slots=True, kw_only=True)
class Exchange(Account):
    """A request, its state so far, and its answer.

    Args:
        argument: the name in the path, decoded, if the route's has one.
        errors: the route's error format; Anthropic's if the request has `anthropic-version`.
        identify: returns the caller, or raises ServiceError; None: by the request's credentials.
    """

    stream: HttpStream
    server: "App"
    identify: Callable[[], Caller] | None = None
    ticket: Ticket | None = None
    argument: str = ""
    errors: ErrorForm = OPENAI_ERRORS

    @property
    def known_caller(self) -> Caller:
        """The caller; only for routes that require a right."""
        assert self.caller is not None, "the caller of such a route has been identified"
        return self.caller

    @property
    def cards(self) -> tuple[ServedModel, ...]:
        """The models that the caller may use."""
        return self.server.served.cards_for(self.known_caller.tenant)

    @property
    def own_cards(self) -> tuple[ServedModel, ...]:
        """Those of them that this process runs. Raises ServiceError (not found) if it has no engine."""
        return self.server.served.reader.cards_for(self.known_caller.tenant)

    @property
    def described_cards(self) -> tuple[ServedModel, ...]:
        """Of which the server's card tells."""
        return self.cards if self.server.served.own is None else self.own_cards

    def enter(self, stage: Stage) -> None:
        self.timings.enter(stage, self.server.clock.monotonic())

    def send(
        self,
        body: bytes,
        status: int = 200,
        headers: Headers = (),
        media_type: bytes = JSON_TYPE,
        caching: tuple[bytes, bytes] = NO_STORE,
    ) -> None:
        """Answer with a document; not for generations."""
        self.enter(Stage.LAST_FLUSH)
        self.stream.send_document(status, body, (*answer_headers(self.timings, caching), *headers), media_type)
        self.stream.call_once_written(self.timings.finish)

    def begin_trace(self) -> None:
        """Start a trace for a generation that came without one, if traces are exported."""
        if self.trace is None and self.server.accounting.export is not None:
            self.trace = TraceContext(token_hex(16), self.server.new_span_id(), None, is_sampled=True)
            current_trace_id.set(self.trace.trace_id)
            current_trace.set(self.trace)


Handler = Callable[[Exchange], Awaitable[None]]


async def at_once(work: Callable[[], T], /) -> T:
    return work()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A route's description, for /openapi.json (openapi.py) and the tables of docs/api.md.

    Args:
        body: type of the decoded body; a tuple: names of form fields; None: no body.
        surface: the API whose table of further fields applies to the body.
        example: an example body.
        answer: type of the JSON answer; bytes: another media type.
        events: type of a stream's events, framed as `media_type`.
        ends_with_done: the last event is [DONE], not JSON.
        query: types of the query's fields.
    """

    summary: str
    body: Any = None
    surface: Name | None = None
    example: Any = None
    answer: Any = dict[str, Any]
    events: Any = None
    ends_with_done: bool = False
    media_type: bytes = EVENTS
    query: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and the checks before it runs.

    Args:
        scope: right that the caller needs; None: callers are not identified.
        is_counted: it counts against the caller's request quotas.
        needs_tokens: it is a generation, and counts against token quotas too.
        errors: format of its errors.
        headers: added to every answer, refusals included.
        operation: None: of the dashboard's files.
    """

    handler: Handler
    scope: Scope | None
    needs_model: bool = True
    is_counted: bool = False
    needs_tokens: bool = False
    errors: ErrorForm = OPENAI_ERRORS
    headers: Headers = ()
    operation: Operation | None = None


class MethodNotAllowed(ServiceError):
    """Method not allowed.

    Args:
        allowed: methods, as the Allow header lists them.
    """

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(ErrorKind.METHOD_NOT_ALLOWED, message, "method_not_allowed")
        self.allowed = allowed


@dataclass(eq=False, repr=False)
class App:
    """Answers every request of every connection. The start of the server sets some attributes later, one by one.

    Args:
        find_route: returns the route of a path and method, and the name in the path; raises ServiceError.
        new_request_id: makes unique ids.
        new_span_id: makes ids of 16 hex digits, for the server's spans in clients' traces.
        cross_origin: origins whose pages may read answers; None: none.
        metrics_need_key: /metrics requires a key.

    Attributes:
        exchanges: requests in progress.
        listener, live, drain: set before the first request. live is the dashboard's stream; drain ends the process as
            SIGTERM does, and returns the seconds of grace.
        generations, card: set when the model is loaded; so is adapters, if it supports them.
        local_models: models that start on demand; None: there are none.
        responses: the stored responses; None: they are not stored.
        batches: /v1/batches; None: it is not served.
        offload: runs disk work on another thread.
    """

    find_route: Callable[[str, str], tuple[Route, str]]
    readiness: Readiness
    gate: Gate
    metrics: Metrics
    clock: Clock
    _new_request_id: Callable[[], str]
    _cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    new_span_id: Callable[[], str] = lambda: token_hex(8)
    metrics_need_key: bool = True
    accounting: Accounting = field(init=False)
    listener: Listener = field(init=False)
    live: Live = field(init=False)
    drain: Callable[[], float] = field(init=False)
    card: ServerCard = field(init=False)
    exchanges: dict[HttpStream, Exchange] = field(default_factory=dict)
    generations: Generations | None = None
    adapters: Adapters | None = None
    local_models: LocalModels | None = None
    responses: Responses | None = None
    batches: Batches | None = None
    offload: Offload = at_once
    request_limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        self.accounting = Accounting(self.metrics, self.clock)

    # What handlers ask.

    @property
    def served(self) -> Generations:
        assert self.generations is not None, "readiness is checked before a handler that needs the model"
        return self.generations

    @property
    def loaded_engine(self) -> EngineClient:
        """For operators' routes, which work while the server drains too.

        Raises:
            ServiceError: the model is still loading.
        """
        if self.generations is None:
            self.readiness.check()
        return self.served.engine

    @property
    def model_states(self) -> Mapping[str, str]:
        return {} if self.local_models is None else self.local_models.states

    def generating(self) -> list[Exchange]:
        """The generations in progress."""
        active = {} if self.generations is None else self.generations.active
        return [one for one in self.exchanges.values() if one.request_id in active]

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine in this process; without one, all zeros."""
        own = None if self.generations is None else self.generations.own
        return EngineStats() if own is None else own.engine.stats

    def load(self) -> Load:
        stats, own = self.stats, None if self.generations is None else self.generations.own
        pools = self.metrics.pools().values()
        contender = Contender(0, "", 1, is_due=False)
        return Load(
            num_running=stats.num_running + sum(one.num_active for pool in pools for one in pool.upstreams),
            num_waiting=stats.num_waiting + sum(pool.num_waiting for pool in pools),
            kv_usage=stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            expected_s=None if own is None else own.admission.estimate(contender, LEAST_BACKLOG, 1.0).expected_s,
        )

    def agent_line(self) -> str:
        """The answer to haproxy's agent-check."""
        if self.readiness.is_draining:
            return "drain"
        if not self.readiness.is_ready or self.readiness.is_stalled:
            return f"down #{'stalled' if self.readiness.is_ready else 'loading'}"
        pools = self.metrics.pools().values()
        if pools and self.served.own is None and all(one.is_out for one in pools):
            return "down #no upstream"
        return f"up ready {self.load().weight}%"

    # From head to handler.

    async def handle(
        self, stream: HttpStream, request_id: str | None = None, identify: Callable[[], Caller] | None = None
    ) -> None:
        """The connection's handler: exactly one answer, whatever happens.

        Args:
            request_id: id of a batch's line, which may be run again.
            identify: returns the caller of a batch's line.
        """
        now = self.clock.monotonic()
        timings = StageClock(stream.received_s, now)
        timings.enter(Stage.AUTH, now)
        exchange = Exchange(
            request=stream.request,
            client=self._client_of(stream),
            request_id=request_id or self._new_request_id(),
            timings=timings,
            stream=stream,
            server=self,
            identify=identify,
        )
        traceparent = exchange.request.header(b"traceparent")
        if traceparent is not None:
            exchange.trace = continue_trace(traceparent, self.new_span_id())
        self.exchanges[stream] = exchange
        current_request_id.set(exchange.request_id)
        current_trace_id.set(None if exchange.trace is None else exchange.trace.trace_id)
        current_trace.set(exchange.trace)
        current_hops.set(hops_of(exchange.request))
        stream.common_headers = (*exchange.identity_headers, *self._cross_origin.headers(stream.request))
        error_code = None
        try:
            if stream.peer.is_proxy:
                await self._dispatch_proxied(exchange)
            else:
                await self._dispatch(exchange)
        except ServiceError as error:
            error_code = error.code
            self._answer_error(exchange, error)
        except ClientDisconnected:
            pass
        except Exception:  # a bug
            error_code = INTERNAL.code
            if stream.head_sent:
                raise  # closes the connection: nothing else can tell the client now
            path = escape(mask_keys(stream.request.path))
            logger.exception("%s %s cannot be answered", stream.request.method, path)
            self._answer_error(exchange, INTERNAL)
        finally:
            del self.exchanges[stream]
            if exchange.refused_status is not None:
                error_code = PROTOCOL_CODES[exchange.refused_status]
            stream.call_once_written(partial(self._close, exchange, error_code))

    def _close(self, exchange: Exchange, error_code: str | None, now_s: float) -> None:
        """Account for it: the kernel has the last byte of its answer, or its client has left."""
        exchange.timings.finish(now_s)
        self.accounting.close(exchange, exchange.refused_status or status_told(exchange.stream), error_code)

    def _client_of(self, stream: HttpStream) -> Peer:
        if not stream.peer.is_proxy:
            return stream.peer
        return self.listener.gate.client_of(stream.peer, stream.request.headers)

    async def _dispatch_proxied(self, exchange: Exchange) -> None:
        """Check and count the client that a proxy names, as the listener does direct clients."""
        gate, client = self.listener.gate, exchange.client
        reason = gate.why_refused(client)
        if reason == DENIED:
            message = f"Requests from {client.address} are not allowed. Ask the operator to allow your network."
            raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied")
        if reason is not None:
            message = f"Too many requests from {client.address} are in progress. Wait for one of them to end."
            raise ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded", retry_after_s=1)
        gate.enter(client)
        try:
            await self._dispatch(exchange)
        finally:
            gate.leave(client)

    async def _dispatch(self, exchange: Exchange) -> None:
        preflight = self._cross_origin.preflight_headers(exchange.request)
        if preflight is not None:  # it comes without a key, and for any path; the request that follows is checked
            exchange.stream.send_head(ResponseHead(200, ((b"content-length", b"0"), *preflight)))
            exchange.stream.end()
            return
        is_anthropics = exchange.request.header(b"anthropic-version") is not None
        if is_anthropics:
            exchange.errors = ANTHROPIC_ERRORS
        try:
            route, exchange.argument = self.find_route(exchange.request.path, exchange.request.method)
            exchange.errors = ANTHROPIC_ERRORS if is_anthropics and route.errors is OPENAI_ERRORS else route.errors
        finally:
            if exchange.errors.id_header is not None:
                exchange.stream.common_headers += ((exchange.errors.id_header, exchange.request_id.encode()),)
        exchange.asks_generation = route.needs_tokens
        exchange.stream.common_headers += route.headers
        if route.scope is not None and (self.metrics_need_key or route.scope is not Scope.METRICS):
            known = None if exchange.identify is None else exchange.identify()
            exchange.caller = known or await self.gate.identify(exchange.request, exchange.client)
            exchange.caller.check_scope(route.scope)
            if exchange.caller.key_id is None:  # a page would need to know nothing
                self._cross_origin.check_page(exchange.request)
            if route.scope is Scope.ADMIN and exchange.caller == LOCAL_CALLER:
                self._check_operator(exchange)
        if route.needs_model:
            self.readiness.check()
        if exchange.request.query and route.operation is not None:
            unknown = parse_qs(exchange.request.query, keep_blank_values=True).keys() - route.operation.query.keys()
            self.metrics.count_hidden_fields(min(len(unknown), MAX_UNKNOWN_FIELDS))
        if route.is_counted:
            await self._handle_counted(route, exchange)
        else:
            exchange.enter(Stage.ANSWER)
            await route.handler(exchange)

    def _check_operator(self, exchange: Exchange) -> None:
        """Raises ServiceError (permission): without keys, operators' routes are only for this machine."""
        if not is_operators(exchange.request, exchange.stream.peer, self.listener.gate.trusts_proxies):
            message = (
                "Without a key, this is only for clients on the same machine, at http://127.0.0.1 or http://localhost "
                "and without a proxy. For others, configure a key with the right 'admin' (docs/dashboard.md)."
            )
            raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied")

    async def _handle_counted(self, route: Route, exchange: Exchange) -> None:
        """Count the request in its caller's quotas, unless the server is full."""
        exchange.enter(Stage.QUOTA)
        ticket = exchange.ticket = self.gate.quotas.ticket_for(exchange.known_caller)
        exchange.stream.late_headers = ticket.headers
        if (form := exchange.request.header(b"endpoint-load-metrics-format")) is not None:
            exchange.stream.late_headers = lambda: (*ticket.headers(), *self.load().report(form))
        ticket.enter(route.needs_tokens)
        try:
            await route.handler(exchange)
        except ServiceError as error:
            outcome = exchange.outcome
            is_untouched = outcome is None or outcome.is_refused or outcome.usage == NO_USAGE
            if error.kind is ErrorKind.UNAVAILABLE and is_untouched:
                ticket.give_back()
            raise
        finally:
            ticket.leave()

    def _answer_error(self, exchange: Exchange, error: ServiceError) -> None:
        if exchange.stream.head_sent:
            return  # the error is in the stream
        if exchange.caller is not None:
            error = exchange.caller.told(error)
        headers: Headers = ()
        if isinstance(error, MethodNotAllowed):
            headers += ((b"allow", error.allowed.encode()),)
        if error.kind is ErrorKind.AUTHENTICATION:
            headers += ((b"www-authenticate", b"Bearer"),)  # RFC 9110 §11.6.1: a 401 names its scheme
        if error.kind is ErrorKind.DEADLINE_EXCEEDED and not isinstance(error, OwnDeadlineExceeded):
            headers += ((b"x-should-retry", b"false"),)  # its client's own deadline: SDKs would retry a 504 twice
        if error.retry_after_s is not None:
            headers += _retry_headers(error.retry_after_s)
        exchange.send(exchange.errors.body(error, exchange.request_id), exchange.errors.status(error), headers)

    def fail_all(self, error: ServiceError) -> None:
        """End every generation and every wait for a body with this error."""
        if self.generations is not None:
            self.generations.fail_all(error)
        for stream in self.exchanges:
            stream.fail_body(error)

    def has_revoked(self, caller: Caller) -> bool:
        return self.gate.directory.has_revoked(caller)

    def end_revoked(self) -> None:
        """End the requests of revoked callers; their usage so far is billed."""
        message = "The credential of this request has been revoked. Ask the operator for another."
        error = ServiceError(ErrorKind.AUTHENTICATION, message, "invalid_api_key")
        for stream, exchange in list(self.exchanges.items()):
            if exchange.caller is not None and self.has_revoked(exchange.caller):
                stream.fail_body(error)
                if self.generations is not None:
                    self.generations.fail(exchange.request_id, error)

    def refuse(
        self,
        status: int,
        message: str,
        peer: Peer,
        since: float,
        stream: HttpStream | None,
        http2_error: Http2ErrorCode | None,
    ) -> tuple[Headers, bytes]:
        """Answers where no handler can: the bytes are no valid request, or its body is incomplete.

        Args:
            status: one of PROTOCOL_CODES.
                since: arrival of the first of those bytes, on the loop's clock.
            stream: the stream with the incomplete body; its handler sees a disconnect.
            http2_error: sent instead, by RST_STREAM or GOAWAY.
        """
        exchange = None if stream is None else self.exchanges.get(stream)
        request = NO_REQUEST if stream is None else stream.request
        account = exchange or Account(  # its handler has not begun
            request=request, client=peer, request_id=self._new_request_id(), timings=StageClock(since)
        )
        account.http2_error = None if http2_error is None else http2_error.name
        account.timings.enter(Stage.LAST_FLUSH, self.clock.monotonic())
        if exchange is None:
            self.accounting.close(account, status, PROTOCOL_CODES[status])
        elif not exchange.stream.head_sent:
            exchange.refused_status = status
        body = protocol_error_body(status, message)
        headers = (*content_headers(body), *answer_headers(account.timings), *account.identity_headers)
        return (*headers, *self._cross_origin.headers(account.request)), body


def _retry_headers(retry_after_s: float) -> Headers:
    """RFC 9110 §10.2.3 has whole seconds; the SDKs read milliseconds first."""
    return (
        (b"retry-after", b"%d" % math.ceil(retry_after_s)),
        (b"retry-after-ms", b"%d" % math.ceil(retry_after_s * 1e3)),
    )
