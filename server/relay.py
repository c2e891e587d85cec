"""A model that upstreams answer for: what is asked of them, and of which. Thread: loop.

    body ─▶ Relay.prepare ─▶ Relay.submit: RelayHandle ─ a slot, a connection ─▶ upstream
    client ◀─ its output ◀─ RelayHandle ◀─ server/relayed.py: an answer's parts ◀─┘

The gate's work and the ledger are the generation's (server/generation.py). Of a body only `model`, `stream`,
`stream_options` and `priority` are rewritten, and `cache_salt` for upstreams of our own.

Tokens are those of the upstream's usage. Until it comes, a prompt counts by the model's tokenizer if it is here, as a
third of its bytes otherwise, and an event with text as a token: that is what is billed of an answer that is broken off.
Of a document it is a third of the bytes. It is never more than the request and the model's context allow, and nothing
of what is no answer. Where the upstreams are not our own, that bounds what they tell, too.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import Cost, FinishReason, SamplingParams, Usage
from server.api import ollama
from server.api.decoding import convert, parse_object
from server.api.fields import GenerationCall, RequestLimits, TokenWishes
from server.api.models import ServedModel, adapter_card
from server.api.replies import ReplyContext, Surface
from server.backend import CountTokens
from server.clock import Clock, DeadlineTimer
from server.engine_client import NOT_YET, DeltaSink, LoopWork, SequenceProgress
from server.gate.admission import Admission
from server.gate.identity import Caller
from server.gate.quota import NEVER
from server.gate.tenants import ANY_TIME, Deadlines, Tenant
from server.observing.accounting import HOPS, current_hops, current_trace
from server.observing.timing import Stage, StageMarks
from server.relayed import (
    LOOP,
    MANY_TOKENS,
    PASSAGES,
    Asked,
    Bounds,
    Part,
    Passage,
    RelayedDelta,
    Salts,
    UpstreamAnswer,
    address_to,
    checked_prompt,
    keep_alive_asked,
    loop_error,
    passed,
    refusal_of,
    salts_of,
)
from server.upstream.connection import Connection
from server.upstream.exchange import AnswerHead, ConnectionLost, Exchange, Outgoing, UpstreamFault
from server.upstream.pool import LeadingBlocks, Pool, Upstream, leading_blocks, leading_token_blocks
from server.wire import sse

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
TELL_S, TELL_AFTER_S = 1.0, 0.01  # what a cancelled request has used, by its upstream: it is asked ever more seldom
LINGER_S = 0.5  # after the last event, for the answer's end, whatever else comes
MOST_EVENTS_A_TOKEN, MORE_EVENTS = 16, 1024  # some servers send letters; and pings, starts and ends
LEAST_PIECE_BYTES = 16  # of an answer, beyond MORE_EVENTS of them
EMPTY_A_SECOND = 16  # of them that pass nothing on yet, where a request sets no bound: news of a queue are 10
MAX_HOPS = 8  # of a request through gateways
ASK_S = 60.0  # for an answer that no generation writes


@dataclass(frozen=True, slots=True)
class Passed:
    """A body, ready to be sent: `Prompts` of a relay."""

    call: GenerationCall
    passage: Passage
    body: bytes  # for the model's own upstreams
    prompt: LeadingBlocks
    bounds: Bounds
    salts: Salts  # of what its prompt shares
    keep_alive_s: float | None  # as Ollama's clients ask
    shown_fields: list[str] | None  # of /infill, cut out here: the rest tells what was used
    prompts: tuple[tuple[int, ...], ...] = ()
    table: None = None
    continues_text: bool = False

    @property
    def tells_tokens(self) -> bool:
        return self.call.is_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayDemand:
    """A request to an upstream: `Demand` of a relay."""

    request_id: str
    passed: Passed
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int
    tenant: str
    share: int
    priority: int
    deadline_s: float | None
    deadlines: Deadlines  # its tenant's, and its own

    @property
    def counts_late(self) -> bool:
        """Its tokens are counted when all have come: what it may take is reserved at once, if it says how much."""
        return not self.passed.tells_tokens and self.max_tokens < MANY_TOKENS


class Relay:
    """The `PromptSource` and `TokenSource` of one model.

    Args:
        request_limits: of n and prompts.
        count: makes ids of prompts by the model's tokenizer; None: it is not here.

    Attributes:
        fallbacks: of other models, which are asked in turn while this one's upstreams do not answer.
    """

    def __init__(
        self,
        pool: Pool,
        admission: Admission,
        clock: Clock,
        request_limits: RequestLimits,
        count: CountTokens | None = None,
    ) -> None:
        self.pool = pool
        self.admission = admission
        self.work = LoopWork()
        self.fallbacks: tuple[Pool, ...] = ()
        self.clock = clock
        self._limits = request_limits
        self._count = count
        settings = pool.settings
        card = ServedModel(
            id=settings.name, created_s=int(clock.unix()), max_model_len=settings.max_model_len, tasks=()
        )
        self.cards: tuple[ServedModel, ...] = (
            card,
            *(msgspec.structs.replace(card, id=name, alias_of=card.id) for name in settings.aliases),
            *(adapter_card(card, name, Path(at).name if at else name) for name, at in settings.adapters.items()),
        )

    @property
    def most_tokens(self) -> int:
        """The model's context, if it is known."""
        return self.cards[0].max_model_len or MANY_TOKENS

    def note(self, **known: Any) -> None:
        """Fields of ServedModel that are known now."""
        self.cards = tuple(msgspec.structs.replace(card, **known) for card in self.cards)

    def take_counter(self, made: "asyncio.Future[CountTokens]") -> None:
        """Count by the model's tokenizer from now on, if it could be read."""
        if made.cancelled():
            return
        if (error := made.exception()) is None:
            self._count = made.result()
        else:
            logger.error("the tokenizer of %s cannot be used, bytes are counted: %s", self.cards[0].id, error)

    # PromptSource.

    def prepare(self, surface: Surface, body: bytes, tenant: Tenant, marks: StageMarks) -> Passed:
        """
        Raises:
            InvalidRequest: a field that the gate must know is wrong, or a text rule is broken.
            ServiceError: the tenant's text rules hold for answers.
        """
        marks.enter(Stage.VALIDATE)
        fields = parse_object(body)
        asked = convert(fields, Asked, {})
        passage, settings = PASSAGES.get(surface), self.pool.settings
        if passage is None or (passage.is_parts and not settings.trusted):
            paths = ", ".join(one.path.decode() for one in PASSAGES.values() if not one.is_parts)
            raise InvalidRequest(f"Another server answers for this model, on {paths} alone. Ask there.", "model")
        is_lines, is_chat = passage.form == "lines", surface is ollama.CHAT
        needed = ("messages",) if is_chat else ("prompt", "suffix")
        if is_lines and all(fields.get(name) in (None, "", []) for name in needed):
            name = (asked.model or settings.name).removesuffix(ollama.LATEST)
            raise ollama.NothingAsked(name, is_chat, asked.keep_alive)
        texts, num_tokens = checked_prompt(fields, tenant)
        call, num_prompts, num_computed = self._call(asked, fields, passage)
        shown_fields = fields.pop("response_fields", None) if passage.form == "parts" and not call.is_stream else None
        if call.is_stream and passage.form == "chunks":
            fields["stream_options"] = (fields.get("stream_options") or {}) | {"include_usage": True}
        if not call.is_stream and passage.form in ("chunks", "names"):
            fields["stream"] = False  # transformers streams responses by default
        if asked.priority is not None:
            fields["priority"] = tenant.priority_of(asked.priority)
        fields.pop("resumable", None)  # this server keeps the stream
        salts = salts_of(tenant, asked.cache_salt)
        address_to(settings, fields, salts)
        marks.enter(Stage.OFFLOAD)
        domain = f"{tenant.cache_salt_domain} {asked.cache_salt}"
        if asked.model in settings.adapters:
            domain += f" {asked.model}"
        prompt = self._counted(surface, body, domain, marks) or leading_blocks(domain, texts, num_tokens)
        context, of_prompts = self.most_tokens, (num_prompts, prompt.num_tokens)
        most = min(call.sampling.max_tokens, context)
        return Passed(
            call=call,
            passage=passage,
            body=sse.json_line(fields),
            prompt=prompt,
            bounds=Bounds(call.num_sequences, num_computed, most, context, *of_prompts),
            salts=salts,
            keep_alive_s=keep_alive_asked(asked.keep_alive) if is_lines else None,
            shown_fields=shown_fields,
        )

    def _counted(self, surface: Surface, body: bytes, domain: str, marks: StageMarks) -> LeadingBlocks | None:
        """None: there is no tokenizer, or this server cannot read the body; the upstream may."""
        if self._count is None:
            return None
        marks.enter(Stage.TOKENIZE)
        try:
            return leading_token_blocks(domain, self._count(surface, body))
        except ServiceError:
            return None

    def _call(self, asked: Asked, fields: dict[str, Any], passage: Passage) -> tuple[GenerationCall, int, int]:
        """And how many prompts it has, and how many answers are computed."""
        prompt, num_prompts = fields.get("prompt"), 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        limits, n = self._limits, asked.n or 1
        for param, num, most in (("n", n, limits.num_choices), ("prompt", num_prompts, limits.num_prompts)):
            if num > most:
                raise InvalidRequest(f"{param} asks for {num}, and at most {most} are allowed.", param)
        max_tokens = asked.max_completion_tokens or asked.max_tokens or asked.max_output_tokens or MANY_TOKENS
        name, is_stream, form = asked.model or self.pool.settings.name, bool(asked.stream), passage.form
        if passage.is_parts:
            num_predict = (asked.options or {}).get("num_predict") if form == "lines" else fields.get("n_predict")
            max_tokens = num_predict if isinstance(num_predict, int) and num_predict > 0 else max_tokens
        if form in ("lines", "document"):
            name, is_stream = name.removesuffix(ollama.LATEST), form == "lines" and asked.stream is not False
        if form == "document":
            max_tokens = 0
        options = asked.stream_options or {}
        call = GenerationCall(
            model=name,
            prompts=(),
            sampling=SamplingParams(max_tokens=min(max_tokens, MANY_TOKENS)),
            num_sequences=n * num_prompts,
            priority=asked.priority,
            deadlines=ANY_TIME if asked.deadlines is None else ANY_TIME.replaced_by(asked.deadlines),
            is_stream=is_stream,
            tells_queue=isinstance(asked.timings, dict) and asked.timings.get("queue") is True,
            includes_usage=bool(options.get("include_usage")),
            tokens=TokenWishes(counts_usage=bool(options.get("continuous_usage_stats"))),
            is_resumable=bool(asked.resumable),
            echo=bool(fields.get("echo")),
        )
        return call, num_prompts, max(n, asked.best_of or 1, asked.beam_width or 1) * num_prompts

    def requests_of(self, prepared: Passed, request_id: str, arrived_s: float, caller: Caller) -> list[RelayDemand]:
        call, tenant = prepared.call, caller.tenant
        deadlines = ANY_TIME.replaced_by(tenant.deadlines).narrowed_by(call.deadlines)
        _hops_on()
        return [
            RelayDemand(
                request_id=request_id,
                passed=prepared,
                num_prompt_tokens=prepared.prompt.num_tokens,
                max_tokens=call.sampling.max_tokens,
                num_sequences=call.num_sequences,
                tenant=caller.sharing_name,
                share=tenant.share,
                priority=caller.priority_of(call.priority),
                deadline_s=arrived_s + deadlines.ttft_s if deadlines.ttft_s < float("inf") else None,
                deadlines=deadlines,
            )
        ]

    def reply_context(self, prepared: Passed, request_id: str) -> ReplyContext:
        unix = self.clock.unix
        return ReplyContext(request_id, int(unix()), prepared.call.model, unix, "", str, lambda token_id: b"")

    def follow_thought(self, call: GenerationCall) -> None:
        return None

    def surface_of(self, surface: Surface) -> Surface:
        return passed(surface)

    # TokenSource.

    def submit(self, request: RelayDemand, sink: DeltaSink, *of_engine: Any, **also: Any) -> "RelayHandle":
        """Arguments beyond the sink are the engine's: an upstream does that by itself."""
        if request.passed.keep_alive_s is not None:
            self.pool.keep(request.passed.keep_alive_s)
        return RelayHandle(self, request, sink)

    # What only counts or cuts tokens.

    async def ask(self, path: str, body: bytes | None, caller: Caller) -> bytes:
        """The answer of a server of our own, to a POST; without a body to a GET.

        Raises:
            InvalidRequest: the body is no JSON object.
            ServiceError: the model's server is another's, or refuses, or fails.
        """
        pool, tenant = self.pool, caller.tenant
        if not pool.settings.trusted:
            message = f"The server that answers for this model has no {path} that is known here. Ask another model's."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "not_found", "model")
        names = ("", "")
        if body is not None:
            fields = parse_object(body)
            asked = str(fields.get("model") or pool.settings.name)
            names = pool.settings.name_there(asked), asked
            address_to(pool.settings, fields, salts_of(tenant, fields.get("cache_salt")))
            body = sse.json_line(fields)
        hops = _hops_on()
        slot = pool.take_slot(leading_blocks("", (), 0), caller.priority_of(None), caller.sharing_name)
        try:
            upstream = await slot.granted
            async with asyncio.timeout(ASK_S):
                head, answer = await pool.ask(upstream, path, MAX_DOCUMENT_BYTES, body, (hops,))
        except UpstreamFault as fault:
            raise pool.error_of(fault) from fault
        except TimeoutError as error:
            raise pool.error_of(UpstreamFault(f"it has not answered in {ASK_S:g} s")) from error
        finally:
            slot.leave()
        if head.status != 200:
            raise refusal_of(head.status, answer, head, names, is_trusted=True)
        return answer


def _hops_on() -> tuple[bytes, bytes]:
    """The field that tells the next server how many gateways the request has come through. Raises ServiceError."""
    if (num := current_hops.get() + 1) > MAX_HOPS:
        logger.error("a request has come through %d gateways: an upstream leads back here", MAX_HOPS)
        raise loop_error()
    return HOPS, b"%d" % num


# On its way.


class _Record(msgspec.Struct):
    """Of /v1/requests/ID, at a server of our own."""

    state: str = ""
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None


class RelayHandle:
    """A request on its way to an upstream and back: the `Handle` of a relay, and the `Reader` of its answer.

    It goes out in the turn in which it is submitted, if an upstream has room and an open connection; otherwise a task
    waits for that. Until the head of an answer has come that is passed on, it may be sent elsewhere: once within a
    pool, and to the fallbacks.
    """

    def __init__(self, relay: Relay, request: RelayDemand, sink: DeltaSink) -> None:
        what = request.passed
        self.request = request
        self.sink = sink
        self.cost = Cost()
        self.sequences = [SequenceProgress(i, sink.on_mark(i, 0)) for i in range(request.num_sequences)]
        self._relay = relay
        self._call, self._passage, self._body = what.call, what.passage, what.body
        self._answer = UpstreamAnswer(what.passage, what.call, request.request_id, what.bounds, what.shown_fields)
        self._num_bytes = self._num_pieces = self._num_events = self._num_empty = 0  # of the answer
        most = what.bounds.num_tokens * what.bounds.num_computed
        self._most_events = most * MOST_EVENTS_A_TOKEN + MORE_EVENTS  # of another's answer
        self._is_paused = self._is_cancelled = self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._heard_s = 0.0  # when something of the answer came last, or could have
        self._timer = DeadlineTimer(self._loop, self._next_due, self._on_due)
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._fallbacks = list(relay.fallbacks)
        self._trace, self._hops = current_trace.get(), _hops_on()
        self._is_late_there = False  # a server of our own has answered that its deadline has passed
        self._asking: asyncio.Task[None] | None = None
        self._first_due_s = None if self._call.is_stream else request.deadline_s  # of streams, its owner looks at it
        self._enter(relay.pool)
        self._timer.arm()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_thought_tokens(self) -> int:
        """As far as the upstream has told."""
        return 0 if self._answer.usage is None else self._answer.usage.num_thought_tokens

    # Called by its owner.

    def cancel(self, reason: FinishReason) -> None:
        """End it; the upstream hears of it in this turn. on_end comes later in the loop. Idempotent."""
        if self._has_ended or self._is_cancelled:
            return
        self._is_cancelled = True
        upstream, exchange = self._slot.upstream, self._exchange
        is_open = exchange is not None and not exchange.is_over
        is_told = (is_open or self._is_late_there) and self._pool.settings.trusted
        self._finish_all()
        for task in (self._task, self._asking):
            if task is not None:
                task.cancel()
        if exchange is not None:
            exchange.cancel()
        self._slot.leave()
        # An error answer waits for the end: it is not held up where nothing has been received
        if is_told and upstream is not None and (self._head is not None or reason is FinishReason.CANCELLED):
            self._task = asyncio.create_task(self._end_as_told(upstream))
        else:
            self._loop.call_soon(self._end)

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """End its choices where they are, as the gate asks."""
        unfinished = [one for one in self.sequences if not one.is_finished]
        if self._has_ended or not unfinished:
            return
        if not self._call.is_stream or self._passage.form != "chunks":
            message = "The token quota was used up before the answer was complete. Ask for fewer tokens at once."
            self.sink.fail(ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded"))
            return
        for sequence in unfinished:
            sequence.is_finished = True
            self.sink.on_delta(sequence.choice, RelayedDelta(text="", num_tokens=0, finish_reason=reason), now_s)
        self.cancel(reason)

    def pause(self) -> None:
        self._is_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._exchange is not None:
            self._exchange.resume()
            self._heard_s = self._loop.time()
            self._timer.arm()

    # On its way out.

    def _enter(self, pool: Pool) -> None:
        request = self.request
        self._pool = pool
        self._may_retry = True
        self._slot = pool.take_slot(request.passed.prompt, request.priority, request.tenant)
        self._go()

    def _go(self) -> None:
        """Send the request, now or once it can be."""
        self._exchange = None
        self._head: AnswerHead | None = None
        self._document = bytearray()  # or what it is refused with
        upstream = self._slot.upstream
        connection = None if upstream is None else upstream.free_connection()
        if connection is None:
            self._task = asyncio.create_task(self._wait())
        else:
            self._send(connection)

    async def _wait(self) -> None:
        try:
            try:
                await self._slot.granted
                self.sink.on_stage(Stage.QUEUE, Stage.UPSTREAM_CONNECT, self._loop.time())
                connection = await self._upstream.connection()
            except ServiceError as error:  # no upstream takes requests
                self._fall_back(error)
            except UpstreamFault as fault:
                self._lose(fault)
            else:
                self._send(connection)
        except Exception as error:
            self._fail_by(error)

    def _send(self, connection: Connection) -> None:
        now_s, pool = self._loop.time(), self._pool
        self.sink.on_upstream(self._upstream.shown, None if pool is self._relay.pool else pool.settings.name)
        self.sink.on_stage(Stage.QUEUE, Stage.UPSTREAM_CONNECT, now_s)
        self.sink.on_stage(Stage.UPSTREAM_CONNECT, Stage.PREFILL, now_s)
        fields = [
            (b"content-type", b"application/json"),
            (b"accept", b"text/event-stream" if self._call.is_stream else b"application/json"),
            (b"x-request-id", self.request.request_id.encode()),
            self._hops,
        ]
        if self._trace is not None:
            fields.append((b"traceparent", self._trace.value))
        outgoing = Outgoing(b"POST", self._passage.path, tuple(fields), self._body)
        self._exchange = connection.http.send(pool.addressed(outgoing, self._upstream), self)
        if self._is_paused:
            self._exchange.pause()
        self._sent_s = self._heard_s = now_s
        self._timer.arm()

    def _lose(self, fault: UpstreamFault) -> None:
        """No answer has come. What an upstream may be at fault for in the middle of its work is not sent to another."""
        self._pool.note_outcome(self._upstream, False)
        is_safe = fault.is_untouched or isinstance(fault, ConnectionLost)
        if not (is_safe and self._move(str(fault), takes_same=True)):
            self._fall_back(self._pool.error_of(fault))

    def _be_refused(self, head: AnswerHead) -> None:
        if head.status == 503 and self._move("it refuses requests", takes_same=False):
            return
        settings, asked = self._pool.settings, self._call.model
        names = settings.name_there(asked), asked
        error = refusal_of(head.status, bytes(self._document), head, names, settings.trusted)
        self._is_late_there = error.kind is ErrorKind.DEADLINE_EXCEEDED
        if head.status == 504:
            self._pool.note_outcome(self._upstream, self._is_late_there)
        if self._is_late_there:
            self._fail(error)
        elif error.code == LOOP:
            self._fail(error, has_begun=False)
        elif head.status >= 500 or head.status == 429:
            self._fall_back(error)
        else:
            self._fail(error, has_begun=False)

    def _move(self, why: str, takes_same: bool) -> bool:
        """Send it to another upstream, see Pool.move. False: it cannot be."""
        failed = self._upstream
        other = self._pool.move(self._slot, takes_same) if self._may_retry else None
        if other is None:
            return False
        logger.warning("the upstream %s failed: %s: %s is asked", failed.url, why, other.url)
        self._may_retry = False
        self._go()
        return True

    def _fall_back(self, error: ServiceError) -> None:
        """Send it to another model's upstreams, if there are any."""
        if not self._fallbacks:
            self._fail(error, has_begun=False)
            return
        asked, pool = self.request.passed, self._fallbacks.pop(0)
        logger.warning("%s is asked instead of %s: %s", pool.settings.name, self._call.model, error)
        self._slot.leave()
        fields = msgspec.json.decode(asked.body)
        address_to(pool.settings, fields, asked.salts)
        self._body = sse.json_line(fields)
        self._enter(pool)

    def _fail_by(self, error: Exception) -> None:
        """What goes wrong with this answer ends it, and no other of the connection."""
        if isinstance(error, UpstreamFault):
            self._pool.note_outcome(self._upstream, False)
            self._fail(self._pool.error_of(error))
            return
        logger.error("a request cannot be passed on", exc_info=error, extra={"request_id": self.request.request_id})
        self._fail(ServiceError(ErrorKind.ENGINE, "The server failed to pass this request on.", "internal_error"))

    def _fail(self, error: ServiceError, has_begun: bool = True) -> None:
        if not self._has_ended:
            if not self.num_tokens:
                self._answer.usage = None  # counts alone have come, and no text
            # Which cancels. An upstream that failed may have computed something
            self.sink.fail(error, not has_begun and error.kind is not ErrorKind.UPSTREAM)
            self.cancel(FinishReason.ERROR)

    @property
    def _upstream(self) -> Upstream:
        assert self._slot.upstream is not None
        return self._slot.upstream

    # What the upstream sends: exchange.Reader.

    def on_head(self, head: AnswerHead) -> None:
        self._head = head
        if head.status != 504:  # whose body tells whose failure it is
            self._pool.note_outcome(self._upstream, head.status < 500 or head.status == 503)
        self._heard_s = self._loop.time()
        self._timer.arm()

    def on_data(self, data: bytes) -> None:
        assert self._head is not None
        is_refusal, begun_s = self._head.status != 200, self._loop.time()
        if not self._answer.is_done:  # its end is not put off by what follows
            self._heard_s = begun_s
        self._num_bytes += len(data)
        self._num_pieces += 1
        try:
            if self._num_pieces > MORE_EVENTS + self._num_bytes // LEAST_PIECE_BYTES:
                raise UpstreamFault(f"it has sent {self._num_bytes} bytes in {self._num_pieces} pieces")
            if self._call.is_stream and not is_refusal:
                for part in self._answer.push(data):
                    self._take(part, begun_s)
            else:
                self._document += data
                if len(self._document) > (most := MAX_ERROR_BYTES if is_refusal else MAX_DOCUMENT_BYTES):
                    self._document.clear()  # it is no answer
                    raise UpstreamFault(f"its answer is larger than {most} bytes")
            if self._answer.is_done and not self._is_cancelled:
                self._finish_all()  # the answer's end follows, or is not waited for
                self._timer.arm()
        except Exception as error:
            self._fail_by(error)
        self._relay.work.busy_s += self._loop.time() - begun_s

    def on_end(self, fault: UpstreamFault | None) -> None:
        try:
            if self._head is None:
                self._lose(fault or UpstreamFault("its answer has no head"))
                return
            if self._head.status != 200:
                self._be_refused(self._head)
                return
            if fault is None and not self._call.is_stream:
                document, self._document = bytes(self._document), bytearray()  # it may be no answer
                self._take(self._answer.document(document), self._loop.time())
                self._document += document
            if not (self._answer.is_done or all(one.is_finished for one in self.sequences)):
                raise fault or UpstreamFault("its answer ends in the middle")
            self._end()
        except Exception as error:
            self._fail_by(error)

    def _next_due(self) -> float | None:
        """When a stream's end is waited for no longer, its upstream is taken to hang, or a document's token is due.

        Before their heads only our own are (see Pool.silence_tells): others send it with the first token.
        """
        exchange, settings = self._exchange, self._pool.settings
        if not self._call.is_stream:
            return None if self._is_cancelled or self._head is not None else self._first_due_s
        if exchange is None or exchange.is_over:
            return None
        if self._answer.is_done:
            return self._heard_s + LINGER_S
        is_due = self._head is not None or (self._pool.silence_tells and self._passage.form != "lines")
        return self._heard_s + settings.silence_s if is_due and not self._is_paused else None

    def _on_due(self) -> None:
        exchange = self._exchange
        if not self._call.is_stream:
            self._first_due_s = None
            self._be_late()
            return
        assert exchange is not None
        exchange.cancel()
        self.on_end(ConnectionLost(f"nothing has come of its answer for {self._pool.settings.silence_s:g} s"))

    def _be_late(self) -> None:
        """No token of a document can be seen from here: it is late while it waits here, or if nobody else can tell.

        A server of our own holds the deadline that the request names by itself, as long as it answers at all.
        """
        exchange, deadlines = self._exchange, self.request.deadlines
        if exchange is not None and "ttft_s" not in deadlines.asked:
            return
        if exchange is None or not self._pool.settings.trusted:
            self._fail(deadlines.exceeded("ttft_s"))
        else:
            self._asking = asyncio.create_task(self._be_late_unless_held(self._upstream))

    async def _be_late_unless_held(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                await self._record_there(upstream)
        except (TimeoutError, UpstreamFault, msgspec.MsgspecError) as error:
            if self._head is None:
                logger.info("an upstream does not tell how a request goes whose deadline has passed: %r", error)
                self._fail(self.request.deadlines.exceeded("ttft_s"))

    def _take(self, part: Part, now_s: float) -> None:
        self._num_events += 1
        self._num_empty += part.is_last or not part.data
        most_empty = MORE_EVENTS + EMPTY_A_SECOND * (now_s - self._sent_s)
        is_flood = self._num_events > self._most_events or self._num_empty > most_empty
        if is_flood and not self._pool.settings.trusted:
            raise UpstreamFault(f"it has sent {self._num_events} events, more than an answer to this request has")
        for choice in part.texts:
            self._count(self.sequences[choice], now_s)
        event = part.data
        for choice, reason in part.ends.items():
            if not self.sequences[choice].is_finished:
                self.sequences[choice].is_finished = True
                self._write(choice, event, part.is_last, now_s, reason)
                event = b""
        if event:
            self._write(0, event, part.is_last, now_s)

    def _count(self, sequence: SequenceProgress, now_s: float) -> None:
        is_first = sequence.last_s == NOT_YET
        sequence.last_s = now_s
        sequence.num_tokens += 1
        self._relay.work.num_tokens += 1
        if is_first:
            self._slot.note_begun()
            self.sink.on_begin(sequence.choice, now_s)
        if sequence.num_tokens >= sequence.mark:
            sequence.mark = NEVER  # on_mark may end it
            sequence.mark = self.sink.on_mark(sequence.choice, sequence.num_tokens)

    def _write(
        self, choice: int, event: bytes, is_last: bool, now_s: float, reason: FinishReason | None = None
    ) -> None:
        if not (self._has_ended or self._is_cancelled):
            delta = RelayedDelta(text=" ", num_tokens=0, finish_reason=reason, event=event, is_last=is_last)
            self.sink.on_delta(choice, delta, now_s)

    # Its end.

    def _finish_all(self) -> None:
        for sequence in self.sequences:
            sequence.is_finished = True

    async def _end_as_told(self, upstream: Upstream) -> None:
        """After a cancel: with the usage that a server of our own records under our id, if it tells in time."""
        wait_s = TELL_AFTER_S
        try:
            async with asyncio.timeout(TELL_S):
                while (record := await self._record_there(upstream)).state not in ("done", "failed"):
                    await asyncio.sleep(wait_s)
                    wait_s *= 2
            counts = record.num_prompt_tokens, record.num_completion_tokens, record.num_cached_tokens
            self._answer.usage = Usage(*(one or 0 for one in counts))
        except (TimeoutError, UpstreamFault, msgspec.MsgspecError) as error:
            logger.info("an upstream does not tell what a cancelled request has used: %r", error)
        self._end()

    async def _record_there(self, upstream: Upstream) -> _Record:
        path = "/v1/requests/" + self.request.request_id
        head, body = await self._pool.ask(upstream, path, MAX_ERROR_BYTES)
        if head.status != 200:
            raise UpstreamFault(f"it answers with the status {head.status}")
        return msgspec.json.decode(body, type=_Record)

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._timer.close()
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None  # which refers back: all is freed without the garbage collector
        self._slot.leave()
        try:
            self.sink.on_end(self._billed(), None)
        except Exception:  # there is nothing left to cancel
            logger.exception("an answer cannot be ended", extra={"request_id": self.request.request_id})

    def _billed(self) -> Usage:
        if self._head is not None and self._head.status == 200 and self._document.lstrip().startswith(b"{"):
            self._answer.num_document_bytes = len(self._document)
        return self._answer.billed(self._pool.settings.trusted, len(self._body), self._num_bytes)
