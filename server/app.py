"""From a request's head to its handler, and from an error to its answer. Thread: loop.

Every request passes here once: route, authentication, readiness, handler, access line.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import Usage
from server.answer import answer_headers, send_json
from server.api import models, tokenize
from server.api.chat import ChatSurface
from server.api.completions import CompletionsSurface
from server.api.envelope import error_body, status_of
from server.api.responses import ResponsesSurface
from server.api.surface import Surface
from server.auth import KeyAuthenticator
from server.lifecycle import Clock, Lifecycle, encode_prompt
from server.listener import Listener
from server.logs import log_access
from server.messages import Headers, HttpRequest, ResponseHead
from server.metrics import CONTENT_TYPE, Metrics
from server.stream import ClientDisconnected, HttpStream
from server.timing import Timings

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's word for it; in the log only
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")
REPLY_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # DELETE takes an answer's id as it was shown


@dataclass(slots=True)
class Exchange:
    """One request on its way through the app."""

    stream: HttpStream
    request_id: str
    timings: Timings
    argument: str = ""  # what the route's pattern left open, decoded
    usage: Usage | None = None

    @property
    def request(self) -> HttpRequest:
        return self.stream.request


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and what it asks of a request first. Deny by default: authentication, and a model that is loaded."""

    handler: Handler
    is_public: bool = False
    needs_model: bool = True


@dataclass(slots=True)
class Readiness:
    """What /ready says. `stage` is what the server is doing while it is not ready."""

    stage: str = "starting"
    is_ready: bool = False
    is_draining: bool = False

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
    """

    def __init__(
        self,
        readiness: Readiness,
        authenticator: KeyAuthenticator,
        metrics: Metrics,
        clock: Clock,
        new_request_id: Callable[[], str],
    ) -> None:
        self.readiness = readiness
        self.lifecycle: Lifecycle | None = None  # once the model is loaded
        self.listener: Listener | None = None  # for /metrics
        self._authenticator = authenticator
        self._metrics = metrics
        self._clock = clock
        self._new_request_id = new_request_id
        self._routes = self._make_routes()
        self._patterns = (
            ("/v1/models/", {"GET": Route(self._get_model)}),
            ("/v1/requests/", {"DELETE": Route(self._delete_request)}),
        )

    async def handle(self, stream: HttpStream) -> None:
        """The connection's handler: exactly one answer, whatever happens."""
        exchange = Exchange(stream, self._new_request_id(), Timings(head_s=self._clock.monotonic()))
        stream.common_headers = ((b"x-request-id", _shown_request_id(exchange)),)
        status = CLIENT_GONE
        try:
            await self._dispatch(exchange)
        except ServiceError as error:
            self._answer_error(exchange, error)
        except ClientDisconnected:
            pass
        finally:
            if stream.head_sent:
                status = stream.status
            self._metrics.responses[status] += 1
            log_access(exchange.request, exchange.request_id, status, exchange.timings, exchange.usage)

    async def _dispatch(self, exchange: Exchange) -> None:
        route = self._route(exchange)
        if not route.is_public:
            self._authenticator.check(exchange.request)
        if route.needs_model:
            self.readiness.check()
        await route.handler(exchange)

    def _route(self, exchange: Exchange) -> Route:
        request = exchange.request
        methods = self._routes.get(request.path)
        if methods is None:
            for prefix, candidates in self._patterns:
                if request.path.startswith(prefix) and len(request.path) > len(prefix):
                    methods = candidates
                    exchange.argument = unquote(request.path[len(prefix) :])
        if methods is None:
            known = ", ".join(sorted(self._routes))
            raise ServiceError(ErrorKind.NOT_FOUND, f"There is no {request.path} here. Known: {known}.", "not_found")
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join(methods)
            message = f"{request.path} does not take {request.method}. Allowed: {allowed}."
            error = ServiceError(ErrorKind.METHOD_NOT_ALLOWED, message, "method_not_allowed")
            error.headers = ((b"allow", allowed.encode()),)
            raise error
        return route

    def _make_routes(self) -> dict[str, dict[str, Route]]:
        return {
            "/v1/chat/completions": {"POST": Route(self._generating(ChatSurface()))},
            "/v1/completions": {"POST": Route(self._generating(CompletionsSurface()))},
            "/v1/responses": {"POST": Route(self._generating(ResponsesSurface()))},
            "/v1/models": {"GET": Route(self._list_models)},
            "/tokenize": {"POST": Route(self._tokenize)},
            "/detokenize": {"POST": Route(self._detokenize)},
            "/health": {"GET": Route(self._health, is_public=True, needs_model=False)},
            "/ready": {"GET": Route(self._ready, is_public=True, needs_model=False)},
            "/metrics": {"GET": Route(self._show_metrics, needs_model=False)},
        }

    def _generating(self, surface: Surface) -> Handler:
        async def generate(exchange: Exchange) -> None:
            check_media_type(exchange.request)
            exchange.usage = await self._served.generate(
                surface, exchange.stream, exchange.request_id, exchange.timings
            )

        return generate

    @property
    def _served(self) -> Lifecycle:
        assert self.lifecycle is not None, "readiness is checked before a handler that needs the model"
        return self.lifecycle

    async def _health(self, exchange: Exchange) -> None:
        send_json(exchange.stream, 200, b'{"status":"ok"}', answer_headers(exchange.timings))

    async def _ready(self, exchange: Exchange) -> None:
        self.readiness.check()
        send_json(exchange.stream, 200, b'{"status":"ready"}', answer_headers(exchange.timings))

    async def _show_metrics(self, exchange: Exchange) -> None:
        assert self.listener is not None
        stats = self._served.backend.stats if self.lifecycle is not None else None
        body = self._metrics.render(stats, self.listener.statistics())
        length = (b"content-length", b"%d" % len(body))
        exchange.stream.send_head(ResponseHead(200, ((b"content-type", CONTENT_TYPE), length)))
        exchange.stream.send(body)
        exchange.stream.end()

    async def _list_models(self, exchange: Exchange) -> None:
        send_json(exchange.stream, 200, models.list_body(self._served.model.card), answer_headers(exchange.timings))

    async def _get_model(self, exchange: Exchange) -> None:
        self._served.check_model(exchange.argument)
        body = models.model_body(self._served.model.card, exchange.argument)
        send_json(exchange.stream, 200, body, answer_headers(exchange.timings))

    async def _delete_request(self, exchange: Exchange) -> None:
        request_id = exchange.argument
        for prefix in REPLY_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        if not self._served.cancel(request_id):
            message = f"No request {exchange.argument!r} is in progress. It may have ended already."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
        send_json(exchange.stream, 200, b'{"status":"cancelled"}', answer_headers(exchange.timings))

    async def _tokenize(self, exchange: Exchange) -> None:
        ...

    async def _detokenize(self, exchange: Exchange) -> None:
        ...

    def _answer_error(self, exchange: Exchange, error: ServiceError) -> None:
        if exchange.stream.head_sent or not exchange.stream.is_open:
            return
        headers: Headers = answer_headers(exchange.timings)
        if error.retry_after_s is not None:
            headers += _retry_headers(error.retry_after_s)
        send_json(exchange.stream, status_of(error), error_body(error), headers)
