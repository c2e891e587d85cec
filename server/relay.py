"""A model that upstreams answer for: what is asked of them, and of which. Thread: loop.

    body ─▶ Relay.prepare ─▶ Relay.submit: RelayHandle ─ a slot, a connection ─▶ upstream
    client ◀─ its output ◀─ RelayHandle ◀─ server/relayed.py: an answer's parts ◀─┘

The gate's work and the ledger are the generation's (server/generation.py). Of a body only `model`, `stream`,
`stream_options` and `priority` are rewritten, and `cache_salt`, `priority` and `deadlines` for upstreams of our own.

Tokens are those of the upstream's usage. Until it comes, a prompt counts by the model's tokenizer if it is here, as a
third of its bytes otherwise, and an event with text as a token: that is what is billed of an answer that is broken off.
Of a document it is a third of the bytes. It is never more than the request and the model's context allow, and nothing
of what is no answer. Where the upstreams are not our own, that bounds what they tell, too.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import Cost, FinishReason, SamplingParams, Usage
from server.api import completions, ollama
from server.api.decoding import convert, parse_object
from server.api.fields import MOST_MAX_TOKENS, GenerationCall, RequestLimits, TokenWishes, check_range
from server.api.models import ServedModel, adapter_card
from server.api.replies import ReplyContext, Surface
from server.clock import Clock, DeadlineTimer
from server.engine_client import NOT_YET, DeltaSink, LoopWork, SequenceProgress
from server.gate.admission import Admission
from server.gate.identity import Caller
from server.gate.quota import NEVER
from server.gate.tenants import ANY_TIME, Deadlines, OwnDeadlineExceeded, Tenant
from server.observing.accounting import HOPS, current_hops, current_trace
from server.observing.timing import Stage, StageMarks
from server.relayed import (
    LOOP,
    MANY_TOKENS,
    MAX_DOCUMENT_BYTES,
    MAX_ERROR_BYTES,
    SURFACES,
    Asked,
    Part,
    Passed,
    PassedReply,
    UpstreamAnswer,
    address_to,
    checked_prompt,
    keep_alive_asked,
    loop_error,
    refusal_of,
    salts_of,
)
from server.upstream.connection import Connection
from server.upstream.exchange import AnswerHead, ConnectionLost, Exchange, Fields, Outgoing, UpstreamFault
from server.upstream.pool import JSON, MAX_MOVES, NOT_OPEN, Pool, Slot, Upstream, leading_blocks, leading_token_blocks
from server.wire import sse

logger = logging.getLogger(__name__)

TELL_S, TELL_AFTER_S = 1.0, 0.01  # to ask how a request has gone at its upstream; the first wait, doubled each time
LINGER_S = 0.5  # for the end of an answer, after its last event
MAX_HOPS = 8  # of a request through gateways
ASK_S = 60.0  # for an answer without generation

CountTokens = Callable[[Surface, bytes], list[tuple[int, ...]]]  # a body's prompts as ids; raises ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayDemand:
    """A request to an upstream: `Demand` of a relay."""

    request_id: str
    passed: Passed
    fields: Fields  # of its head
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int
    tenant: str
    share: int
    priority: int
    deadline_s: float | None
    deadlines: Deadlines  # its tenant's, and its own
    models: tuple[str, ...] | None  # that its tenant may use; None: all

    @property
    def counts_late(self) -> bool:
        """Its tokens are counted when all have come: what it may take is reserved at once, if it says how much."""
        return not self.passed.tells_tokens and self.max_tokens < MANY_TOKENS


class Relay:
    """The reader and the engine of one model: see Backend, PromptReader and EngineClient.

    Args:
        request_limits: of n and prompts.

    Attributes:
        fallbacks: of other models, which are asked in turn while this one's upstreams do not answer.
        count: makes ids of prompts by the model's tokenizer; None: it is not here.
    """

    def __init__(self, pool: Pool, admission: Admission, clock: Clock, request_limits: RequestLimits) -> None:
        self.pool = pool
        self.admission = admission
        self.work = LoopWork()
        self.fallbacks: tuple[Pool, ...] = ()
        self.count: CountTokens | None = None
        self.clock = clock
        self._limits = request_limits
        settings = pool.settings
        card = ServedModel(
            id=settings.name, created_s=int(clock.unix()), max_model_len=settings.max_model_len, tasks=()
        )
        self.cards: tuple[ServedModel, ...] = (
            card,
            *(msgspec.structs.replace(card, id=name, alias_of=card.id) for name in settings.aliases),
            *(adapter_card(card, name, Path(at).name if at else name) for name, at in settings.adapters.items()),
        )

    def note(self, **known: Any) -> None:
        """Fields of ServedModel that are known now."""
        self.cards = tuple(msgspec.structs.replace(card, **known) for card in self.cards)

    def take_counter(self, made: "asyncio.Future[CountTokens]") -> None:
        """Count by the model's tokenizer from now on, if it could be read."""
        if made.cancelled():
            return
        if (error := made.exception()) is None:
            self.count = made.result()
        else:
            logger.error("the tokenizer of %s cannot be used, bytes are counted: %s", self.cards[0].id, error)

    # What a PromptReader does.

    def prepare(self, surface: Surface, body: bytes, tenant: Tenant, marks: StageMarks) -> Passed:
        """
        Raises:
            InvalidRequest: a field that the gate must know is wrong, or a text rule is broken.
            ServiceError: the tenant's text rules hold for answers.
        """
        marks.enter(Stage.VALIDATE)
        fields = parse_object(body)
        asked = convert(fields, Asked, {})
        settings = self.pool.settings
        if surface.is_parts and not settings.trusted:
            paths = ", ".join(one.path for one in SURFACES if not one.is_parts)
            raise InvalidRequest(f"This model runs on another server. Use one of these: {paths}.", "model")
        is_lines, is_chat = surface.form == "lines", surface is ollama.CHAT
        needed = ("messages",) if is_chat else ("prompt", "suffix")
        if is_lines and all(fields.get(name) in (None, "", []) for name in needed):
            name = (asked.model or settings.name).removesuffix(ollama.LATEST)
            raise ollama.NothingAsked(name, is_chat, asked.keep_alive)
        texts, num_tokens = checked_prompt(fields, tenant)
        call, num_prompts, num_computed = self._call(asked, fields, surface)
        shown_fields = fields.pop("response_fields", None) if surface.form == "parts" and not call.is_stream else None
        if call.is_stream and surface.form == "chunks":
            fields["stream_options"] = (fields.get("stream_options") or {}) | {"include_usage": True}
        if not call.is_stream and surface.form in ("chunks", "names"):
            fields["stream"] = False  # transformers streams responses by default
        sent = {name: one for name in ("priority", "deadlines") if (one := fields.pop(name, None)) is not None}
        if asked.priority is not None:
            sent["priority"] = tenant.priority_of(asked.priority)
        fields.pop("resumable", None)  # this server keeps the stream
        salts = salts_of(tenant, asked.cache_salt)
        marks.enter(Stage.OFFLOAD)
        adapter = f" {asked.model}" if asked.model in settings.adapters else ""
        domain, prompt = f"{tenant.cache_salt_domain} {asked.cache_salt}{adapter}", None
        if self.count is not None:
            marks.enter(Stage.TOKENIZE)
            with suppress(ServiceError):  # this server cannot read the body; the upstream may
                prompt = leading_token_blocks(domain, self.count(surface, body))
        return Passed(
            call=call,
            surface=surface,
            body=address_to(settings, fields, salts),
            prompt=prompt or leading_blocks(domain, texts, num_tokens),
            salts=salts,
            context=self.cards[0].max_model_len or MANY_TOKENS,
            num_prompts=num_prompts,
            num_computed=num_computed,
            keep_alive_s=keep_alive_asked(asked.keep_alive) if is_lines else None,
            shown_fields=shown_fields,
            sent=sent,
            last_fields=frozenset(("context", "timings") if asked.timings else ("context",)),
        )

    def _call(self, asked: Asked, fields: dict[str, Any], surface: Surface) -> tuple[GenerationCall, int, int]:
        """And how many prompts it has, and how many answers are computed."""
        prompt, num_prompts = fields.get("prompt"), 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        n, most_prompts = asked.n or 1, self._limits.num_prompts
        check_range("n", n, 1, self._limits.num_choices)
        if num_prompts > most_prompts:
            raise InvalidRequest(f"prompt must have at most {most_prompts} texts or lists of ids.", "prompt")
        max_tokens = asked.max_completion_tokens or asked.max_output_tokens or asked.max_tokens
        max_tokens = MANY_TOKENS if max_tokens is None else max_tokens
        is_echo = surface is completions.SURFACE and bool(fields.get("echo"))
        check_range("max_tokens", max_tokens, 0 if is_echo else 1, MOST_MAX_TOKENS)  # 0: its prompt's logprobs alone
        name, is_stream, form = asked.model or self.pool.settings.name, bool(asked.stream), surface.form
        if surface.is_parts:
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
        accept = b"text/event-stream" if call.is_stream else b"application/json"
        fields: Fields = (*JSON, (b"accept", accept), (b"x-request-id", request_id.encode()), _hops_on())
        if (trace := current_trace.get()) is not None:
            fields += ((b"traceparent", trace.value),)
        return [
            RelayDemand(
                request_id=request_id,
                passed=prepared,
                fields=fields,
                num_prompt_tokens=prepared.prompt.num_tokens,
                max_tokens=call.sampling.max_tokens,
                num_sequences=call.num_sequences,
                tenant=caller.sharing_name,
                share=tenant.share,
                priority=caller.priority_of(call.priority),
                deadline_s=arrived_s + deadlines.ttft_s if deadlines.ttft_s < float("inf") else None,
                deadlines=deadlines,
                models=tenant.models,
            )
        ]

    def reply_context(self, prepared: Passed, request_id: str) -> ReplyContext:
        unix = self.clock.unix
        return ReplyContext(request_id, int(unix()), prepared.call.model, unix, "", str, lambda token_id: b"")

    def follow_thought(self, call: GenerationCall) -> None:
        return None

    def surface_of(self, surface: Surface) -> Surface:
        reply: Callable[..., Any] = partial(PassedReply, surface)
        return surface._replace(stream=reply, whole=reply)

    # What an EngineClient does.

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
        pool, settings = self.pool, self.pool.settings
        if not settings.trusted:
            message = f"{path} is not available for this model, which another kind of server runs. Use another model."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "not_found", "model")
        asked = settings.name
        if body is not None:
            fields = parse_object(body)
            asked = str(fields.get("model") or asked)
            body = address_to(settings, fields, salts_of(caller.tenant, fields.get("cache_salt")))
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
            raise refusal_of(head, answer, settings, asked)
        return answer


def _hops_on() -> tuple[bytes, bytes]:
    """The field that tells the next server how many gateways the request has come through. Raises ServiceError."""
    if (num := current_hops.get() + 1) > MAX_HOPS:
        logger.error("a request has come through %d gateways: an upstream leads back here", MAX_HOPS)
        raise loop_error()
    return HOPS, b"%d" % num


# On its way.


class RelayHandle:
    """A request on its way to an upstream and back: see RequestHandle. The `Reader` of its answer.

    It goes out in the turn in which it is submitted, if an upstream has room and an open connection; otherwise a task
    waits for that. Until the head of an answer has come that is passed on, it may be sent elsewhere: within its pool
    (see server/upstream/pool.py), and to the fallbacks.
    """

    # Of the last upstream that is asked
    _pool: Pool
    _slot: Slot
    _exchange: Exchange | None  # once it is sent
    _answer: UpstreamAnswer
    _may_retry: bool
    _moves_left: int

    def __init__(self, relay: Relay, request: RelayDemand, sink: DeltaSink) -> None:
        self.request = request
        self.sink = sink
        self.cost = Cost()
        self.sequences = [SequenceProgress(i, sink.on_mark(i, 0)) for i in range(request.num_sequences)]
        self._relay = relay
        self._call, self._surface, self._body = request.passed.call, request.passed.surface, request.passed.body
        may_use = request.models
        self._fallbacks = [
            one for one in relay.fallbacks if may_use is None or not set(may_use).isdisjoint(one.settings.names)
        ]
        self._is_paused = self._is_cancelled = self._has_ended = False
        self._has_passed = False  # something of an answer, to its owner
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._sent_s = self._heard_s = 0.0  # when something of the answer came last, or could have
        self._task: asyncio.Task[None] | None = None  # waits for a connection, or for what was used until a cancel
        self._late: asyncio.Task[None] | None = None  # asks how a document goes whose deadline has passed
        self._first_due_s = None if self._call.is_stream else request.deadline_s  # of streams, its owner looks at it
        self._timer = DeadlineTimer(self._loop, self._next_due, self._on_due)
        self._enter(relay.pool)

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
        self._finish_all()
        self._timer.close()
        for task in (self._task, self._late):
            if task is not None:
                task.cancel()
        upstream, exchange, is_told = self._slot.upstream, self._exchange, False
        if exchange is not None:
            # A server of our own tells what it has used, also after its own deadline. An error answer waits for that
            is_told = not exchange.is_over or reason is FinishReason.DEADLINE
            exchange.cancel()
        self._slot.leave()
        if is_told and upstream is not None and self._pool.settings.trusted:
            self._task = asyncio.create_task(self._end_as_told(upstream))
        else:
            self._loop.call_soon(self._end)

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """End its choices where they are, as the gate asks."""
        unfinished = [one for one in self.sequences if not one.is_finished]
        if self._has_ended or not unfinished:
            return
        if not self._call.is_stream or self._surface.form != "chunks":
            message = "The token quota was used up before the answer was complete. Ask for fewer tokens at once."
            self.sink.fail(ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded"))
            return
        for sequence in unfinished:
            sequence.is_finished = True
            self.sink.on_delta(sequence.choice, Part(finish_reason=reason), now_s)
        self.cancel(reason)

    def pause(self) -> None:
        self._is_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._exchange is not None:
            self._exchange.resume()
            self._hear()

    # On its way out.

    @property
    def _upstream(self) -> Upstream:
        assert self._slot.upstream is not None
        return self._slot.upstream

    def _enter(self, pool: Pool) -> None:
        request = self.request
        self._pool, self._may_retry, self._moves_left = pool, True, MAX_MOVES
        self._slot = pool.take_slot(request.passed.prompt, request.priority, request.tenant)
        self._go()

    def _go(self) -> None:
        """Send the request, now or once it can be."""
        self._exchange = None
        self._answer = UpstreamAnswer(self.request.passed, self.request.request_id, self._pool.settings.trusted)
        upstream = self._slot.upstream
        connection = None if upstream is None else upstream.free_connection()
        if connection is None:
            self._task = asyncio.create_task(self._wait())
            self._timer.arm()
        else:
            self._send(connection)

    async def _wait(self) -> None:
        try:
            try:
                await self._slot.granted
                self.sink.on_stage(Stage.QUEUE, Stage.UPSTREAM_CONNECT, self._loop.time())
                connection = await self._upstream.connection()
            except ServiceError as error:  # no upstream takes requests
                self._try_elsewhere(error)
            except UpstreamFault as fault:
                self._lose(fault)
            else:
                self._send(connection)
        except Exception as error:
            self._fail_by(error)

    def _send(self, connection: Connection) -> None:
        self._sent_s, pool = self._loop.time(), self._pool
        self.sink.on_upstream(self._upstream.shown, None if pool is self._relay.pool else pool.settings.name)
        self.sink.on_stage(Stage.QUEUE, Stage.UPSTREAM_CONNECT, self._sent_s)
        self.sink.on_stage(Stage.UPSTREAM_CONNECT, Stage.PREFILL, self._sent_s)
        outgoing = Outgoing(
            b"POST", self._surface.path.encode(), self.request.fields, sse.with_fields(self._body, self._told())
        )
        self._exchange = connection.http.send(pool.addressed(outgoing, self._upstream), self)
        if self._is_paused:
            self._exchange.pause()
        self._hear()

    def _told(self) -> Mapping[str, Any]:
        """The class and the deadlines, for the upstream: one of our own knows no tenants."""
        request, is_own_class = self.request, self._surface.form == "document" and self._call.priority is None
        if not self._pool.settings.trusted:
            return request.passed.sent
        left = request.deadlines.left_after(int(1e3 * (self._sent_s - self._begun_s)) / 1e3)
        told = {"priority": None if is_own_class else request.priority, "deadlines": left or None}
        return {name: one for name, one in told.items() if one is not None}

    def _lose(self, fault: UpstreamFault) -> None:
        """No answer has come. It is asked again only if the upstream has not begun, or its connection was lost."""
        self._pool.note_outcome(self._upstream, False)
        if fault.is_absent:
            self._pool.note_not_open(self._upstream, str(fault))
        is_safe = fault.is_untouched or isinstance(fault, ConnectionLost)
        self._try_elsewhere(self._pool.error_of(fault), True if is_safe else None, fault.is_untouched)

    def _be_refused(self, head: AnswerHead) -> None:
        error = refusal_of(head, bytes(self._answer.body), self._pool.settings, self._call.model)
        if error.kind is ErrorKind.DEADLINE_EXCEEDED and not self.request.deadlines.asked:  # its tenant's, told there
            error = OwnDeadlineExceeded(error.kind, error.message, error.code)
        is_fault, is_overload = error.kind is ErrorKind.UPSTREAM, error.kind is ErrorKind.UNAVAILABLE
        self._pool.note_outcome(self._upstream, not is_fault)
        if is_overload:
            self._pool.note_overload(self._upstream, error)
        if is_overload or (is_fault and error.code != LOOP):
            may_move = is_overload or head.status < 500  # others may know our key, and the model
            self._try_elsewhere(error, False if may_move else None, is_overload and error.code in NOT_OPEN)
        else:
            self._fail(error, has_begun=error.kind is ErrorKind.DEADLINE_EXCEEDED)

    def _try_elsewhere(self, error: ServiceError, takes_same: bool | None = None, is_untouched: bool = False) -> None:
        """Send it to another upstream; else to the next fallback; else the request has failed.

        Args:
            takes_same: see Pool.move; None: only fallbacks are tried.
            is_untouched: it may be sent again as often as it takes; what may have been begun, once.
        """
        if takes_same is not None and (self._may_retry or is_untouched) and self._moves_left:
            failed, is_refused = self._upstream, not (takes_same or is_untouched)
            if self._pool.move(self._slot, takes_same, is_refused):
                logger.warning("the upstream %s failed, and another is asked: %s", failed.url, error)
                self._may_retry &= is_untouched
                self._moves_left -= 1
                self._go()
                return
        if not self._fallbacks:
            self._fail(error, has_begun=False)
            return
        asked, pool = self.request.passed, self._fallbacks.pop(0)
        logger.warning("%s is asked instead of %s: %s", pool.settings.name, self._call.model, error)
        if self._exchange is not None:
            self._exchange.cancel()
        self._slot.leave()
        self._body = address_to(pool.settings, msgspec.json.decode(asked.body), asked.salts)
        self._enter(pool)

    def _fail_by(self, error: Exception) -> None:
        """End this answer alone: the others of its connection go on."""
        if isinstance(error, UpstreamFault):
            self._pool.note_outcome(self._upstream, False)
            pass_on = self._fail if self._has_passed or self._is_cancelled else self._try_elsewhere
            pass_on(self._pool.error_of(error))
            return
        if isinstance(error, ServiceError):
            self._fail(error)
            return
        logger.error("a request cannot be passed on", exc_info=error, extra={"request_id": self.request.request_id})
        self._fail(ServiceError(ErrorKind.ENGINE, "The server failed to pass this request on.", "internal_error"))

    def _fail(self, error: ServiceError, has_begun: bool = True) -> None:
        if not self._has_ended:
            if not self.num_tokens:
                self._answer.usage = None  # counts alone have come, and no text
            # This cancels. It is no refusal where an upstream has failed: that may have computed something
            self.sink.fail(error, not has_begun and error.kind is not ErrorKind.UPSTREAM)
            self.cancel(FinishReason.ERROR)

    # What the upstream sends: exchange.Reader.

    def on_head(self, head: AnswerHead) -> None:
        self._answer.head = head
        self._hear()

    def on_data(self, data: bytes) -> None:
        answer, begun_s = self._answer, self._loop.time()
        if not answer.is_done:  # later data do not extend LINGER_S
            self._heard_s = begun_s
        try:
            for part in answer.push(data, begun_s - self._sent_s):
                self._take(part, begun_s)
            if answer.is_done and not self._is_cancelled:
                self._finish_all()
                self._loop.call_soon(self._timer.arm)  # its end follows, mostly in this turn
        except Exception as error:
            self._fail_by(error)
        self._relay.work.busy_s += self._loop.time() - begun_s

    def on_end(self, fault: UpstreamFault | None) -> None:
        answer = self._answer
        try:
            if answer.head is None:
                self._lose(fault or UpstreamFault("its answer has no head"))
            elif answer.is_refusal:
                self._be_refused(answer.head)
            else:
                if fault is None and not self._call.is_stream:
                    self._take(answer.document(), self._loop.time())
                if not (answer.is_done or all(one.is_finished for one in self.sequences)):
                    raise fault or UpstreamFault("its answer ends in the middle")
                self._pool.note_outcome(self._upstream, True)
                self._end()
        except Exception as error:
            self._fail_by(error)

    def _hear(self) -> None:
        self._heard_s = self._loop.time()
        self._timer.arm()

    def _take(self, part: Part, now_s: float) -> None:
        self._has_passed |= bool(part.data or part.ends)
        for choice in part.texts:
            self._count(self.sequences[choice], now_s)
        ends = [choice for choice in part.ends if not self.sequences[choice].is_finished]
        if not ends and part.data and not self._is_cancelled:
            self.sink.on_delta(0, part, now_s)
        for choice in ends:
            self.sequences[choice].is_finished = True
            if not self._is_cancelled:
                written = part if choice == ends[0] else Part(is_last=part.is_last)
                delta = msgspec.structs.replace(written, finish_reason=part.ends[choice])
                self.sink.on_delta(choice, delta, now_s)

    def _count(self, sequence: SequenceProgress, now_s: float) -> None:
        is_first, sequence.last_s = sequence.last_s == NOT_YET, now_s
        sequence.num_tokens += 1
        self._relay.work.num_tokens += 1
        if is_first:
            self._slot.note_begun()
            self.sink.on_begin(sequence.choice, now_s)
        if sequence.num_tokens >= sequence.mark:
            sequence.mark = NEVER  # on_mark may end it
            sequence.mark = self.sink.on_mark(sequence.choice, sequence.num_tokens)

    # Deadlines: of a stream's silence, of its end after its last event, of a document's first token.

    def _next_due(self) -> float | None:
        """Silence before the head is one of our own servers alone (see Pool.silence_tells): others may send it late."""
        answer, exchange = self._answer, self._exchange
        if not self._call.is_stream:
            return self._first_due_s if answer.head is None else None
        if exchange is None or exchange.is_over:
            return None
        if answer.is_done:
            return self._heard_s + LINGER_S
        is_due = answer.head is not None or (self._pool.silence_tells and self._surface.form != "lines")
        return self._heard_s + self._pool.settings.silence_s if is_due and not self._is_paused else None

    def _on_due(self) -> None:
        """The silence ends a stream.

        A document's tokens cannot be seen from here. It is late while it waits here; at an upstream, by a deadline of
        the request's own alone, which a server of ours holds by itself as long as it answers.
        """
        exchange, deadlines = self._exchange, self.request.deadlines
        if self._call.is_stream:
            assert exchange is not None
            exchange.cancel()
            self.on_end(ConnectionLost(f"nothing has come of its answer for {self._pool.settings.silence_s:g} s"))
            return
        self._first_due_s = None
        if exchange is None or ("ttft_s" in deadlines.asked and not self._pool.settings.trusted):
            self._fail(deadlines.exceeded("ttft_s"))
        elif "ttft_s" in deadlines.asked:
            self._late = asyncio.create_task(self._be_late_unless_held(self._upstream))

    async def _be_late_unless_held(self, upstream: Upstream) -> None:
        if await self._record_there(upstream) is None and self._answer.head is None:
            self._fail(self.request.deadlines.exceeded("ttft_s"))

    # Its end.

    def _finish_all(self) -> None:
        for sequence in self.sequences:
            sequence.is_finished = True

    async def _end_as_told(self, upstream: Upstream) -> None:
        """After a cancel: with the usage that a server of our own records under our id, if it tells in time."""
        if (record := await self._record_there(upstream, at_end=True)) is not None:
            counts = (record.get(f"num_{one}_tokens") or 0 for one in ("prompt", "completion", "cached"))
            self._answer.usage, self._answer.is_of_start = Usage(*counts), False
        self._end()

    async def _record_there(self, upstream: Upstream, at_end: bool = False) -> dict[str, Any] | None:
        """How the request goes at a server of our own, or has gone: a ToldRequest. None: it does not tell in TELL_S."""
        path, wait_s = "/v1/requests/" + self.request.request_id, TELL_AFTER_S
        try:
            async with asyncio.timeout(TELL_S):
                while True:
                    head, body = await self._pool.ask(upstream, path, MAX_ERROR_BYTES)
                    if head.status != 200:
                        raise UpstreamFault(f"it answers with the status {head.status}")
                    record = msgspec.json.decode(body, type=dict[str, Any])
                    if not at_end or record.get("state") in ("done", "failed"):
                        return record
                    await asyncio.sleep(wait_s)
                    wait_s *= 2
        except (TimeoutError, UpstreamFault, msgspec.MsgspecError) as error:
            logger.info("an upstream does not report on a request that is late or cancelled: %r", error)
            return None

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
            self.sink.on_end(self._answer.billed(), None)
        except Exception:  # there is nothing left to cancel
            logger.exception("an answer cannot be ended", extra={"request_id": self.request.request_id})
