"""One generation, from the request's head to the answer's last byte: the file to read first. Thread: loop.

    body → call, prompts → requests → engine → texts → bytes → end

`Generation.run` is the request's task. It waits three times: for the body, for long prompts to be tokenized on another
thread, and for the end. In between no task runs: the engine client calls the generation with each piece of text, which
goes through its output into the stream. What a generation does on an event depends only on its state: see TABLE.

With a ledger, nothing is written into the stream before the reservation is durable, and no answer is completed before
the settlement is. Without one, neither is waited for.

`Generations` is what all of them share: who answers for a model, room for bodies and grammars, and who is in progress.
"""

import asyncio
import enum
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import quote

import msgspec

from core.constraints import GrammarSpec
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.grammar import Grammar, GrammarCache
from core.incident import MAX_COURSES, Cause, Course, Stall
from core.plan import RunnerLimits
from core.types import TOP_CLASS, Cost, Delta, EngineMark, FinishReason, Prefilled, Prefilling, Usage
from server.api.decoding import parse_object
from server.api.models import ServedModel
from server.api.ollama import LATEST
from server.api.replies import EVENTS, WIRE_REASONS, ReplyContext, Surface, cut_short, status_of
from server.clock import RESOLUTION_S, Clock, DeadlineTimer
from server.engine_client import NOT_YET, EngineClient, RequestHandle, SequenceProgress
from server.gate.admission import Admission, Contender, Place
from server.gate.quota import NEVER, Allowance, Ticket
from server.gate.tenants import Deadlines, Tenant
from server.gate.text_rules import rule_book
from server.gate.turns import TenantTurns
from server.grammar_guard import CompileQueue
from server.ledger.idempotency import MAX_ANSWER_BYTES, Idempotency, Recording, replay
from server.ledger.ledger import End, Entry, EntryState, Ledger, unavailable
from server.ledger.responses import Turn
from server.ledger.store import LedgerRow
from server.observing.accounting import CLIENT_GONE, Outcome, client_request_id
from server.observing.metrics import Metrics
from server.observing.recorder import REPLAY_HEADER, RecordedRequest, Recorder, digest_of
from server.observing.timing import Stage, StageClock, StageMarks, answer_headers
from server.output import Output, output_of
from server.prompts import Prepared, PromptReader, find_model, own_name, usable
from server.relay import Relay, RelayHandle
from server.relayed import Passed
from server.resumable import ResumableStreams
from server.values import UNREADABLE
from server.wire.messages import TextWriter
from server.wire.sse import KEEP_ALIVE, comment
from server.wire.stream import HttpStream

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0  # of silence on a stream before a comment goes out
FALLBACK = b"steploop-fallback"
NEWS_EVERY_S = 0.1  # at most, of a place in the queue
OFFLOAD_BYTES = 8 * 1024  # a body from this size on is parsed and tokenized off the loop: 2.5 ms, measured
MAX_OFFLOADED = min(32, (os.cpu_count() or 1) + 4) - 2  # of the executor's threads: others wait for files
# Of fields that ask for an answer in a form, and of escaped letters. To check a schema of 1 KB may take 100 ms.
FORM_NAMES = tuple(b"schema structur guided tool function format regex grammar ebnf json \\u00".split())

T = TypeVar("T")
R = TypeVar("R", bound=PromptReader | Relay, covariant=True)
E = TypeVar("E", bound=EngineClient | Relay, covariant=True)


class State(enum.Enum):
    """A generation's state. From RESERVING to SETTLING its answer is open: it can still be ended early."""

    READING = enum.auto()  # its body comes
    PREPARING = enum.auto()  # its body becomes requests, perhaps on another thread
    RESERVING = enum.auto()  # the engine has the requests; output is withheld until the ledger has them, too
    QUEUED = enum.auto()  # the stream may be written, and no token has come
    STREAMING = enum.auto()  # tokens come
    SETTLING = enum.auto()  # the engine is done; the end of the answer waits until the ledger has it
    ENDING = enum.auto()  # broken off, or its client has left: the engine is not done yet
    DONE = enum.auto()  # nothing more is written

    __hash__ = object.__hash__  # an Enum's is Python code


class Event(enum.Enum):
    """What happens to a generation."""

    BODY_READ = enum.auto()
    PREPARED = enum.auto()
    RESERVED = enum.auto()  # durably, if there is a ledger
    FIRST_TOKEN = enum.auto()
    ENGINE_DONE = enum.auto()  # each of its requests has ended
    SETTLED = enum.auto()  # durably, if there is a ledger
    BROKEN_OFF = enum.auto()  # by an error: a deadline, a DELETE, an engine's fault, the end of the process
    CLIENT_GONE = enum.auto()
    CLOSED = enum.auto()  # its task ends, well or by an exception

    __hash__ = object.__hash__


Row = dict[Event, tuple[State, str | None]]  # the next state, and its action: a method of Generation

# While the engine has its requests and the answer is open
_GOES_ON: Row = {
    Event.ENGINE_DONE: (State.SETTLING, "_settle"),
    Event.BROKEN_OFF: (State.ENDING, "_break_off"),
    Event.CLIENT_GONE: (State.ENDING, "_lose_client"),
    Event.CLOSED: (State.ENDING, "_abandon"),
}
TABLE: dict[State, Row] = {  # an event that is not in its state's row is a bug
    State.READING: {
        Event.BODY_READ: (State.PREPARING, None),
        Event.CLOSED: (State.DONE, None),
    },
    State.PREPARING: {
        Event.PREPARED: (State.RESERVING, "_submit"),
        Event.CLOSED: (State.DONE, None),
    },
    State.RESERVING: {
        Event.RESERVED: (State.QUEUED, "_release"),
        Event.FIRST_TOKEN: (State.RESERVING, None),
        **_GOES_ON,
    },
    State.QUEUED: {
        Event.FIRST_TOKEN: (State.STREAMING, None),
        **_GOES_ON,
    },
    State.STREAMING: _GOES_ON,
    State.SETTLING: {
        Event.RESERVED: (State.SETTLING, "_release"),
        Event.SETTLED: (State.DONE, "_complete"),
        Event.BROKEN_OFF: (State.DONE, "_break_off"),
        Event.CLIENT_GONE: (State.DONE, "_lose_client"),
        Event.CLOSED: (State.DONE, "_abandon"),
    },
    State.ENDING: {
        Event.RESERVED: (State.ENDING, None),
        Event.ENGINE_DONE: (State.DONE, "_finish"),
        Event.BROKEN_OFF: (State.ENDING, None),
        Event.CLIENT_GONE: (State.ENDING, None),
        Event.CLOSED: (State.ENDING, "_abandon"),
    },
    State.DONE: {
        Event.RESERVED: (State.DONE, None),
        Event.SETTLED: (State.DONE, None),
        Event.BROKEN_OFF: (State.DONE, None),
        Event.CLIENT_GONE: (State.DONE, None),
        Event.CLOSED: (State.DONE, "_close_books"),
    },
}
OPEN = frozenset((State.STREAMING, State.RESERVING, State.QUEUED, State.SETTLING))


class Backend(NamedTuple, Generic[R, E]):
    """Who answers for a model: the engine of this process, or upstreams.

    Args:
        reader: reads bodies, and makes the engine's requests of them.
        engine: takes requests, and calls a DeltaSink with what comes of them.
        admission: of its requests.
    """

    reader: R
    engine: E
    admission: Admission


OwnBackend = Backend[PromptReader, EngineClient]
AnyBackend = Backend[PromptReader | Relay, EngineClient | Relay]


class Generation:
    """One call, over all its prompts and choices. Implements engine_client.DeltaSink, for the request of each prompt.

    Args:
        ticket: the caller and its quotas; the app enters and exits it.
        turn: its turn in a stored conversation; None: the server stores none.

    Attributes:
        tenant: the name of its tenant.
    """

    # Set once its model is known, and once it is prepared
    _backend: AnyBackend
    _output: Output
    _place: Place
    _deadlines: Deadlines
    _prepared: Prepared | Passed
    _context: ReplyContext

    def __init__(
        self,
        shared: "Generations",
        surface: Surface,
        stream: HttpStream,
        request_id: str,
        timings: StageClock,
        ticket: Ticket,
        turn: Turn | None = None,
    ) -> None:
        self.state = State.READING
        self._turn = turn
        self.tenant = ticket.caller.tenant.name
        self._shared = shared
        self._surface = surface
        self._stream = stream
        self._request_id = request_id
        self._timings = timings
        self._ticket = ticket
        self._loop = asyncio.get_running_loop()
        self._clock = shared.clock.monotonic
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._error: ServiceError | None = None  # that has broken it off
        self._is_refused = False  # by an upstream
        self._body: bytes | None = None  # for the record
        # With the engine
        self._work_before = (0, 0.0)  # the loop's work on tokens of all requests, when this one was submitted
        self._handles: list[RequestHandle | RelayHandle] = []
        self._courses: dict[str, Course] = {}  # of the requests of this process's engine, by their ids
        self._usages: list[Usage] = []  # of the handles that have ended
        self._reasons: list[FinishReason] = []  # of the choices that have ended
        self._withheld: list[tuple[int, str | Delta]] = []  # in RESERVING
        # With the quota and the ledger
        self._allowance: Allowance | None = None  # where there is a quota
        self._entry: Entry | None = None  # where there is a ledger
        self._is_unsettled = False  # its end could not be written
        # What is due when: see _dues
        self._timer = DeadlineTimer(self._loop, self._next_due, self._on_due)
        # By a slow reader, by an empty quota: since when, and the tokens that each handle had
        self._pauses: dict[Cause, tuple[float, list[int]]] = {}
        self._paused_since_s: float | None = None
        self._last_written_s = self._loop.time()  # when something other than text went out
        self._news_due_s = math.inf
        self._news = ""  # the last that was sent
        self._is_closed = False  # its task has ended
        self._num_prefilled: int | None = None  # tokens of the first prompt, once the engine computes it

    # Its task: from READING to RESERVING, and the end.

    @property
    def model(self) -> str:
        """The model, by the name in the request; known once the call is prepared."""
        return self._prepared.call.model

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_queued(self) -> bool:
        """No token exists yet that the client could have received."""
        return self.state in (State.RESERVING, State.QUEUED)

    @property
    def is_background(self) -> bool:
        return self._ticket.caller.is_background

    @property
    def is_paused(self) -> bool:
        return bool(self._pauses)

    def shown(self) -> dict[str, Any]:
        """Where it stands, for operators, once it is prepared.

        position: how many requests are ahead in the queue; None: it no longer waits.
        num_prefilled: of its first prompt; None: none yet.
        """
        return {
            "model": self.model,
            "position": self._place.position if self._timings.stage is Stage.QUEUE else None,
            "num_prompt_tokens": sum(one.request.num_prompt_tokens for one in self._handles),
            "num_prefilled": self._num_prefilled,
            "num_tokens": sum(one.num_tokens for one in self._handles),
        }

    async def run(self) -> Outcome:
        """Answer the request. Raises ServiceError: only before anything of the answer is sent."""
        try:
            return await self._run()
        finally:
            self._on(Event.CLOSED)

    async def _run(self) -> Outcome:
        shared, stream, tenant = self._shared, self._stream, self._ticket.caller.tenant
        sharing_name = self._ticket.caller.sharing_name
        shared.check_open()
        # With the best class and deadline that the body may ask for
        contender = Contender(self._ticket.caller.priority_of(TOP_CLASS), sharing_name, tenant.share, is_due=True)
        if not shared.others:
            shared.admission.check_in_time(contender, shared.deadlines.replaced_by(tenant.deadlines).ttft_s)
        self._timings.enter(Stage.BODY, self._clock())
        body = await shared.read_body(stream, sharing_name)
        self._on(Event.BODY_READ)
        claim = shared.idempotency.claim(tenant.name, stream.request, body)
        if claim is None:
            return await self._answer(body)
        if claim.stored is not None:
            self._backend = await shared.backend_of(body, tenant)
            await self._prepare(body)  # the call is checked by today's rules, too
            self._timings.enter(Stage.ANSWER, self._clock())
            replay(stream, claim.stored, answer_headers(self._timings))
            return Outcome(Usage(0, 0))  # usage of a replay
        recording = Recording(stream.carrier, MAX_ANSWER_BYTES)
        stream.move_to(recording)
        try:
            outcome = await self._answer(body)
            if outcome.error is None:
                claim.keep(recording, self._request_id)
            return outcome
        finally:
            claim.leave()

    async def _answer(self, body: bytes) -> Outcome:
        shared = self._shared
        self._backend = await shared.backend_of(body, self._ticket.caller.tenant)
        if self._turn is not None:
            body = await self._turn.begin(body, isinstance(self._backend.reader, PromptReader))
        # It can refuse, as other requests came while the body did
        self._place = self._backend.admission.enter(self._ticket.caller.sharing_name, len(body))
        try:
            self._prepared = await self._prepare(body)
            if shared.recorder is not None and shared.recorder.keeps_bodies:
                self._body = body
            self._timings.enter(Stage.QUOTA, self._clock())
            shared.check_open()  # again: the process may be ending now
            self._open_answer()
            shared.active[self._request_id] = self
            try:
                self._on(Event.PREPARED)
                await self._finished
                return self._outcome(total_usage(self._usages))
            finally:
                del shared.active[self._request_id]
        finally:
            self._place.leave(self._clock())

    async def _prepare(self, body: bytes) -> Prepared | Passed:
        reader, tenant = self._backend.reader, self._ticket.caller.tenant
        marks = StageMarks(self._clock)
        self._timings.enter(Stage.OFFLOAD, self._clock())
        try:
            prepared = await self._compute(lambda: reader.prepare(self._surface, body, tenant, marks), body)
        finally:
            self._timings.take_over(marks)
        if not isinstance(prepared, Prepared):
            return prepared
        constraint = prepared.call.constraint
        grammar = None
        if constraint is not None:
            self._timings.enter(Stage.GRAMMAR, self._clock())
            grammar = await self._shared.grammar_of(constraint, tenant.name)
        return await self._compute(lambda: self._shared.reader.held(prepared, grammar), body)

    async def _compute(self, work: Callable[[], T], body: bytes) -> T:
        """See Generations.compute. Raises OwnDeadlineExceeded: other requests of the tenant, or all, took too long."""
        tenant = self._ticket.caller.tenant
        deadlines = self._shared.deadlines.replaced_by(tenant.deadlines)
        due = min(("ttft_s", "total_s"), key=lambda name: getattr(deadlines, name))
        due_s = self._timings.arrived_s + getattr(deadlines, due)
        try:
            return await self._shared.compute(work, weight_of(body), tenant.name, due_s if due_s < math.inf else None)
        except TimeoutError:
            raise deadlines.exceeded(due) from None

    def _open_answer(self) -> None:
        shared, call, stream = self._shared, self._prepared.call, self._stream
        shared.metrics.count_unknown_fields(call.unknown_fields)
        tenants = shared.deadlines.replaced_by(self._ticket.caller.tenant.deadlines)
        self._deadlines = tenants.narrowed_by(call.deadlines)
        if call.is_resumable:
            if not call.is_stream or self._surface.media_type != EVENTS:
                raise InvalidRequest(
                    "resumable applies to event streams: send stream: true, or leave it out.", "resumable"
                )
            if stream.is_open:
                shared.resumable.hold(stream, self.tenant, self._request_id, self._surface.elsewhere)
        reader, prepared = self._backend.reader, cast(Any, self._prepared)  # by the same reader
        self._context = context = reader.reply_context(prepared, self._request_id)
        self._output = output_of(call)(reader.surface_of(self._surface), call, context, stream, self._timings)
        stream.on_disconnect = partial(self._on, Event.CLIENT_GONE)
        stream.on_blocked, stream.on_unblocked = self.on_blocked, self.on_unblocked
        self._place.end = self.fail

    @cached_property
    def _own_model(self) -> str:
        return own_name(self._backend.reader.cards, self._prepared.call.model)

    def _outcome(self, usage: Usage) -> Outcome:
        is_refused = self._entry is not None and self._entry.state is EntryState.UNRESERVED
        is_billed = not (is_refused or self._is_unsettled)
        if is_billed:
            self._shared.metrics.count_finished(self._reasons, self._own_model)
        reasons, model = tuple(dict.fromkeys(self._reasons)), self._prepared.call.model
        return Outcome(usage, reasons, model, self._error, is_refused, is_billed)

    # The table, and its actions.

    def _on(self, event: Event, *arguments: Any) -> None:
        """Raises LookupError: the state has no such event in TABLE: a bug."""
        row = TABLE[self.state]
        if event not in row:
            raise LookupError(f"{event} in {self.state}")
        was_over = self._is_closed and self.state is State.DONE
        self.state, action = row[event]
        self._is_closed |= event is Event.CLOSED
        try:
            if action is not None:
                getattr(self, action)(*arguments)
        finally:
            if self._is_closed and self.state is State.DONE and not was_over:
                self._let_go()

    def _let_go(self) -> None:
        """Drop references back to this generation, so that its memory is freed without the garbage collector.

        The collector runs rarely, and answers with a thousand logprobs take megabytes.
        """
        self._timer.close()
        for handle in self._handles:  # they have ended
            del handle.sink
        self._stream.on_disconnect = self._stream.on_blocked = self._stream.on_unblocked = None

    def _submit(self) -> None:
        """Reserve quota, and submit a request for each prompt to the engine; choices are numbered over all prompts.

        Raises:
            ServiceError: the caller has too little quota left, or admission, ledger or engine refuse. CLOSED then
                cancels the requests that the engine has.
        """
        shared, ticket, call, timings = self._shared, self._ticket, self._prepared.call, self._timings
        reader, engine, _ = self._backend
        prepared = cast(Any, self._prepared)  # by the same reader
        requests: Sequence[Any] = reader.requests_of(prepared, self._request_id, timings.arrived_s, ticket.caller)
        self._place.admit(requests, timings.arrived_s + self._deadlines.ttft_s, self._clock())
        ticket.reserve(requests, self._own_model)
        if ticket.is_bounded:
            self._allowance = Allowance(self, ticket, requests, self._loop)
        if not self.is_background:
            shared.on_request()
        self._work_before = engine.work.num_tokens, engine.work.busy_s
        timings.enter(Stage.QUEUE, self._clock())
        if shared.ledger is not None:
            row, is_again = self._ledger_row(self._own_model), ticket.caller.is_background
            entry = shared.ledger.open(row, ticket.cost, is_again)
            entry.reserve(ticket.num_reserved, self._progress, partial(self._on_durable, Event.RESERVED))
            self._entry = entry
        if call.is_stream and call.tells_queue:
            self._news_due_s = self._loop.time() + NEWS_EVERY_S  # a shorter wait is not reported
        forbidden = rule_book(ticket.caller.tenant.text_rules).on_answer
        table, continues_text = prepared.table, prepared.continues_text
        follow = partial(reader.follow_thought, call)
        for i, request in enumerate(requests):
            handle = engine.submit(request, self, table, continues_text, i * call.num_computed, forbidden, follow)
            self._handles.append(handle)
            if isinstance(handle, RequestHandle):
                self._courses[handle.request.request_id] = Course.of(self._request_id, handle.request, self._clock())
        if self._entry is None:
            self._on(Event.RESERVED)  # arms the timer, too
        else:
            self._timer.arm()

    def _release(self) -> None:
        """Write the output that was withheld."""
        self._last_written_s = self._clock()
        withheld, self._withheld = self._withheld, []
        for choice, output in withheld:
            self._write(choice, output)
        if self.state is State.QUEUED and self._timings.first_token_s is not None:
            self._on(Event.FIRST_TOKEN)
        self._timer.arm()

    def _settle(self) -> None:
        if self._entry is not None and (turn := self._turn) is not None:
            self._entry.compose = lambda: turn.end(self._last)
        self._settle_ledger()
        if self._entry is None:
            self._on(Event.SETTLED)

    @cached_property
    def _last(self) -> bytes:
        """Write the end of the answer, once all its text is written."""
        extras = {} if self._allowance is None else self._allowance.extras
        if self._prepared.call.tokens.tells_sampled:
            told = {"prompt_digest": digest_of(self._prepared.prompts), "token_ids": self._token_ids}
            extras = extras | {"timings": told}
        last = self._output.compose(total_usage(self._usages), extras)
        return last if self._turn is None else self._turn.shown(last)

    def _complete(self) -> None:
        """End the answer: all its text is written, and it is settled."""
        self._timings.enter(Stage.LAST_FLUSH, self._clock())
        self._output.complete(total_usage(self._usages), self._last)
        self._stream.call_once_written(self._timings.finish)
        self._end_task()

    def _break_off(self, error: ServiceError) -> None:
        """End the answer with an error: an event if its head is out, otherwise an error answer."""
        self._error = error
        try:
            self._output.break_off(error)
        except Exception as fault:  # the error cannot be written: close the connection
            self._end_task(fault)
        is_late = error.kind is ErrorKind.DEADLINE_EXCEEDED
        self._cancel(FinishReason.DEADLINE if is_late else FinishReason.CANCELLED)

    def _lose_client(self) -> None:
        self._shared.metrics.num_disconnects += 1
        self._cancel(FinishReason.CANCELLED)

    def _abandon(self) -> None:
        """Its task has ended."""
        self._cancel(FinishReason.CANCELLED)
        if self.state is State.ENDING and self._has_ended:  # no on_end will come
            self._on(Event.ENGINE_DONE)

    def _cancel(self, reason: FinishReason) -> None:
        for handle in self._handles:
            handle.cancel(reason)
        self._timer.cancel()
        if self._allowance is not None:
            self._allowance.close()
        if self._entry is not None:
            self._entry.compose = None
        if self.state is State.DONE:  # it waited for the ledger alone: correct the row that is being written
            if self._entry is not None and self._entry.end is not None:
                self._entry.retell(self._end())
            self._finish()

    def _finish(self) -> None:
        """End the task of an answer that was not completed."""
        try:
            self._close_books()
        finally:
            self._end_task()

    def _close_books(self) -> None:
        """Settle quota and ledger, however it ended. Idempotent."""
        try:
            self._settle_quota()
        finally:
            self._settle_ledger()

    def _end_task(self, fault: Exception | None = None) -> None:
        """Wake run(), unless it has been cancelled."""
        self._timer.cancel()
        if self._finished.done():
            return
        if fault is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(fault)

    def _end_by_fault(self, fault: Exception) -> None:
        """End only this generation, on an unexpected exception of an API surface, the quota or the ledger."""
        if self._finished.done():
            logger.error("an answer has failed after its task ended", exc_info=fault)
        self._end_task(fault)
        self._on(Event.CLOSED)

    # Output of the engine: engine_client.DeltaSink.

    def on_begin(self, choice: int, now_s: float) -> None:
        timings = self._timings
        if timings.first_token_s is None:
            opens_stream = self._output.is_streamed and not self._stream.head_sent  # a keep-alive may have opened it
            stage = Stage.FIRST_FLUSH if opens_stream else Stage.DECODE
            timings.begin_decode(stage, now_s, self._prepared.tells_tokens)
            self._shared.metrics.count_first_token(timings.ttft_s or 0.0, self._own_model)
            self._on(Event.FIRST_TOKEN)
        self._place.on_first_token(choice, now_s)
        if self._place.num_decoding == 1 and self._deadlines.inter_token_s < math.inf:
            self._timer.arm()  # the other dues are no earlier now

    def on_text(self, choice: int, text: str) -> None:
        self._write(choice, text)

    def text_writer(self, choice: int) -> TextWriter | None:
        return self._output.text_writer(choice) if self.state is State.STREAMING else None

    def on_delta(self, choice: int, delta: Delta, now_s: float) -> None:
        reason = delta.finish_reason
        if reason is not None:
            self._reasons.append(reason)
            if self._sequence(choice).last_s != NOT_YET:
                self._place.on_choice_end()
            if self._allowance is not None:
                self._allowance.drop(choice)
        # An end for a reason that the wire does not know becomes an error at the end of the request
        if delta.text or delta.logprobs or delta.prompt_logprobs or reason in WIRE_REASONS:
            self._last_written_s = now_s
            self._write(choice, delta)

    def on_answer(self, choice: int, ids: Sequence[int], cut_text: str) -> None:
        if isinstance(self._prepared, Prepared) and self._prepared.remember is not None:
            self._prepared.remember(ids, cut_text)

    def on_mark(self, choice: int, num_tokens: int) -> int:
        return NEVER if self._allowance is None else self._allowance.on_mark(choice, num_tokens)

    def on_engine_mark(self, mark: EngineMark) -> None:
        if isinstance(mark, Prefilling):
            self._num_prefilled = mark.num_tokens
        else:
            if isinstance(mark, Prefilled) and mark.request_id in self._courses:
                self._courses[mark.request_id].num_cached_tokens = mark.num_cached_tokens
            self._timings.on_engine_mark(mark)

    def on_upstream(self, shown: str, fallback: str | None) -> None:
        self._timings.upstream = shown
        if fallback is not None:
            others = (field for field in self._stream.common_headers if field[0] != FALLBACK)
            self._stream.common_headers = (*others, (FALLBACK, quote(fallback).encode()))

    def on_stage(self, before: Stage, stage: Stage, now_s: float) -> None:
        self._timings.go_on(before, stage, now_s)

    def on_end(self, usage: Usage, error: str | None) -> None:
        self._usages.append(usage)
        is_last = self._has_ended
        try:
            if is_last:
                self._end_decode()
                self._settle_quota()
            if error is not None:
                self.fail(ServiceError(ErrorKind.ENGINE, error, "engine_error"))
            if is_last:
                self._shared.metrics.count_generation(total_usage(self._usages), self._timings, self._own_model)
                self._record()
                self._shared.ended.extend(self.courses(ended_s=self._clock()))
                broken = [reason for reason in self._reasons if reason not in WIRE_REASONS]
                if broken:
                    self.fail(cut_short(broken[0]))
                if FinishReason.TOO_COMPLEX in broken and (held := self._prepared.call.constraint) is not None:
                    self._shared.grammars.drop(held)
                self._on(Event.ENGINE_DONE)
        except Exception as fault:
            self._end_by_fault(fault)

    @property
    def _token_ids(self) -> list[list[int]]:
        """Times of each sequence, once all have ended; none for upstreams."""
        return [ids for handle in self._handles if isinstance(handle, RequestHandle) for ids in handle.token_ids]

    def courses(self, ended_s: float = math.inf) -> list[Course]:
        """Copies of its requests' timings so far, including pauses that still last."""
        for cause in self._pauses if ended_s < math.inf else ():
            self._note_stall(cause, ended_s)
        first_s, pairs = self._timings.first_token_s, zip(self._courses.values(), self._handles, strict=False)
        return [
            replace(
                one,
                num_tokens=num_tokens,
                first_token_s=first_s,
                ended_s=ended_s,
                step_tokens=num_tokens / max(1, num_tokens - handle.cost.num_spared_steps) if num_tokens else 1.0,
                stalls=one.stalls[:],
            )
            for one, handle in pairs
            for num_tokens in (handle.num_tokens,)
        ]

    def _note_stall(self, cause: Cause, now_s: float) -> None:
        since_s, nums_tokens = self._pauses[cause]
        for course, num_tokens in zip(self._courses.values(), nums_tokens, strict=False):
            course.stalls.append(Stall(cause, num_tokens, now_s - since_s))

    def _record(self) -> None:
        """Pass the generation to the recorder, once the engine is done with it, however it ended."""
        recorder, prepared = self._shared.recorder, self._prepared
        if recorder is None or not isinstance(prepared, Prepared) or prepared.call.pooling is not None:
            return
        ended = ",".join(sorted(set(self._reasons)))
        if self.state is State.ENDING:
            ended = "client_gone" if self._error is None else self._error.code or self._error.kind.name.lower()
        ids, keeps_bodies = self._token_ids, self._body is not None
        recorder.put(
            RecordedRequest(
                request_id=self._request_id,
                at=datetime.fromtimestamp(self._shared.clock.unix(), UTC).isoformat(timespec="milliseconds"),
                tenant=self.tenant,
                path=self._stream.request.path,
                model=prepared.call.model,
                seed=prepared.call.sampling.seed,
                ended=ended,
                num_prompt_tokens=sum(map(len, prepared.prompts)),
                num_tokens=list(map(len, ids)),
                body=None if self._body is None else self._body.decode(errors="replace"),
                prompt_digest=digest_of(prepared.prompts) if keeps_bodies else None,
                token_ids=ids if keeps_bodies else None,
                is_replay=self._stream.request.header(REPLAY_HEADER.encode()) is not None,
                **self._context.identity,
            )
        )

    def _write(self, choice: int, output: str | Delta) -> None:
        if self.state is State.RESERVING:
            self._withheld.append((choice, output))
        elif self.state not in OPEN:
            return
        elif isinstance(output, str):
            self._output.add_text(choice, output)
        else:
            self._output.add(choice, output)

    def _end_decode(self) -> None:
        timings, num_tokens = self._timings, sum(usage.num_completion_tokens for usage in self._usages)
        timings.end_s = self._clock()
        timings.enter(Stage.SETTLE, timings.end_s)
        timings.detokenize_s = self._backend.engine.work.cost_s(self._work_before, num_tokens)

    @property
    def _has_ended(self) -> bool:
        """All its requests have ended."""
        return len(self._usages) == len(self._handles)

    @property
    def _is_withheld(self) -> bool:
        """The ledger does not have the reservation yet."""
        return self._entry is not None and self._entry.state is EntryState.RESERVING

    def _sequence(self, choice: int) -> SequenceProgress:
        handle, i = divmod(choice, self._prepared.call.num_computed)
        return self._handles[handle].sequences[i]

    # Who ends it, or holds it.

    def fail(self, error: ServiceError, is_refusal: bool = False) -> None:
        """End the answer early, if it is open."""
        self._is_refused |= is_refusal
        self._on(Event.BROKEN_OFF, self._ticket.caller.told(error))

    def on_blocked(self) -> None:
        """The client reads slowly: its stream's buffers are full."""
        self._place.set_paused(True)
        self.pause(Cause.SLOW_READER)

    def on_unblocked(self) -> None:
        self._place.set_paused(False)
        self.resume(Cause.SLOW_READER)

    def pause(self, cause: Cause = Cause.QUOTA_PAUSES) -> None:
        """Pause its sequences until each pause() has had a resume(). Inter-token deadlines do not count the pause."""
        self._pauses[cause] = self._clock(), [handle.num_tokens for handle in self._handles]
        if len(self._pauses) == 1:
            self._paused_since_s = self._clock()
            for handle in self._handles:
                handle.pause()

    def resume(self, cause: Cause = Cause.QUOTA_PAUSES) -> None:
        self._note_stall(cause, self._clock())
        del self._pauses[cause]
        if not self._pauses:
            self._discount_pause()
            for handle in self._handles:
                handle.resume()

    def end_early(self) -> None:
        """End its unfinished choices, as if at their max_tokens."""
        now_s = self._clock()
        for handle in self._handles:
            handle.finish(FinishReason.LENGTH, now_s)

    # What is due when: deadlines, keep-alives, news of the queue. One timer, and no work per token.

    def _dues(self) -> Iterator[tuple[float, str]]:
        """The next timers, each with its time on the loop's clock: a field of Deadlines, or a stream comment."""
        if self.state not in OPEN:
            return
        head_s, limits = self._timings.arrived_s, self._deadlines
        is_silent = self._is_withheld or self._timings.first_token_s is None
        yield head_s + limits.total_s, "total_s"
        if is_silent and not self._prepared.tells_tokens:
            pass
        elif is_silent:  # for its client, withheld output is no first token
            yield head_s + limits.ttft_s, "ttft_s"
        elif self._paused_since_s is None:
            # A choice that waits for a slot which its siblings have is no stall
            waits_since_s = max((one.waits_since_s for one in self._decoding()), default=math.inf)
            yield waits_since_s + limits.inter_token_s, "inter_token_s"
        if self._output.is_streamed and not self._is_withheld:
            yield max([self._last_written_s, *(one.last_s for one in self._sequences())]) + KEEP_ALIVE_S, "keep_alive"
            if is_silent:
                yield self._news_due_s, "news"

    def _next_due(self) -> float | None:
        due_s = min((due_s for due_s, _ in self._dues()), default=math.inf)
        return due_s if due_s < math.inf else None

    def _on_due(self) -> None:
        now_s = self._loop.time()
        due_s, name = min(self._dues())
        if due_s > now_s + RESOLUTION_S:
            return
        if name == "keep_alive":
            self._comment(KEEP_ALIVE)
        elif name == "news":
            self._send_news(now_s)
        else:
            # A slow reader, or a caller that has emptied its quota, is late by its own fault
            self.fail(self._deadlines.exceeded(name, is_callers_fault=self._paused_since_s is not None))

    def _sequences(self) -> Iterator[SequenceProgress]:
        return (sequence for handle in self._handles for sequence in handle.sequences)

    def _decoding(self) -> Iterator[SequenceProgress]:
        """The choices that have started and not ended."""
        return (one for one in self._sequences() if one.last_s != NOT_YET and not one.is_finished)

    def _discount_pause(self) -> None:
        """Do not count a pause as time between tokens."""
        paused_since_s, self._paused_since_s = self._paused_since_s, None
        assert paused_since_s is not None, "resume() comes after pause()"
        now_s = self._clock()
        for sequence in self._decoding():
            sequence.discounted_s = now_s - max(0.0, paused_since_s - sequence.waits_since_s)
        self._timer.arm()

    def _comment(self, line: bytes) -> None:
        self._last_written_s = self._loop.time()
        self._output.comment(line)

    def _send_news(self, now_s: float) -> None:
        """Send its position in the queue, or the progress of its prompt, if that has changed.

        : queue {"position":3,"expected_ms":1200}
        : queue {"position":0,"expected_ms":900,"loading":"loading weights"}
        : prefill {"tokens":512,"of":2048}
        """
        self._news_due_s = now_s + NEWS_EVERY_S
        view = self._place.view()
        if self._num_prefilled is not None:
            num_tokens = len(self._prepared.prompts[0])
            news = f"prefill {_json({'tokens': self._num_prefilled, 'of': num_tokens})}"
        elif view is not None:
            expected_ms = None if view.expected_s is None else round(view.expected_s * 1e3)
            told = {"position": view.position, "expected_ms": expected_ms}
            news = f"queue {_json(told if view.loading is None else told | {'loading': view.loading})}"
        else:
            return
        if news != self._news:
            self._news = news
            self._comment(comment(news))

    # The quota and the ledger.

    def _ledger_row(self, model: str) -> LedgerRow:
        request, caller = self._stream.request, self._ticket.caller
        client_id = client_request_id(request)
        row = LedgerRow(self._request_id, client_id, self.tenant, caller.key_id, model, request.path)
        context = self._prepared.context if isinstance(self._prepared, Prepared) else None
        return row if context is None else msgspec.structs.replace(row, context=_json(context))

    def _progress(self) -> Usage:
        """The usage so far; a prompt counts as computed once its completion has started."""
        num_prompt_tokens = sum(one.request.num_prompt_tokens for one in self._handles if one.num_tokens)
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=sum(handle.num_tokens for handle in self._handles),
            num_cached_tokens=min(num_prompt_tokens, self._timings.num_cached_tokens),
            num_thought_tokens=sum(handle.num_thought_tokens for handle in self._handles),
        )

    def _on_durable(self, event: Event, is_durable: bool) -> None:
        """The ledger has written the reservation (RESERVED) or the settlement (SETTLED), or failed to."""
        self._is_unsettled = event is Event.SETTLED and not is_durable
        try:
            self._settle_quota()
            if is_durable:
                self._on(event)
            else:
                self.fail(unavailable())
        except Exception as fault:
            self._end_by_fault(fault)

    def _settle_quota(self) -> None:
        """Settle the quota, once the engine is done and the ledger has the reservation. Idempotent."""
        if self._has_ended and not self._is_withheld:
            is_refused = self._entry is not None and self._entry.state is EntryState.UNRESERVED
            self._ticket.settle(Usage(0, 0) if is_refused else total_usage(self._usages))

    def _settle_ledger(self) -> None:
        """Write its end to the ledger. Idempotent."""
        if self._entry is not None and self._entry.end is None:
            self._entry.settle(self._end(), partial(self._on_durable, Event.SETTLED))

    def _end(self) -> End:
        error, reason = self._error, ",".join(dict.fromkeys(self._reasons)) or None
        cost = Cost(
            device_s=sum(handle.cost.device_s for handle in self._handles),
            kv_block_s=sum(handle.cost.kv_block_s for handle in self._handles),
        )
        untroubled = 200 if self.state is State.SETTLING else CLIENT_GONE
        status = untroubled if error is None else status_of(error)
        if status == CLIENT_GONE:
            reason = FinishReason.CANCELLED
        code = None if error is None else error.code
        return End(total_usage(self._usages), cost, reason, status, code, self._timings.stages_ms(), self._is_refused)


def total_usage(usages: list[Usage]) -> Usage:
    if len(usages) == 1:
        return usages[0]
    return Usage(*map(sum, zip(*map(msgspec.structs.astuple, [Usage(0, 0), *usages]), strict=True)))


def _json(value: Mapping[str, int | str | None]) -> str:
    return msgspec.json.encode(value).decode()


# What all generations share.


class Offload(Protocol):
    """Runs long work off the loop. The awaiter gets what the work raises."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


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
    except UNREADABLE:
        return parse_object(body).get("model")


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
    others: Mapping[str, AnyBackend] = field(default_factory=dict)
    grammars: GrammarCache = field(default_factory=GrammarCache)
    compiling: CompileQueue = field(default_factory=CompileQueue)
    turns: TenantTurns = field(default_factory=lambda: TenantTurns(MAX_OFFLOADED, MAX_OFFLOADED // 2))
    active: dict[str, Generation] = field(default_factory=dict)
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
        """Raises ServiceError: no model is served by this process."""
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
    def backends(self) -> list[AnyBackend]:
        return [*([] if self.own is None else [self.own]), *self.others.values()]

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

    async def backend_of(self, body: bytes, tenant: Tenant) -> AnyBackend:
        """Who answers for the model that the body names.

        Raises:
            InvalidRequest: the body is no JSON object.
            ServiceError: see find_model.
        """
        if not self.others:
            return self.known_own
        name = await self.compute(lambda: _name_in(body), len(body), tenant.name)
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("model must be a string.", "model", "invalid_type")
        if name is not None and name not in self.others:
            name = name.removesuffix(LATEST)
        card = find_model(self.cards_for(tenant), name)
        return self.others.get(card.id) or self.known_own

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

    async def compute(self, work: Callable[[], T], num_bytes: int, tenant: str, due_s: float | None = None) -> T:
        """Do work that takes longer the larger the body is: here, or off the loop if it would stall every stream.

        Args:
            num_bytes: see weight_of.
            tenant: whose work it is: tenants take turns.
            due_s: when it must have begun, on the loop's clock.

        Raises:
            TimeoutError: it had not.
        """
        if num_bytes < OFFLOAD_BYTES:
            return work()
        await self.turns.begin(tenant, due_s)
        done = asyncio.ensure_future(self.offload(work))

        def end(_: object) -> None:
            self.turns.end(tenant)
            if not done.cancelled():
                done.exception()  # marks it as retrieved, if whoever waited has left

        done.add_done_callback(end)
        return await asyncio.shield(done)  # a thread that has begun goes on when the client leaves: so does the turn

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
        """Raises ServiceError: the process is ending, or the ledger takes no writes."""
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
