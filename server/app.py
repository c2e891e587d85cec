"""From a request's head to its handler, and from an error to its answer. Thread: loop.

Every request passes here once: route, authentication, readiness, handler, access line.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from secrets import token_hex
from urllib.parse import unquote

from core.errors import ErrorKind, ServiceError
from core.types import EngineStats
from server.answer_body import JSON_TYPE, answer_headers, content_headers, send_document
from server.api import admin, models, tokenize
from server.api.chat import ChatSurface
from server.api.completions import CompletionsSurface
from server.api.envelope import PROTOCOL_CODES, error_body, protocol_error_body, status_of
from server.api.responses import ResponsesSurface, input_tokens_reply
from server.api.surface import Surface
from server.api.usage import NO_LEDGER, parse_usage, usage_reply
from server.backend import Backend
from server.clock import Clock
from server.gate.auth import Caller
from server.gate.cross_origin import CrossOrigin
from server.gate.gate import Gate
from server.gate.keys import Scope
from server.gate.quota import Ticket
from server.gate.rate_limit_fields import show_limits
from server.ledger.usage_report import read_usage
from server.lifecycle import Lifecycle
from server.listening.listener import Listener
from server.listening.refusals import DENIED
from server.observing.accounting import NO_REQUEST, Account, Accounting, status_told
from server.observing.exposition import CONTENT_TYPE
from server.observing.flight_recorder import Flight
from server.observing.logs import current_request_id, current_trace_id
from server.observing.metrics import Metrics
from server.observing.request_ids import client_request_id
from server.observing.timelines import requests_reply, timeline_reply
from server.observing.timing import Stage, StageClock
from server.observing.trace_context import TraceContext, continue_trace
from server.wire.messages import Headers, HttpRequest, ResponseHead
from server.wire.peer import Peer
from server.wire.stream import ClientDisconnected, HttpStream

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 200  # of what a client asked for, in errors that repeat it

INTERNAL = ServiceError(
    ErrorKind.ENGINE, "The server failed to answer. The fault is not in the request; try again later.", "internal_error"
)
REPLY_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # DELETE takes an answer's id as it was shown


@dataclass(slots=True, kw_only=True)
class Exchange(Account):
    """One request on its way through the app."""

    stream: HttpStream
    ticket: Ticket | None = None
    argument: str = ""  # what the route's pattern left open, decoded

    @property
    def known_caller(self) -> Caller:
        """For handlers of routes that ask for a right."""
        assert self.caller is not None, "whoever comes to such a route has been identified"
        return self.caller

    @property
    def known_ticket(self) -> Ticket:
        """For handlers of routes that are counted."""
        assert self.ticket is not None, "whoever comes to such a route has been let in"
        return self.ticket


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and what it asks of a request first.

    Args:
        scope: the right that the caller must have; None: anybody may ask, unknown to us.
        is_counted: it is work, which the caller's quotas bound.
    """

    handler: Handler
    scope: Scope | None
    needs_model: bool = True
    is_counted: bool = False


@dataclass(slots=True)
class Readiness:
    """What /ready says. `stage` is what the server is doing while it is not ready."""

    stage: str = "starting"
    is_ready: bool = False
    is_draining: bool = False
    is_stalled: bool = False  # the engine is busy with one step for too long: it may still come back

    def check(self) -> None:
        """
        Raises:
            ServiceError: unavailable; loading or draining.
        """
        if self.is_draining:
            raise ServiceError(ErrorKind.UNAVAILABLE, "The server is shutting down.", "draining", retry_after_s=5)
        if not self.is_ready:
            raise ServiceError(
                ErrorKind.UNAVAILABLE, f"The model is still loading: {self.stage}.", "loading", retry_after_s=1
            )


class App:
    """Answers every request of every connection.

    Args:
        new_request_id: unique ids, ours.
        new_span_id: of 16 hex digits, of our spans in clients' traces.
        cross_origin: whose pages may read the answers; None: nobody's else.
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
        self.readiness = readiness
        self.lifecycle: Lifecycle | None = None  # once the model is loaded
        self.card: models.ServerCard | None = None  # likewise
        self.listener: Listener | None = None  # for /metrics
        self.drain: Callable[[], float] | None = None  # ends the process as SIGTERM does; returns the seconds of grace
        self._gate = gate
        self._metrics = metrics
        self._accounting = Accounting(metrics, clock)
        self._new_span_id = new_span_id
        self._clock = clock
        self._new_request_id = new_request_id
        self._cross_origin = cross_origin or CrossOrigin()
        self._exchanges: dict[HttpStream, Exchange] = {}  # in progress
        self._routes = self._make_routes()
        self._patterns = (
            ("/v1/models/", {"GET": Route(self._get_model, Scope.INFERENCE)}),
            (
                "/v1/requests/",
                {
                    "GET": Route(self._show_request, Scope.INFERENCE, needs_model=False),
                    "DELETE": Route(self._delete_request, Scope.INFERENCE),
                },
            ),
        )

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
        )
        exchange.trace = self._trace_of(exchange)
        self._exchanges[stream] = exchange
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
            logger.exception("%s %s cannot be answered", stream.request.method, stream.request.path)
            self._answer_error(exchange, INTERNAL)
        finally:
            del self._exchanges[stream]
            if exchange.refused_status is not None:
                error_code = PROTOCOL_CODES[exchange.refused_status]
            stream.call_once_written(partial(self._close, exchange, error_code))

    def _close(self, exchange: Exchange, error_code: str | None, now_s: float) -> None:
        """The last of it: what was said of it is with the kernel, or nobody is there any more."""
        exchange.timings.finish(now_s)
        self._accounting.close(exchange, exchange.refused_status or status_told(exchange.stream), error_code)

    def fail_all(self, error: ServiceError) -> None:
        """Break off every generation, and every wait for a body: each has the error for its answer, or its end."""
        if self.lifecycle is not None:
            self.lifecycle.fail_all(error)
        for stream in self._exchanges:
            stream.fail_body(error)

    def refuse(
        self, status: int, message: str, peer: Peer, since: float, stream: HttpStream | None
    ) -> tuple[Headers, bytes]:
        """What the connection answers where no handler can: no request came of the bytes, or its body broke off.

        Args:
            status: one of PROTOCOL_CODES.
            peer: of the connection.
            since: when the first byte came of what is no request, on the loop's clock.
            stream: whose body it was; its handler hears that nobody waits for it any more.
        """
        account: Account | None = None if stream is None else self._exchanges.get(stream)
        now = self._clock.monotonic()
        if account is not None:
            account.refused_status = status
            account.timings.enter(Stage.LAST_FLUSH, now)
        else:
            request = NO_REQUEST if stream is None else stream.request  # whose handler has not begun
            account = Account(
                request=request, client=peer, request_id=self._new_request_id(), timings=StageClock(since)
            )
            account.timings.enter(Stage.LAST_FLUSH, now)
            self._accounting.close(account, status, PROTOCOL_CODES[status])
        body = protocol_error_body(status, message)
        headers = (*content_headers(body), *answer_headers(account.timings), *account.identity_headers)
        return (*headers, *self._cross_origin.headers(account.request)), body

    def _trace_of(self, exchange: Exchange) -> TraceContext | None:
        """The trace that the client names."""
        traceparent = exchange.request.header(b"traceparent")
        return None if traceparent is None else continue_trace(traceparent, self._new_span_id())

    def _begin_trace(self, exchange: Exchange) -> None:
        """A generation belongs to one, where somebody collects them."""
        if exchange.trace is None and self._accounting.export is not None:
            exchange.trace = TraceContext(token_hex(16), self._new_span_id(), None, is_sampled=True)
            current_trace_id.set(exchange.trace.trace_id)

    def export_to(self, export: Callable[[Flight], None]) -> None:
        """Hand it each generation that is over, from now on."""
        self._accounting.export = export

    def _client_of(self, stream: HttpStream) -> Peer:
        if not stream.peer.is_proxy:
            return stream.peer
        assert self.listener is not None
        return self.listener.gate.client_of(stream.peer, stream.request.headers)

    async def _dispatch_proxied(self, exchange: Exchange) -> None:
        """Judge and count the client that a proxy names, as the listener does those who come themselves."""
        assert self.listener is not None
        gate, client = self.listener.gate, exchange.client
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
        route = self._route(exchange)
        if route.scope is not None:
            exchange.caller = self._gate.authenticator.identify(exchange.request, exchange.client.certificate)
            exchange.caller.check_scope(route.scope)
        if route.needs_model:
            self.readiness.check()
        if route.is_counted:
            await self._handle_counted(route.handler, exchange)
        else:
            exchange.timings.enter(Stage.ANSWER, self._clock.monotonic())
            await route.handler(exchange)

    async def _handle_counted(self, handler: Handler, exchange: Exchange) -> None:
        """Let the request in and out of its caller's quotas."""
        exchange.timings.enter(Stage.QUOTA, self._clock.monotonic())
        ticket = exchange.ticket = self._gate.quotas.ticket_for(exchange.known_caller)
        try:
            ticket.enter()
        finally:
            show_limits(exchange.stream, ticket)
        try:
            await handler(exchange)
        finally:
            ticket.leave()

    def _route(self, exchange: Exchange) -> Route:
        request = exchange.request
        methods = self._routes.get(request.path)
        if methods is None:
            for prefix, candidates in self._patterns:
                if request.path.startswith(prefix) and len(request.path) > len(prefix):
                    methods = candidates
                    exchange.argument = unquote(request.path[len(prefix) :])
        if methods is None:
            patterns = [f"{prefix}{{id}}" for prefix, _ in self._patterns]
            known = ", ".join(sorted([*self._routes, *patterns]))
            raise ServiceError(
                ErrorKind.NOT_FOUND, f"There is no {request.path[:_SHOWN_CHARS]} here. Known: {known}.", "not_found"
            )
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            raise MethodNotAllowed(request.path, request.method, methods)
        return route

    def _make_routes(self) -> dict[str, dict[str, Route]]:
        asks = Scope.INFERENCE
        return {
            "/v1/chat/completions": {"POST": Route(self._generating(ChatSurface()), asks, is_counted=True)},
            "/v1/completions": {"POST": Route(self._generating(CompletionsSurface()), asks, is_counted=True)},
            "/v1/responses": {"POST": Route(self._generating(ResponsesSurface()), asks, is_counted=True)},
            "/v1/responses/input_tokens": {"POST": Route(self._count_input_tokens, asks, is_counted=True)},
            "/v1/models": {"GET": Route(self._list_models, asks)},
            "/model_info": {"GET": Route(self._show_model_info, asks)},
            "/server_info": {"GET": Route(self._show_server_info, asks)},
            "/v1/usage": {"GET": Route(self._show_usage, Scope.USAGE, is_counted=True)},
            "/tokenize": {"POST": Route(self._tokenize, asks, is_counted=True)},
            "/detokenize": {"POST": Route(self._detokenize, asks, is_counted=True)},
            "/health": {"GET": Route(self._health, None, needs_model=False)},
            "/ready": {"GET": Route(self._ready, None, needs_model=False)},
            "/admin/requests": {"GET": Route(self._list_requests, Scope.ADMIN, needs_model=False)},
            "/metrics": {"GET": Route(self._show_metrics, Scope.METRICS, needs_model=False)},
            "/admin/engine": {"GET": Route(self._show_engine, Scope.ADMIN, needs_model=False)},
            "/admin/cache/clear": {"POST": Route(self._clear_cache, Scope.ADMIN, needs_model=False)},
            "/admin/drain": {"POST": Route(self._drain, Scope.ADMIN, needs_model=False)},
        }

    def _generating(self, surface: Surface) -> Handler:
        async def generate(exchange: Exchange) -> None:
            check_media_type(exchange.request)
            self._begin_trace(exchange)
            outcome = await self._served.generate(
                surface, exchange.stream, exchange.request_id, exchange.timings, exchange.known_ticket
            )
            exchange.outcome = outcome
            if outcome.error is not None:
                raise outcome.error

        return generate

    @property
    def _served(self) -> Lifecycle:
        assert self.lifecycle is not None, "readiness is checked before a handler that needs the model"
        return self.lifecycle

    @property
    def _loaded_backend(self) -> Backend:
        """For operators, who may ask while the server drains.

        Raises:
            ServiceError: the model is still loading.
        """
        if self.lifecycle is None:
            self.readiness.check()
        return self._served.backend

    def _cards_for(self, exchange: Exchange) -> tuple[models.ServedModel, ...]:
        return self._served.reader.cards_for(exchange.known_caller.tenant)

    async def _health(self, exchange: Exchange) -> None:
        self._send(exchange, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        self.readiness.check()
        if self.readiness.is_stalled:  # requests may still wait for it; a balancer had better look elsewhere
            message = "The engine has been busy with one step for too long."
            raise ServiceError(ErrorKind.UNAVAILABLE, message, "stalled", retry_after_s=5)
        self._send(exchange, b'{"status":"ready"}')

    async def _show_metrics(self, exchange: Exchange) -> None:
        assert self.listener is not None
        stats = self.lifecycle.backend.stats if self.lifecycle is not None else EngineStats()
        listener = self.listener
        if self.lifecycle is not None:
            self._metrics.num_active = self.lifecycle.active.__len__
        body = self._metrics.render(stats, listener.num_open, listener.num_accepted, listener.refusals.counts)
        self._send(exchange, body, media_type=CONTENT_TYPE)

    async def _show_engine(self, exchange: Exchange) -> None:
        backend = self._loaded_backend
        snapshot = await backend.inspect()
        self._send(exchange, admin.engine_reply(snapshot, backend.stats))

    async def _clear_cache(self, exchange: Exchange) -> None:
        await self._loaded_backend.clear_cache()
        logger.info("the prefix cache is cleared, as /admin/cache/clear asks")
        self._send(exchange, admin.CACHE_CLEARED)

    async def _drain(self, exchange: Exchange) -> None:
        assert self.drain is not None
        assert self.listener is not None
        logger.info("the server drains and ends, as /admin/drain asks")
        grace_s = self.drain()
        num_others = self.listener.num_handlers - 1
        self._send(exchange, admin.drain_reply(grace_s, num_others), status=202)

    async def _list_models(self, exchange: Exchange) -> None:
        self._send(exchange, models.list_reply(self._cards_for(exchange)))

    async def _show_model_info(self, exchange: Exchange) -> None:
        """For routers that probe it: model_path, tokenizer_path, served_model_name, is_generation, model_type,
        architectures, max_model_len, and that it understands neither images nor audio."""
        assert self.card is not None
        self._send(exchange, models.model_info_reply(self.card))

    async def _show_server_info(self, exchange: Exchange) -> None:
        """For routers that probe it: model_path, served_model_name, version, the context (context_length,
        max_model_len), sequences at once (max_num_reqs, max_running_requests), tokens of a step (max_prefill_tokens)
        and of the KV cache (max_total_tokens), that it is one process (tp_size, dp_size, pp_size), and where it
        listens (binds)."""
        assert self.card is not None
        self._send(exchange, models.server_info_reply(self.card))

    async def _get_model(self, exchange: Exchange) -> None:
        self._send(exchange, models.model_reply(models.find_model(self._cards_for(exchange), exchange.argument)))

    async def _show_request(self, exchange: Exchange) -> None:
        request_id, tenant = _plain_id(exchange.argument), exchange.known_caller.tenant.name
        recorder = self._accounting.recorder
        self._send(exchange, timeline_reply(request_id, tenant, self._generations(), recorder, self._clock))

    async def _list_requests(self, exchange: Exchange) -> None:
        recorder, query = self._accounting.recorder, exchange.request.query
        self._send(exchange, requests_reply(query, self._generations(), recorder, self._clock))

    def _generations(self) -> list[Exchange]:
        """In progress."""
        active = {} if self.lifecycle is None else self.lifecycle.active
        return [one for one in self._exchanges.values() if one.request_id in active]

    async def _delete_request(self, exchange: Exchange) -> None:
        """By our id, or by the client's own x-request-id: all of its tenant's that bear it."""
        shown, tenant = exchange.argument, exchange.known_caller.tenant.name
        named = [one.request_id for one in self._generations() if client_request_id(one.request) == shown]
        is_cancelled = [self._served.cancel(request_id, tenant) for request_id in (_plain_id(shown), *named)]
        if not any(is_cancelled):
            message = f"No request {exchange.argument[:_SHOWN_CHARS]!r} is in progress. It may have ended already."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
        self._send(exchange, b'{"status":"cancelled"}')

    async def _show_usage(self, exchange: Exchange) -> None:
        """Of the caller's tenant, by ?by=day|model|key and ?since=."""
        ledger, now = self._served.ledger, datetime.fromtimestamp(self._clock.unix(), UTC)
        query = parse_usage(exchange.request.query, exchange.known_caller.tenant.name, now)
        if ledger is None:
            raise NO_LEDGER
        lines = await self._served.offload(lambda: read_usage(ledger.path, query))
        self._send(exchange, usage_reply(query, lines))

    async def _tokenize(self, exchange: Exchange) -> None:
        reader, cards = self._served.reader, self._cards_for(exchange)

        def work(body: bytes) -> tuple[bytes, tuple[str, ...]]:
            call = tokenize.parse_tokenize(body)
            if call.model is not None:
                models.find_model(cards, call.model)
            ids = reader.encode(call.prompt)
            strs = [reader.tokenizer.str_of(token_id) for token_id in ids] if call.wants_token_strs else None
            return tokenize.tokenize_reply(ids, reader.max_model_len, strs), call.unknown_fields

        await self._answer_computed(exchange, work)

    async def _detokenize(self, exchange: Exchange) -> None:
        reader, cards = self._served.reader, self._cards_for(exchange)
        vocab_size = self._served.defaults.vocab_size

        def work(body: bytes) -> tuple[bytes, tuple[str, ...]]:
            call = tokenize.parse_detokenize(body, vocab_size)
            if call.model is not None:
                models.find_model(cards, call.model)
            text = reader.tokenizer.decode(call.ids, skip_special_tokens=False)
            return tokenize.detokenize_reply(text), call.unknown_fields

        await self._answer_computed(exchange, work)

    async def _count_input_tokens(self, exchange: Exchange) -> None:
        reader, cards = self._served.reader, self._cards_for(exchange)
        defaults = self._served.defaults

        def work(body: bytes) -> tuple[bytes, tuple[str, ...]]:
            call = ResponsesSurface().parse(body, defaults)
            models.find_model(cards, call.model)
            num_tokens = sum(len(reader.encode(prompt)) for prompt in call.prompts)
            return input_tokens_reply(num_tokens), call.unknown_fields

        await self._answer_computed(exchange, work)

    async def _answer_computed(
        self, exchange: Exchange, work: Callable[[bytes], tuple[bytes, tuple[str, ...]]]
    ) -> None:
        """Answer with what `work` makes of the body: reply, names of unknown fields. It may run elsewhere."""
        body = await self._read_json(exchange)
        place = self._served.admission.enter(len(body))
        try:
            reply, unknown_fields = await self._served.compute(lambda: work(body), len(body))
        finally:
            place.leave(None, self._clock.monotonic())
        self._metrics.count_unknown_fields(unknown_fields)
        self._send(exchange, reply)

    async def _read_json(self, exchange: Exchange) -> bytes:
        check_media_type(exchange.request)
        exchange.timings.enter(Stage.BODY, self._clock.monotonic())
        body = await self._served.read_body(exchange.stream)
        exchange.timings.enter(Stage.ANSWER, self._clock.monotonic())
        return body

    def _answer_error(self, exchange: Exchange, error: ServiceError) -> None:
        if exchange.stream.head_sent:
            return  # it has been told in the stream
        headers: Headers = ()
        if isinstance(error, MethodNotAllowed):
            headers += ((b"allow", error.allowed.encode()),)
        if error.kind is ErrorKind.AUTHENTICATION:
            headers += ((b"www-authenticate", b"Bearer"),)  # RFC 9110 §11.6.1: a 401 names its scheme
        if error.retry_after_s is not None:
            headers += _retry_headers(error.retry_after_s)
        self._send(exchange, error_body(error), status_of(error), headers)

    def _send(
        self,
        exchange: Exchange,
        body: bytes,
        status: int = 200,
        headers: Headers = (),
        media_type: bytes = JSON_TYPE,
    ) -> None:
        """Answer with a document that no generation is told in."""
        exchange.timings.enter(Stage.LAST_FLUSH, self._clock.monotonic())
        send_document(exchange.stream, status, body, (*answer_headers(exchange.timings), *headers), media_type)
        exchange.stream.call_once_written(exchange.timings.finish)


def _plain_id(shown: str) -> str:
    for prefix in REPLY_PREFIXES:
        shown = shown.removeprefix(prefix)
    return shown


class MethodNotAllowed(ServiceError):
    """A path that is here, asked in a way that it does not take."""

    def __init__(self, path: str, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join("GET, HEAD" if name == "GET" else name for name in allowed)
        message = f"{path[:_SHOWN_CHARS]} does not take {method}. Allowed: {self.allowed}."
        super().__init__(ErrorKind.METHOD_NOT_ALLOWED, message, "method_not_allowed")


def check_media_type(request: HttpRequest) -> None:
    """
    Raises:
        ServiceError: the body says that it is something else than JSON, or packed. One that says nothing is taken for
            JSON.
    """
    coding = request.header(b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"", b"identity"):
        raise ServiceError(
            ErrorKind.UNSUPPORTED_MEDIA_TYPE,
            f"The body's content-encoding is {coding.decode('latin-1')[:64]!r}. Send it unpacked, without that field.",
            "unsupported_content_encoding",
            "content-encoding",
        )
    value = request.header(b"content-type")
    if value is None:
        return
    media_type = value.split(b";", 1)[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise ServiceError(
            ErrorKind.UNSUPPORTED_MEDIA_TYPE,
            f"The body is {media_type.decode('latin-1')[:64]!r}. Send JSON, with 'content-type: application/json'.",
            "unsupported_media_type",
        )


def _retry_headers(retry_after_s: float) -> Headers:
    """RFC 9110 §10.2.3 has whole seconds; the SDKs read milliseconds first."""
    return (
        (b"retry-after", b"%d" % math.ceil(retry_after_s)),
        (b"retry-after-ms", b"%d" % math.ceil(retry_after_s * 1e3)),
    )
