"""What all generations share: who answers for a model, the room for bodies and grammars, and who is in progress.

Thread: loop.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from core.constraints import GrammarSpec
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.grammar import Grammar, GrammarCache
from core.incident import MAX_COURSES, Course
from core.plan import RunnerLimits
from server.api.decoding import parse_object
from server.api.models import ServedModel
from server.api.ollama import LATEST
from server.clock import Clock
from server.engine_client import EngineClient
from server.gate.admission import Admission
from server.gate.tenants import Deadlines, Tenant
from server.grammar_guard import CompileQueue
from server.ledger.idempotency import Idempotency
from server.ledger.ledger import Ledger
from server.observing.metrics import Metrics
from server.observing.recorder import Recorder
from server.prompts import PromptReader, find_model, usable
from server.relay import Relay
from server.resumable import ResumableStreams
from server.wire.stream import HttpStream

logger = logging.getLogger(__name__)

OFFLOAD_BYTES = 8 * 1024  # a body from this size on is parsed and tokenized off the loop: 2.5 ms, measured
# Of fields that ask for an answer in a form, and of escaped letters. To check a schema of 1 KB may take 100 ms.
FORM_NAMES = tuple(b"schema structur guided tool function format regex grammar ebnf json \\u00".split())

T = TypeVar("T")


def weight_of(body: bytes) -> int:
    """Of a request's body, for `compute`: its bytes, or as many as are computed off the loop."""
    asks_form = len(body) < OFFLOAD_BYTES and any(name in body for name in FORM_NAMES)
    return OFFLOAD_BYTES if asks_form else len(body)


class _Named(msgspec.Struct):
    model: Any = None


_read_name = msgspec.json.Decoder(_Named).decode


def _name_in(body: bytes) -> Any:
    """The model that a body names. What is wrong elsewhere in it is told by who reads it whole."""
    try:
        return _read_name(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse_object(body).get("model")


class Offload(Protocol):
    """Runs long work off the loop. The awaiter gets what the work raises."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class GenerationView(NamedTuple):
    """Where a generation stands, for operators.

    Args:
        position: how many requests are ahead in the queue; None: it no longer waits.
        num_prefilled: of its first prompt; None: none yet.
        num_tokens: of all its choices, so far.
    """

    model: str
    position: int | None
    num_prompt_tokens: int
    num_prefilled: int | None
    num_tokens: int
    is_paused: bool


class Active(Protocol):
    """A Generation that has been prepared."""

    tenant: str

    @property
    def model(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def is_queued(self) -> bool: ...

    @property
    def is_background(self) -> bool: ...

    def view(self) -> GenerationView: ...

    def courses(self) -> list[Course]:
        """Of its requests, as far as they have come."""

    def fail(self, error: ServiceError) -> None: ...


class Backend(NamedTuple):
    """Who answers for a model: the engine of this process, or upstreams.

    Args:
        reader: reads bodies, and makes the engine's requests of them.
        engine: takes requests, and calls a DeltaSink with what comes of them.
        admission: of its requests.
    """

    reader: PromptReader | Relay
    engine: EngineClient | Relay
    admission: Admission


class OwnBackend(NamedTuple):
    """The engine of this process."""

    reader: PromptReader
    engine: EngineClient
    admission: Admission


@dataclass(slots=True)
class Generations:
    """What all generations share.

    Args:
        own: the engine of this process; None: upstreams answer for every model.
        deadlines: of requests whose tenants have none of their own.
        others: who answers for the other models, by the names that clients ask for.
        active: those that have been prepared, by our request id.
        limits: of the engine of this process.
        ended: the courses of its latest requests.
    """

    own: OwnBackend | None
    clock: Clock
    offload: Offload
    metrics: Metrics
    max_body_bytes: int
    deadlines: Deadlines
    idempotency: Idempotency
    ledger: Ledger | None = None
    others: Mapping[str, Backend] = field(default_factory=dict)
    grammars: GrammarCache = field(default_factory=GrammarCache)
    compiling: CompileQueue = field(default_factory=CompileQueue)
    active: dict[str, Active] = field(default_factory=dict)
    resumable: ResumableStreams = field(init=False)
    offload_compiling: Offload | None = None  # of grammars; None: as other work
    on_request: Callable[[], None] = lambda: None  # called when somebody begins to wait for an answer
    recorder: Recorder | None = None
    limits: RunnerLimits | None = None
    ended: deque[Course] = field(default_factory=lambda: deque(maxlen=MAX_COURSES))
    _refusal: ServiceError | None = None  # set by fail_all, for requests and bodies that come later

    def __post_init__(self) -> None:
        self.metrics.num_active = self.active.__len__
        self.resumable = ResumableStreams(self.clock.monotonic)

    @property
    def known_own(self) -> OwnBackend:
        """
        Raises:
            ServiceError: no model is served by this process.
        """
        if self.own is None:
            message = "This path needs a model in the server's own process (--model), and there is none."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "model_not_found")
        return self.own

    @property
    def reader(self) -> PromptReader:
        return self.known_own.reader

    @property
    def engine(self) -> EngineClient:
        return self.known_own.engine

    @property
    def admission(self) -> Admission:
        return self.known_own.admission

    def cards_for(self, tenant: Tenant) -> tuple[ServedModel, ...]:
        """The models that the tenant may use."""
        own = () if self.own is None else self.own.reader.cards_for(tenant)
        others = (card for name, one in self.others.items() for card in one.reader.cards if card.id == name)
        return (*own, *usable(others, tenant))

    @property
    def backends(self) -> list[Backend]:
        own = [] if self.own is None else [Backend(*self.own)]
        return [*own, *self.others.values()]

    def check_room(self, sharing_name: str, num_bytes: int) -> None:
        """Before the body is read, and with it the model's name.

        Raises:
            ServiceError: no model has room for such a request.
        """
        refusal = None
        for backend in self.backends:
            try:
                backend.admission.check(sharing_name, num_bytes)
                return
            except ServiceError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    async def backend_of(self, body: bytes, tenant: Tenant) -> Backend:
        """Who answers for the model that the body names.

        Raises:
            InvalidRequest: the body is no JSON object.
            ServiceError: see find_model.
        """
        if not self.others:
            return Backend(*self.known_own)
        name = await self.compute(lambda: _name_in(body), len(body))
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("model must be a string.", "model", "invalid_type")
        if name is not None and name not in self.others:
            name = name.removesuffix(LATEST)
        card = find_model(self.cards_for(tenant), name)
        return self.others.get(card.id) or Backend(*self.known_own)

    async def read_body(self, stream: HttpStream, sharing_name: str, most_bytes: float = math.inf) -> bytes:
        """
        Args:
            sharing_name: the caller's.
            most_bytes: a lower limit than that of all bodies.

        Raises:
            ServiceError: there is no room for it: before it is read, if its head says how long it is. Or see
                HttpStream.read_body.
            ClientDisconnected: the peer left.
        """
        declared = stream.request.header(b"content-length")
        self.check_room(sharing_name, 0 if declared is None else int(declared))
        return await stream.read_body(round(min(self.max_body_bytes, most_bytes)), sharing_name)

    async def compute(self, work: Callable[[], T], num_bytes: int) -> T:
        """Do work that takes longer the larger the body is: here, or off the loop if it would stall every stream.

        Args:
            num_bytes: see weight_of.
        """
        if num_bytes < OFFLOAD_BYTES:
            return work()
        return await self.offload(work)

    async def grammar_of(self, spec: GrammarSpec, tenant: str) -> Grammar:
        """Compiled off the loop, unless it was before.

        Raises:
            InvalidRequest: it cannot be held.
            ServiceError: too many of the tenant's grammars wait to be compiled.
        """

        async def compiled() -> Grammar:
            grammar = self.grammars.find(spec)  # another tenant's turn was earlier
            if grammar is None:
                offload = self.offload_compiling or self.offload
                grammar = await offload(lambda: self.reader.make_compiler().compile(spec))
                self.grammars.keep(spec, tenant, grammar)
            return grammar

        return self.grammars.find(spec) or await self.compiling.run(spec, tenant, compiled)

    def courses(self) -> list[Course]:
        """Of all requests of this process's engine that are kept, and in progress; of a repeated id, the last."""
        found = *self.ended, *(course for one in self.active.values() for course in one.courses())
        return list({one.request_id: one for one in found}.values())

    @property
    def is_busy(self) -> bool:
        """Somebody waits for an answer."""
        return not all(one.is_background for one in self.active.values())

    def check_open(self) -> None:
        """
        Raises:
            ServiceError: the process is ending, or the ledger takes no writes.
        """
        if self._refusal is not None:
            raise self._refusal
        if self.ledger is not None:
            self.ledger.check()

    def fail(self, request_id: str, error: ServiceError) -> None:
        """Break off a generation, if it is in progress."""
        if request_id in self.active:
            self.active[request_id].fail(error)

    def cancel(self, request_id: str, tenant: str | None) -> bool:
        """End a generation as its owner or an operator asks.

        Args:
            tenant: None: any.

        Returns: whether the tenant has one of that id whose answer is still open.
        """
        generation = self.active.get(request_id)
        if generation is None or tenant not in (None, generation.tenant) or not generation.is_open:
            return False
        generation.fail(ServiceError(ErrorKind.CANCELLED, "The request was cancelled by DELETE.", "request_cancelled"))
        return True

    def fail_all(self, error: ServiceError) -> None:
        """Break off every generation in progress, each with an error event or answer, and let none begin."""
        self._refusal = error
        for request_id, generation in list(self.active.items()):
            try:
                generation.fail(error)
            except Exception:  # go on with the others
                logger.exception("an answer cannot be broken off", extra={"request_id": request_id})
