"""From a request's head to its handler, and from an error to its answer. Thread: loop.

Every request passes here once: route, authentication, readiness, handler, access line.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from secrets import token_hex

from core.errors import ErrorKind, ServiceError
from core.types import Usage
from server.api.replies import PROTOCOL_CODES, error_body, protocol_error_body, status_of
from server.callers import Gate
from server.clock import Clock
from server.exchange import AppState, Exchange, Readiness
from server.gate.cross_origin import CrossOrigin
from server.gate.identity import mask_keys
from server.gate.tenants import OwnDeadlineExceeded
from server.listening.clients import DENIED
from server.observing.accounting import NO_REQUEST, Account, RequestRecord, TraceContext, continue_trace, status_told
from server.observing.logs import current_request_id, current_trace_id
from server.observing.metrics import Metrics
from server.observing.timing import Stage, StageClock, answer_headers
from server.routes import MethodNotAllowed, Route, find_route
from server.values import escape
from server.wire.messages import Headers, Http2ErrorCode, Peer, ResponseHead
from server.wire.stream import ClientDisconnected, HttpStream, content_headers

logger = logging.getLogger(__name__)

NO_USAGE = Usage(0, 0)
INTERNAL = ServiceError(
    ErrorKind.ENGINE, "The server failed to answer. The fault is not in the request; try again later.", "internal_error"
)


class App:
    """Answers every request of every connection.

    Args:
        new_request_id: unique ids, ours.
        new_span_id: of 16 hex digits, of our spans in clients' traces.
        cross_origin: whose pages may read the answers; None: no other site's.
    """

    def __init__(
        self,
        readiness: Readiness,
        gate: Gate,
        metrics: Metrics,
        clock: Clock,
        new_request_id: Callable[[], str],
        cross_origin: CrossOrigin | None = None,
        new_span_id: Callable[[], str] = lambda: token_hex(8),
    ) -> None:
        self.state = AppState(readiness, metrics, clock, new_span_id)
        self._gate = gate
        self._clock = clock
        self._new_request_id = new_request_id
        self._cross_origin = cross_origin or CrossOrigin()

    async def handle(self, stream: HttpStream) -> None:
        """The connection's handler: exactly one answer, whatever happens."""
        now = self._clock.monotonic()
        timings = StageClock(stream.received_s, now)
        timings.enter(Stage.AUTH, now)
        exchange = Exchange(
            request=stream.request,
            client=self._client_of(stream),
            request_id=self._new_request_id(),
            timings=timings,
            stream=stream,
            server=self.state,
        )
        exchange.trace = self._trace_of(exchange)
        self.state.exchanges[stream] = exchange
        current_request_id.set(exchange.request_id)
        current_trace_id.set(None if exchange.trace is None else exchange.trace.trace_id)
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
        except Exception:  # a fault of ours, wherever it is
            error_code = INTERNAL.code
            if stream.head_sent:
                raise  # only the connection's end can tell it now
            path = escape(mask_keys(stream.request.path))
            logger.exception("%s %s cannot be answered", stream.request.method, path)
            self._answer_error(exchange, INTERNAL)
        finally:
            del self.state.exchanges[stream]
            if exchange.refused_status is not None:
                error_code = PROTOCOL_CODES[exchange.refused_status]
            stream.call_once_written(partial(self._close, exchange, error_code))

    def _close(self, exchange: Exchange, error_code: str | None, now_s: float) -> None:
        """The last of it: what was said of it is with the kernel, or nobody is there any more."""
        exchange.timings.finish(now_s)
        self.state.accounting.close(exchange, exchange.refused_status or status_told(exchange.stream), error_code)

    def fail_all(self, error: ServiceError) -> None:
        """Break off every generation, and every wait for a body: each has the error for its answer, or its end."""
        if self.state.generations is not None:
            self.state.generations.fail_all(error)
        for stream in self.state.exchanges:
            stream.fail_body(error)

    def end_revoked(self) -> None:
        """Break off whatever is in progress for those who have been revoked: what they have used is billed."""
        message = "What this request was sent with has been revoked. Ask the operator for another key."
        error = ServiceError(ErrorKind.AUTHENTICATION, message, "invalid_api_key")
        for stream, exchange in list(self.state.exchanges.items()):
            if exchange.caller is not None and self._gate.directory.has_revoked(exchange.caller):
                stream.fail_body(error)
                if self.state.generations is not None:
                    self.state.generations.fail(exchange.request_id, error)

    def refuse(
        self,
        status: int,
        message: str,
        peer: Peer,
        since: float,
        stream: HttpStream | None,
        http2_error: Http2ErrorCode | None,
    ) -> tuple[Headers, bytes]:
        """What the connection answers where no handler can: no request came of the bytes, or its body broke off.

        Args:
            status: one of PROTOCOL_CODES.
            peer: of the connection.
            since: when the first byte came of what is no request, on the loop's clock.
            stream: whose body it was; its handler hears that nobody waits for it any more.
            http2_error: what is sent instead, by RST_STREAM or GOAWAY.
        """
        error_name = None if http2_error is None else http2_error.name
        exchange = None if stream is None else self.state.exchanges.get(stream)
        request = NO_REQUEST if stream is None else stream.request
        account = exchange or Account(  # its handler has not begun
            request=request, client=peer, request_id=self._new_request_id(), timings=StageClock(since)
        )
        account.http2_error = error_name
        account.timings.enter(Stage.LAST_FLUSH, self._clock.monotonic())
        if exchange is None:
            self.state.accounting.close(account, status, PROTOCOL_CODES[status])
        elif not exchange.stream.head_sent:
            exchange.refused_status = status
        body = protocol_error_body(status, message)
        headers = (*content_headers(body), *answer_headers(account.timings), *account.identity_headers)
        return (*headers, *self._cross_origin.headers(account.request)), body

    def _trace_of(self, exchange: Exchange) -> TraceContext | None:
        """The trace that the client names."""
        traceparent = exchange.request.header(b"traceparent")
        return None if traceparent is None else continue_trace(traceparent, self.state.new_span_id())

    def export_to(self, export: Callable[[RequestRecord], None]) -> None:
        """Hand it each generation that is over, from now on."""
        self.state.accounting.export = export

    def _client_of(self, stream: HttpStream) -> Peer:
        if not stream.peer.is_proxy:
            return stream.peer
        return self.state.known_listener.gate.client_of(stream.peer, stream.request.headers)

    async def _dispatch_proxied(self, exchange: Exchange) -> None:
        """Judge and count the client that a proxy names, as the listener does those who come themselves."""
        gate, client = self.state.known_listener.gate, exchange.client
        reason = gate.why_refused(client)
        if reason == DENIED:
            message = f"Requests from {client.address} are not taken here. Ask the operator to allow your network."
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
        if preflight is not None:  # it comes without the key, and for any path: the request itself is judged
            exchange.stream.send_head(ResponseHead(200, ((b"content-length", b"0"), *preflight)))
            exchange.stream.end()
            return
        route, exchange.argument = find_route(exchange.request.path, exchange.request.method)
        exchange.asks_generation = route.needs_tokens
        if route.scope is not None:
            exchange.caller = await self._gate.identify(exchange.request, exchange.client)
            exchange.caller.check_scope(route.scope)
        if route.needs_model:
            self.state.readiness.check()
        if route.is_counted:
            await self._handle_counted(route, exchange)
        else:
            exchange.enter(Stage.ANSWER)
            await route.handler(exchange)

    async def _handle_counted(self, route: Route, exchange: Exchange) -> None:
        """Let the request in and out of its caller's quotas. One that the server has no room for counts for nothing."""
        exchange.enter(Stage.QUOTA)
        ticket = exchange.ticket = self._gate.quotas.ticket_for(exchange.known_caller)
        exchange.stream.late_headers = ticket.headers
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
            return  # it has been told in the stream
        headers: Headers = ()
        if isinstance(error, MethodNotAllowed):
            headers += ((b"allow", error.allowed.encode()),)
        if error.kind is ErrorKind.AUTHENTICATION:
            headers += ((b"www-authenticate", b"Bearer"),)  # RFC 9110 §11.6.1: a 401 names its scheme
        if error.kind is ErrorKind.DEADLINE_EXCEEDED and not isinstance(error, OwnDeadlineExceeded):
            headers += ((b"x-should-retry", b"false"),)  # its client's own: SDKs would try a 504 twice more
        if error.retry_after_s is not None:
            headers += _retry_headers(error.retry_after_s)
        exchange.send(error_body(error), status_of(error), headers)


def _retry_headers(retry_after_s: float) -> Headers:
    """RFC 9110 §10.2.3 has whole seconds; the SDKs read milliseconds first."""
    return (
        (b"retry-after", b"%d" % math.ceil(retry_after_s)),
        (b"retry-after-ms", b"%d" % math.ceil(retry_after_s * 1e3)),
    )
