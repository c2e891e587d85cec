"""What a handler is given: one request with what is known of it, and the server's shared state. Thread: loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex

from core.errors import ErrorKind, ServiceError
from server.api.models import ServedModel, ServerCard
from server.clock import Clock
from server.engine_client import EngineClient
from server.gate.identity import Caller
from server.gate.quota import Ticket
from server.generation import Generations
from server.listening.listener import Listener
from server.observing.accounting import Account, Accounting, TraceContext
from server.observing.logs import current_trace_id
from server.observing.metrics import Metrics
from server.observing.timing import Stage, answer_headers
from server.wire.messages import Headers
from server.wire.stream import JSON_TYPE, HttpStream


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


@dataclass(slots=True)
class AppState:
    """What requests ask of the server. Its start brings the last four, one by one.

    Args:
        new_span_id: of 16 hex digits, of our spans in clients' traces.
        exchanges: in progress.
        generations: once the model is loaded.
        card: likewise.
        drain: ends the process as SIGTERM does; returns the seconds of grace.
    """

    readiness: Readiness
    metrics: Metrics
    clock: Clock
    new_span_id: Callable[[], str]
    accounting: Accounting = field(init=False)
    exchanges: dict[HttpStream, "Exchange"] = field(default_factory=dict)
    generations: Generations | None = None
    card: ServerCard | None = None
    listener: Listener | None = None
    drain: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self.accounting = Accounting(self.metrics, self.clock)

    @property
    def served(self) -> Generations:
        assert self.generations is not None, "readiness is checked before a handler that needs the model"
        return self.generations

    @property
    def loaded_engine(self) -> EngineClient:
        """For operators, who may ask while the server drains.

        Raises:
            ServiceError: the model is still loading.
        """
        if self.generations is None:
            self.readiness.check()
        return self.served.engine

    @property
    def known_listener(self) -> Listener:
        assert self.listener is not None, "nothing is asked before it listens"
        return self.listener

    def generating(self) -> list["Exchange"]:
        """The generations in progress."""
        active = {} if self.generations is None else self.generations.active
        return [one for one in self.exchanges.values() if one.request_id in active]


@dataclass(slots=True, kw_only=True)
class Exchange(Account):
    """A request, what is known of it so far, and its answer.

    Args:
        argument: what the route's pattern left open, decoded.
    """

    stream: HttpStream
    server: AppState
    ticket: Ticket | None = None
    argument: str = ""

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

    @property
    def cards(self) -> tuple[ServedModel, ...]:
        """The models that the caller may use."""
        return self.server.served.reader.cards_for(self.known_caller.tenant)

    def enter(self, stage: Stage) -> None:
        self.timings.enter(stage, self.server.clock.monotonic())

    def send(self, body: bytes, status: int = 200, headers: Headers = (), media_type: bytes = JSON_TYPE) -> None:
        """Answer with a document that no generation is told in."""
        self.enter(Stage.LAST_FLUSH)
        self.stream.send_document(status, body, (*answer_headers(self.timings), *headers), media_type)
        self.stream.call_once_written(self.timings.finish)

    def begin_trace(self) -> None:
        """A generation belongs to one, where somebody collects them."""
        if self.trace is None and self.server.accounting.export is not None:
            self.trace = TraceContext(token_hex(16), self.server.new_span_id(), None, is_sampled=True)
            current_trace_id.set(self.trace.trace_id)
