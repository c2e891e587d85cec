"""One generation, top to bottom: the file to read first. Thread: loop.

    body → call → prompts → requests → engine → deltas → bytes → end

`generate` is the request's task. It waits three times: for the body, for long prompts to be tokenized elsewhere, and
for the end. In between no task runs: the engine client calls the Answer with each delta, which writes into the stream.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec

from core.chat_template import ChatTemplate, max_text_chars
from core.errors import ContextLengthExceeded, ErrorKind, InvalidRequest, ServiceError, context_overflow
from core.tokenizer import Tokenizer
from core.types import TOP_CLASS, Request, SamplingParams, Usage
from server.answer import Answer
from server.answer_body import StreamedBody, WholeBody, answer_headers
from server.api.models import ServedModel, find_model
from server.api.surface import (
    ChatPrompt,
    GenerationCall,
    GenerationDefaults,
    IdsPrompt,
    Prompt,
    ReplyContext,
    Surface,
    TextPrompt,
)
from server.backend import Backend
from server.clock import Clock
from server.gate.admission import Admission, Asker, Place
from server.gate.deadlines import ANY_TIME, Deadlines
from server.gate.identity import Caller
from server.gate.queue_news import QueueNews
from server.gate.quota import Ticket
from server.gate.tenants import Tenant
from server.gate.text_rules import rule_book
from server.ledger.idempotency import MAX_ANSWER_BYTES, Idempotency, replay
from server.ledger.ledger import Entry, Ledger, Subject
from server.ledger.recording import Recording
from server.observing.accounting import Outcome, client_request_id
from server.observing.metrics import Metrics
from server.observing.timing import Stage, StageClock, StageMarks
from server.wire.stream import HttpStream

logger = logging.getLogger(__name__)

OFFLOAD_BYTES = 8 * 1024  # a body from this size on is parsed and tokenized off the loop: 2.5 ms, measured

NOTHING_USED = Outcome(Usage(0, 0), (), None)  # by what is answered from memory

T = TypeVar("T")


class Offload(Protocol):
    """Runs long work off the loop; what the work raises, the awaiter gets."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


_Prepared = tuple[GenerationCall, list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class PromptReader:
    """The model, as the loop knows it: how prompts become ids, and how many fit.

    Args:
        cards: what /v1/models shows, one per name.
        fingerprint: of the model and of what computes it.
    """

    cards: tuple[ServedModel, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    unix_clock: Callable[[], float]
    fingerprint: str = "fp_steploop"

    def cards_for(self, tenant: Tenant) -> tuple[ServedModel, ...]:
        """The models that it may use."""
        return tuple(card for card in self.cards if tenant.models is None or card.id in tenant.models)

    def encode(self, prompt: Prompt, param: str = "prompt", marks: StageMarks | None = None) -> tuple[int, ...]:
        """Whatever form a prompt has, as ids.

        Args:
            marks: told of the stages that it passes.

        Raises:
            InvalidRequest: its text is longer than any that fits the context, so that nobody need count its tokens.
        """
        match prompt:
            case IdsPrompt(ids):
                return ids
            case TextPrompt(text, adds_special_tokens):
                self._check_length(text, param)
                if marks is not None:
                    marks.enter(Stage.TOKENIZE)
                return tuple(self.tokenizer.encode(text, adds_special_tokens))
            case ChatPrompt(messages, field_name):
                now = datetime.fromtimestamp(self.unix_clock())
                if marks is not None:
                    marks.enter(Stage.TEMPLATE)
                text = self.chat_template.render(messages, now=now, param=field_name)
                if marks is not None:
                    marks.enter(Stage.TOKENIZE)
                return tuple(self.tokenizer.encode_chat(text))

    def encode_checked(self, prompt: Prompt, param: str, marks: StageMarks | None = None) -> tuple[int, ...]:
        """
        Raises:
            InvalidRequest: the prompt has no token, or leaves no room for one.
        """
        ids = self.encode(prompt, param, marks)
        if not ids:
            raise InvalidRequest("The prompt is empty. Send at least one token.", param)
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(num_tokens=len(ids), limit=self.max_model_len, param=param)
        return ids

    def _check_length(self, text: str, param: str) -> None:
        limit = max_text_chars(self.max_model_len)
        if len(text) > limit:
            but = f"the prompt has {len(text)} characters, and at most {limit} could fit"
            message = context_overflow(self.max_model_len, but, "Shorten the prompt.")
            raise InvalidRequest(message, param, "context_length_exceeded")

    def texts_of(self, prompt: Prompt) -> list[str]:
        """What it says, each field of a message by itself: of names and reasoning too, which templates may show."""
        if isinstance(prompt, ChatPrompt):
            return [text for message in prompt.messages for name, text in message.items() if name != "role"]
        return [prompt.text if isinstance(prompt, TextPrompt) else self.tokenizer.decode(prompt.ids)]

    def text_of(self, prompt: Prompt, skip_special_tokens: bool = True) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return self.tokenizer.decode(self.encode(prompt), skip_special_tokens)


@dataclass(slots=True)
class Lifecycle:
    """What every generation shares. `active` holds the ones in progress, by our request id, with their tenants."""

    reader: PromptReader
    defaults: GenerationDefaults
    backend: Backend
    clock: Clock
    offload: Offload
    metrics: Metrics
    max_body_bytes: int
    admission: Admission
    max_sequences: int  # that the engine runs at once
    deadlines: Deadlines  # of requests whose tenants have none of their own
    idempotency: Idempotency
    ledger: Ledger | None = None
    active: dict[str, tuple[str, Answer]] = field(default_factory=dict)
    _farewell: ServiceError | None = None  # what those are told whose body was still on its way

    def __post_init__(self) -> None:
        self.metrics.num_active = self.active.__len__

    async def generate(
        self, surface: Surface, stream: HttpStream, request_id: str, timings: StageClock, ticket: Ticket
    ) -> Outcome:
        """Answer one generation request.

        Args:
            ticket: whose request it is, and what may still be asked for; its caller lets it in and out.

        Raises:
            ServiceError: nothing of the answer has been sent yet.
        """
        self._check_open()
        tenant, sharing_name = ticket.caller.tenant, ticket.caller.sharing_name
        # As it would be for the most that the body can ask for
        asker = Asker(tenant.priority_of(TOP_CLASS), sharing_name, tenant.share, is_due=True)
        self.admission.check_hope(asker, self.deadlines.replaced_by(tenant.deadlines).ttft_s)
        timings.enter(Stage.BODY, self.clock.monotonic())
        body = await self.read_body(stream, sharing_name)
        claim = self.idempotency.claim(tenant.name, stream.request, body)
        if claim is None:
            return await self._generate_placed(surface, stream, body, request_id, timings, ticket)
        if claim.stored is not None:
            await self._prepare(surface, body, tenant, timings)  # what may be asked is judged as it is now
            timings.enter(Stage.ANSWER, self.clock.monotonic())
            replay(stream, claim.stored, answer_headers(timings))
            return NOTHING_USED
        recording = Recording(stream.carrier, MAX_ANSWER_BYTES)
        stream.move_to(recording)
        try:
            outcome = await self._generate_placed(surface, stream, body, request_id, timings, ticket)
            if outcome.error is None:
                claim.keep(recording, request_id)
            return outcome
        finally:
            claim.leave()

    async def read_body(self, stream: HttpStream, sharing_name: str, most_bytes: float = math.inf) -> bytes:
        """
        Args:
            sharing_name: the caller's.
            most_bytes: that what is asked for can need, where that is less than any body may have.

        Raises:
            ServiceError: there is no room for it, which is told before it is read where its head says how long it is;
                or see HttpStream.read_body.
            ClientDisconnected: the peer left.
        """
        declared = stream.request.header(b"content-length")
        self.admission.check(sharing_name, 0 if declared is None else int(declared))
        return await stream.read_body(round(min(self.max_body_bytes, most_bytes)), sharing_name)

    async def _generate_placed(
        self,
        surface: Surface,
        stream: HttpStream,
        body: bytes,
        request_id: str,
        timings: StageClock,
        ticket: Ticket,
    ) -> Outcome:
        place = self.admission.enter(ticket.caller.sharing_name, len(body))  # others came while this one's body did
        try:
            return await self._generate(surface, stream, body, request_id, timings, ticket, place)
        finally:
            place.leave(self.clock.monotonic())

    async def _generate(
        self,
        surface: Surface,
        stream: HttpStream,
        body: bytes,
        request_id: str,
        timings: StageClock,
        ticket: Ticket,
        place: Place,
    ) -> Outcome:
        tenant = ticket.caller.tenant
        call, prompts = await self._prepare(surface, body, tenant, timings)
        timings.enter(Stage.QUOTA, self.clock.monotonic())
        self._check_open()  # again: the end may have come meanwhile
        deadlines = self.deadlines.replaced_by(tenant.deadlines).narrowed_by(call.deadlines)
        self.metrics.count_unknown_fields(call.unknown_fields)
        context = self._reply_context(call, prompts, request_id)
        body_type = StreamedBody if call.is_stream else WholeBody
        answer = Answer(
            stream,
            body_type(surface, call, context, stream, timings),
            timings,
            self.clock.monotonic,
            self.metrics,
            deadlines,
            place,
        )
        stream.on_disconnect = answer.on_disconnect
        stream.on_blocked, stream.on_unblocked = answer.on_blocked, answer.on_unblocked
        place.end = answer.fail
        self.active[request_id] = tenant.name, answer
        try:
            continues_text = not isinstance(call.prompts[0], ChatPrompt)
            requests = self._requests(call, prompts, request_id, timings, ticket.caller)
            answer.forbidden = rule_book(tenant.text_rules).on_answer
            place.admit(requests, timings.arrived_s + deadlines.ttft_s, self.clock.monotonic())
            if call.is_stream and call.tells_queue:
                answer.news = QueueNews(
                    lambda: place.view(self.clock.monotonic()),
                    len(requests[0].prompt_ids),
                    answer.say,
                )
            entry = self._entry(stream, request_id, call.model, ticket)
            answer.submit(self.backend, requests, continues_text, ticket, entry)
            return await answer.wait_finished()
        finally:
            del self.active[request_id]
            answer.close()

    def _check_open(self) -> None:
        if self._farewell is not None:
            raise self._farewell
        if self.ledger is not None:
            self.ledger.check()

    def fail(self, request_id: str, error: ServiceError) -> None:
        """Break off a generation, if it is in progress."""
        if request_id in self.active:
            self.active[request_id][1].fail(error)

    def cancel(self, request_id: str, tenant: str | None) -> bool:
        """End a generation at its owner's wish, or an operator's.

        Args:
            tenant: None: of any.

        Returns: False: the tenant has none of that id whose answer is still open.
        """
        owner, answer = self.active.get(request_id, (None, None))
        if answer is None or tenant not in (None, owner) or not answer.is_open:
            return False
        answer.fail(ServiceError(ErrorKind.CANCELLED, "The request was cancelled by DELETE.", "request_cancelled"))
        return True

    def fail_all(self, error: ServiceError) -> None:
        """Break off every generation in progress, each with its error event or answer; none begins after it."""
        self._farewell = error
        for request_id, (_, answer) in list(self.active.items()):
            try:
                answer.fail(error)
            except Exception:  # the others are to be told as well
                logger.exception("an answer cannot be broken off", extra={"request_id": request_id})

    async def _prepare(self, surface: Surface, body: bytes, tenant: Tenant, timings: StageClock) -> _Prepared:
        marks = StageMarks(self.clock.monotonic)

        def defaults_of(model: str | None) -> tuple[str, GenerationDefaults]:
            return find_model(self.reader.cards_for(tenant), model).id, self.defaults

        def parse() -> _Prepared:
            marks.enter(Stage.VALIDATE)
            call = surface.parse(body, defaults_of)
            rules = rule_book(tenant.text_rules)
            if rules.on_answer and (param := call.tokens.param) is not None:
                message = f"{param} would tell what the operator's text rules may hold back. Leave it out."
                raise InvalidRequest(message, param, "unsupported_parameter")
            for i, prompt in enumerate(call.prompts if rules.on_prompt or (call.echo and rules.on_answer) else ()):
                param = _param(prompt, i, len(call.prompts))
                rules.check_prompt(self.reader.texts_of(prompt), param, is_echoed=call.echo)
            if call.num_sequences > self.max_sequences:
                raise InvalidRequest(f"n must be at most {self.max_sequences} on this server.", "n")
            prompts = [
                self.reader.encode_checked(prompt, _param(prompt, i, len(call.prompts)), marks)
                for i, prompt in enumerate(call.prompts)
            ]
            marks.enter(Stage.OFFLOAD)
            return call, prompts

        timings.enter(Stage.OFFLOAD, self.clock.monotonic())
        try:
            return await self.compute(parse, len(body))
        finally:
            timings.take_over(marks)

    def _entry(self, stream: HttpStream, request_id: str, model: str, ticket: Ticket) -> Entry | None:
        """Of the ledger, where there is one."""
        if self.ledger is None:
            return None
        request, caller = stream.request, ticket.caller
        client_id = client_request_id(request)
        subject = Subject(request_id, client_id, caller.tenant.name, caller.key_id, model, request.path, ticket.cost)
        return self.ledger.open(subject)

    async def compute(self, work: Callable[[], T], num_bytes: int) -> T:
        """Do what takes as long as the body is large: here, or off the loop if that would stall every stream."""
        if num_bytes < OFFLOAD_BYTES:
            return work()
        return await self.offload(work)

    def _sampling(self, call: GenerationCall, num_prompt_tokens: int) -> SamplingParams:
        """The call's, with max_tokens cut to what the context leaves.

        Raises:
            InvalidRequest: min_tokens is more than that.
        """
        context, min_tokens = self.reader.max_model_len, call.sampling.min_tokens
        max_tokens = min(call.sampling.max_tokens, context - num_prompt_tokens)
        if min_tokens > max(max_tokens, self.defaults.min_tokens):
            but = f"min_tokens is {min_tokens}, and the prompt of {num_prompt_tokens} leaves {max_tokens}"
            message = context_overflow(context, but, "Ask for fewer tokens, or shorten the prompt.")
            raise InvalidRequest(message, "min_tokens", "context_length_exceeded")
        return msgspec.structs.replace(call.sampling, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))

    def _requests(
        self, call: GenerationCall, prompts: list[tuple[int, ...]], request_id: str, timings: StageClock, caller: Caller
    ) -> list[Request]:
        tenant = caller.tenant
        # The server's own deadline is no wish to be served before others
        asked_ttft_s = ANY_TIME.replaced_by(tenant.deadlines).narrowed_by(call.deadlines).ttft_s
        return [
            Request(
                request_id=f"{request_id}-{i}" if i else request_id,
                prompt_ids=ids,
                sampling=self._sampling(call, len(ids)),
                arrival_s=timings.arrived_s,
                num_sequences=call.num_sequences,
                tenant=caller.sharing_name,
                share=tenant.share,
                priority=tenant.priority_of(call.priority),
                deadline_s=timings.arrived_s + asked_ttft_s if asked_ttft_s < math.inf else None,
                tells_progress=call.is_stream and call.tells_queue and i == 0,
                cache_domain=tenant.cache_salt_domain,
                cache_salt=call.cache_salt,
            )
            for i, ids in enumerate(prompts)
        ]

    def _reply_context(self, call: GenerationCall, prompts: list[tuple[int, ...]], request_id: str) -> ReplyContext:
        tokenizer, hides_special = self.reader.tokenizer, call.sampling.skip_special_tokens
        return ReplyContext(
            reply_id=request_id,
            created_s=int(self.clock.unix()),
            model=call.model,
            unix_clock=self.clock.unix,
            fingerprint=self.reader.fingerprint,
            token_str=tokenizer.text_of,
            token_bytes=tokenizer.bytes_of,
            prompt_lengths=tuple(map(len, prompts)),
            prompt_texts=tuple(self.reader.text_of(prompt, hides_special) for prompt in call.prompts)
            if call.echo
            else (),
            prompt_ids=tuple(prompts) if call.echo or call.tokens.returns_ids else (),
            special_ids=tokenizer.special_ids if hides_special else frozenset(),
        )


def _param(prompt: Prompt, position: int, num_prompts: int) -> str:
    """The field that a prompt came in."""
    if isinstance(prompt, ChatPrompt):
        return prompt.param
    return "prompt" if num_prompts == 1 else f"prompt[{position}]"
