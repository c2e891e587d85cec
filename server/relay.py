"""A model that upstreams answer for: passes bodies on and answers back, and counts tokens as they pass. Thread: loop.

    body ─▶ Relay.prepare ─▶ Relay.submit: RelayHandle ─ a slot, a connection ─▶ upstream
    client ◀─ PassedStream, PassedWhole ◀─ RelayedDelta ◀─ events, one by one ◀─┘

The gate's work and the ledger are the generation's (server/generation.py). Of a body only `model`, `stream_options` and
`priority` are rewritten, and `cache_salt` for upstreams of our own; of an answer, its id and model. All else passes.

Tokens are those of the upstream's usage. Until it comes, a prompt counts by the model's tokenizer if it is here, as a
third of its bytes otherwise, and an event with text as a token: that is what is billed of an answer that is broken off.
Of a document it is a third of the bytes. It is never more than the request and the model's context allow, and nothing
of what is no answer.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.thoughts import ThoughtFollower
from core.types import LOWEST_CLASS, TOP_CLASS, Cost, Delta, FinishReason, SamplingParams, Usage
from server.api import chat, completions, infill, messages, ollama, responses
from server.api.decoding import convert, parse_object
from server.api.fields import GenerationCall, MaxTokens, RequestLimits
from server.api.models import ServedModel, adapter_card
from server.api.replies import Extras, ReplyContext, Surface, error_event, usage_object
from server.backend import CountTokens
from server.clock import Clock
from server.engine_client import NOT_YET, DeltaSink, LoopWork
from server.gate.admission import Admission
from server.gate.identity import Caller
from server.gate.quota import NEVER
from server.gate.tenants import ANY_TIME, LOCAL_NAME, DeadlineTable, Tenant
from server.gate.text_rules import Matcher, rule_book
from server.observing.accounting import current_trace
from server.observing.timing import Stage, StageMarks
from server.upstream.connection import Connection
from server.upstream.exchange import AnswerHead, Exchange, UpstreamFault
from server.upstream.pool import LeadingBlocks, Pool, Upstream, leading_blocks, leading_token_blocks
from server.upstream.settings import ModelSettings, keep_alive_of
from server.wire import sse

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 3  # fewer than tokenizers make of text: an estimate that reserves enough
MAX_EVENT_BYTES = 8 * 1024 * 1024
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
TELL_S, TELL_EVERY_S = 1.0, 0.01  # what a cancelled request has used, by its upstream
LINGER_S = 2.0  # after the last event, for the answer's end
MANY_TOKENS = 2**31  # where a request sets no bound
ASK_S = 60.0  # for an answer that no generation writes
# As templates order them, and as /infill puts them before its prompt
PROMPT_FIELDS = (
    *("tools", "system", "instructions", "messages"),
    *("input_extra", "input_prefix", "prompt", "input", "suffix", "input_suffix"),
)
REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_output_tokens": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
    "max_tokens": FinishReason.LENGTH,  # messages
    "tool_use": FinishReason.TOOL_CALLS,
    "refusal": FinishReason.CONTENT_FILTER,
    "limit": FinishReason.LENGTH,  # infill
}
_LINE_END = re.compile(rb"\n")
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DONE = b"[DONE]"


# The surfaces, as they pass.


INFILL = b"/infill"


@dataclass(frozen=True, slots=True)
class Passage:
    """One surface: where it is asked, and what its answers' ids begin with."""

    path: bytes
    prefix: str

    @property
    def has_chunks(self) -> bool:
        """Chat and completions: chunks of choices, then [DONE]. The others name their events."""
        return self.prefix in ("chatcmpl-", "cmpl-")

    @property
    def is_parts(self) -> bool:
        """Ollama's and /infill, of servers of our own alone: objects without an id, the last with what was used."""
        return not self.prefix

    @property
    def is_lines(self) -> bool:
        """Ollama's: on lines."""
        return self.is_parts and self.path != INFILL


PASSAGES = {
    chat.SURFACE: Passage(b"/v1/chat/completions", "chatcmpl-"),
    completions.SURFACE: Passage(b"/v1/completions", "cmpl-"),
    responses.SURFACE: Passage(b"/v1/responses", "resp_"),
    messages.SURFACE: Passage(b"/v1/messages", messages.ID_PREFIX),
    ollama.CHAT: Passage(b"/api/chat", ""),
    ollama.GENERATE: Passage(b"/api/generate", ""),
    infill.SURFACE: Passage(INFILL, ""),
}


class RelayedDelta(Delta, frozen=True, kw_only=True):
    """What has come, as it goes out.

    Args:
        event: whole events of a stream, or the document.
        is_last: it is written once the answer is settled.
    """

    event: bytes = b""
    is_last: bool = False


class PassedStream:
    """StreamReply of events that an upstream has written."""

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._last = b""

    def start(self) -> bytes:
        return b""

    def text(self, choice: int, text: str) -> bytes:
        raise AssertionError("texts come in deltas")

    def text_frame(self, choice: int) -> None:
        return None

    def delta(self, choice: int, delta: Delta) -> bytes:
        assert isinstance(delta, RelayedDelta)
        if not delta.is_last:
            return delta.event
        self._last += delta.event
        return b""

    def end(self, usage: Usage, extras: Extras) -> bytes:
        if not _passage(self._call).has_chunks:
            return self._last
        more: dict[str, Any] = dict(extras)
        if not self._last and self._call.includes_usage:  # it was ended here
            more["usage"] = usage_object(usage)
        if not more:
            return self._last + sse.DONE
        context = self._context
        envelope = {"id": _passage(self._call).prefix + context.reply_id, "model": context.model, "choices": []}
        return self._last + sse.event(sse.json_line(envelope | more)) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        if _passage(self._call).prefix == messages.ID_PREFIX:
            return sse.event(messages.ERRORS.body(error, self._context.reply_id), "error")
        if _passage(self._call).is_lines:
            return ollama.ERRORS.body(error, "") + b"\n"
        return error_event(error)


class PassedWhole:
    """Likewise of a document (WholeReply)."""

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self.texts: list[list[str]] = []
        self._document = b""

    def add(self, choice: int, delta: Delta) -> None:
        assert isinstance(delta, RelayedDelta)
        self._document += delta.event

    def end(self, usage: Usage, extras: Extras) -> bytes:
        return self._document


def _passage(call: GenerationCall) -> Passage:
    found = call.wire
    assert isinstance(found, Passage)
    return found


# Requests.


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate must know of a body; the rest is the upstream's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    max_output_tokens: MaxTokens | None = None
    priority: Annotated[int, msgspec.Meta(ge=LOWEST_CLASS, le=TOP_CLASS)] | None = None
    deadlines: DeadlineTable | None = None
    cache_salt: str | None = None
    timings: dict[str, Any] | bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    response_fields: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None


@dataclass(frozen=True, slots=True)
class Passed:
    """A body, ready to be sent: `Prompts` of a relay."""

    call: GenerationCall
    body: bytes  # for the model's own upstreams
    prompt: LeadingBlocks
    tells_tokens: bool
    tenant_salt: str | None  # for upstreams of our own
    asked_salt: str | None  # for others
    keep_alive_s: float | None  # as Ollama's clients ask
    response_fields: list[str] | None  # of /infill, cut out here: the rest tells what was used
    prompts: tuple[tuple[int, ...], ...] = ()
    table: None = None
    continues_text: bool = False


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
        work: LoopWork | None = None,
    ) -> None:
        self.pool = pool
        self.admission = admission
        self.work = work or LoopWork()
        self.fallbacks: tuple[Pool, ...] = ()
        self.make_compiler = None
        self.clock = clock
        self._limits = request_limits
        self._count = count
        settings = pool.settings
        created_s = int(clock.unix())
        card = ServedModel(id=settings.name, created_s=created_s, max_model_len=settings.max_model_len)
        self.cards: tuple[ServedModel, ...] = (
            card,
            *(msgspec.structs.replace(card, id=name, alias_of=card.id) for name in settings.aliases),
            *(adapter_card(card, name, Path(at).name if at else name) for name, at in settings.adapters.items()),
        )

    def note_length(self, max_model_len: int) -> None:
        """The model's context is known now."""
        self.cards = tuple(msgspec.structs.replace(card, max_model_len=max_model_len) for card in self.cards)

    # PromptSource.

    def prepare(self, surface: Surface, body: bytes, tenant: Tenant, marks: StageMarks) -> Passed:
        """
        Raises:
            InvalidRequest: a field that the gate must know is wrong, or a text rule is broken.
            ServiceError: the tenant's text rules hold for answers.
        """
        marks.enter(Stage.VALIDATE)
        fields = parse_object(body)
        asked = convert(fields, _Asked, {})
        passage = PASSAGES.get(surface)
        if passage is None or (passage.is_parts and not self.pool.settings.trusted):
            paths = ", ".join(one.path.decode() for one in PASSAGES.values() if not one.is_parts)
            raise InvalidRequest(f"Another server answers for this model, on {paths} alone. Ask there.", "model")
        if passage.is_lines:
            is_chat = surface is ollama.CHAT
            what = ("messages",) if is_chat else ("prompt", "suffix")
            if all(fields.get(name) in (None, "", []) for name in what):
                model = (asked.model or self.pool.settings.name).removesuffix(ollama.LATEST)
                raise ollama.NothingAsked(model, is_chat, asked.keep_alive)
        rules = rule_book(tenant.text_rules)
        if rules.on_answer:
            message = (
                "Text rules of your tenant hold for answers, which this model's server cannot be held to."
                " Use a model of this server itself, or ask the operator."
            )
            raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied", "model")
        num_bytes = num_ids = 0
        all_texts: list[str] = []
        for name in PROMPT_FIELDS:
            texts: list[str] = []
            for leaf in _leaves(fields.get(name)):
                if isinstance(leaf, str):
                    texts.append(leaf)
                    num_bytes += 0 if leaf.startswith("data:") else len(leaf.encode("utf-8", "replace"))
                else:
                    num_ids += 1
            rules.check_prompt(texts, name)
            all_texts += texts
        keep_alive_s = keep_alive_asked(asked.keep_alive) if passage.is_lines else None
        call = self._call(asked, fields, passage, tenant)
        salt = _salt_of(tenant, asked.cache_salt)
        is_cut = passage.path == INFILL and not call.is_stream
        response_fields = fields.pop("response_fields", None) if is_cut else None
        if call.is_stream and passage.has_chunks:
            fields["stream_options"] = (fields.get("stream_options") or {}) | {"include_usage": True}
        if asked.priority is not None:
            fields["priority"] = tenant.priority_of(asked.priority)
        _address_to(self.pool.settings, fields, salt, asked.cache_salt)
        marks.enter(Stage.OFFLOAD)
        domain = f"{tenant.cache_salt_domain} {asked.cache_salt}"
        if asked.model in self.pool.settings.adapters:
            domain += f" {asked.model}"
        prompt = None if self._count is None else self._counted(self._count, surface, body, domain, marks)
        if prompt is None:
            num_prompt_tokens = max(1, num_ids + -(-num_bytes // BYTES_PER_TOKEN))
            prompt = leading_blocks(domain, all_texts, num_prompt_tokens)
        salts = salt, asked.cache_salt
        return Passed(call, sse.json_line(fields), prompt, call.is_stream, *salts, keep_alive_s, response_fields)

    def _counted(
        self, count: CountTokens, surface: Surface, body: bytes, domain: str, marks: StageMarks
    ) -> LeadingBlocks | None:
        """None: this server cannot read the body; the upstream may."""
        marks.enter(Stage.TOKENIZE)
        try:
            return leading_token_blocks(domain, count(surface, body))
        except ServiceError:
            return None

    def _call(self, asked: _Asked, fields: dict[str, Any], passage: Passage, tenant: Tenant) -> GenerationCall:
        prompt, num_prompts = fields.get("prompt"), 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        limits, n = self._limits, asked.n or 1
        for param, num, most in (("n", n, limits.num_choices), ("prompt", num_prompts, limits.num_prompts)):
            if num > most:
                raise InvalidRequest(f"{param} asks for {num}, and at most {most} are allowed.", param)
        max_tokens = asked.max_completion_tokens or asked.max_tokens or asked.max_output_tokens or MANY_TOKENS
        name, is_stream = asked.model or self.pool.settings.name, bool(asked.stream)
        if passage.is_parts:
            num_predict = (asked.options or {}).get("num_predict") if passage.is_lines else fields.get("n_predict")
            max_tokens = num_predict if isinstance(num_predict, int) and num_predict > 0 else max_tokens
        if passage.is_lines:
            name, is_stream = name.removesuffix(ollama.LATEST), asked.stream is not False
        return GenerationCall(
            model=name,
            prompts=(),
            sampling=SamplingParams(max_tokens=min(max_tokens, MANY_TOKENS)),
            num_sequences=n * num_prompts,
            priority=asked.priority,
            deadlines=ANY_TIME if asked.deadlines is None else ANY_TIME.replaced_by(asked.deadlines),
            is_stream=is_stream,
            tells_queue=isinstance(asked.timings, dict) and asked.timings.get("queue") is True,
            includes_usage=bool((asked.stream_options or {}).get("include_usage")),
            wire=passage,
        )

    def requests_of(self, prepared: Passed, request_id: str, arrived_s: float, caller: Caller) -> list[RelayDemand]:
        call, tenant = prepared.call, caller.tenant
        asked_s = ANY_TIME.replaced_by(tenant.deadlines).narrowed_by(call.deadlines).ttft_s
        demand = RelayDemand(
            request_id=request_id,
            passed=prepared,
            num_prompt_tokens=prepared.prompt.num_tokens,
            max_tokens=call.sampling.max_tokens,
            num_sequences=call.num_sequences,
            tenant=caller.sharing_name,
            share=tenant.share,
            priority=tenant.priority_of(call.priority),
            deadline_s=arrived_s + asked_s if asked_s < float("inf") else None,
        )
        return [demand]

    def reply_context(self, prepared: Passed, request_id: str) -> ReplyContext:
        unix = self.clock.unix
        return ReplyContext(request_id, int(unix()), prepared.call.model, unix, "", str, lambda token_id: b"")

    def follow_thought(self, call: GenerationCall) -> None:
        return None

    def surface_of(self, surface: Surface) -> Surface:
        return surface._replace(stream=PassedStream, whole=PassedWhole)  # type: ignore[arg-type]  # a WholeReply's methods

    # TokenSource.

    def submit(
        self,
        request: RelayDemand,
        sink: DeltaSink,
        table: None,
        continues_text: bool,
        first_choice: int = 0,
        forbidden: Sequence[Matcher] = (),
        follow: Callable[[], ThoughtFollower | None] = lambda: None,
    ) -> "RelayHandle":
        """Arguments beyond the sink are the engine's: an upstream does that by itself."""
        if request.passed.keep_alive_s is not None:
            self.pool.keep(request.passed.keep_alive_s)
        return RelayHandle(self, request, sink)

    # What only counts or cuts tokens.

    async def ask(self, path: str, body: bytes, caller: Caller) -> bytes:
        """The answer of a server of our own.

        Raises:
            InvalidRequest: the body is no JSON object.
            ServiceError: the model's server is another's, or refuses, or fails.
        """
        pool, tenant = self.pool, caller.tenant
        if not pool.settings.trusted:
            message = f"The server that answers for this model has no {path} that is known here. Ask another model's."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "not_found", "model")
        fields = parse_object(body)
        _address_to(pool.settings, fields, _salt_of(tenant, fields.get("cache_salt")), fields.get("cache_salt"))
        slot = pool.take_slot(leading_blocks("", (), 0), tenant.priority_of(None), caller.sharing_name)
        try:
            await slot.granted
            assert slot.upstream is not None
            connection = await slot.upstream.connection()
            json = ((b"content-type", b"application/json"),)
            outgoing = pool.request(slot.upstream, b"POST", path.encode(), json, sse.json_line(fields))
            async with asyncio.timeout(ASK_S):
                head, answer = await connection.ask(outgoing, MAX_DOCUMENT_BYTES)
        except UpstreamFault as fault:
            raise pool.error_of(fault) from fault
        except TimeoutError as error:
            raise pool.error_of(UpstreamFault(f"it has not answered in {ASK_S:g} s")) from error
        finally:
            slot.granted.cancel()
            slot.leave()
        if head.status != 200:
            raise refusal_of(head.status, answer, head)
        return answer


def _salt_of(tenant: Tenant, asked: Any) -> str | None:
    """For upstreams of our own, which know no tenants."""
    if tenant.name == LOCAL_NAME:
        return None
    return sha256(f"{tenant.cache_salt_domain}\0{asked or ''}".encode("utf-8", "replace")).hexdigest()


def keep_alive_asked(value: str | float | None) -> float | None:
    """Seconds. Raises InvalidRequest."""
    try:
        return None if value is None else keep_alive_of(value)
    except ValueError as error:
        raise InvalidRequest(f"{error}.", "keep_alive") from error


def _address_to(
    settings: ModelSettings, fields: dict[str, Any], tenant_salt: str | None, asked_salt: str | None
) -> None:
    """What an upstream of these settings gets in place of what the client has sent."""
    fields["model"] = settings.name_there(fields.get("model"))
    salt = tenant_salt if settings.trusted and tenant_salt is not None else asked_salt
    fields.pop("cache_salt", None)
    if salt is not None:
        fields["cache_salt"] = salt


def _leaves(value: Any) -> Iterator[str | int]:
    """The texts and numbers in JSON. Its depth is bounded by the parser."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        yield value


# Answers.


_Count = Annotated[int, msgspec.Meta(le=2**53)]  # more tokens than there are: an event that says so cannot be read


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Of chat and completions, of responses, and of messages."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None  # of messages, beside input_tokens
    cache_read_input_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        read = max(0, self.cache_read_input_tokens or 0)
        beside = read + max(0, self.cache_creation_input_tokens or 0)
        prompt = max(0, self.prompt_tokens or self.input_tokens or 0) + beside
        completion = max(0, self.completion_tokens or self.output_tokens or 0)
        of_prompt = self.prompt_tokens_details or self.input_tokens_details or _Details()
        of_completion = self.completion_tokens_details or self.output_tokens_details or _Details()
        return Usage(
            num_prompt_tokens=prompt,
            num_completion_tokens=completion,
            num_cached_tokens=min(max(0, of_prompt.cached_tokens or read), prompt),
            num_thought_tokens=min(max(0, of_completion.reasoning_tokens or 0), completion),
        )


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: dict[str, Any] | None = None
    text: Any = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        said = (self.text, *(value for name, value in (self.delta or {}).items() if name != "role"))
        return any(said)


class _Why(msgspec.Struct, frozen=True):
    reason: str | None = None  # of incomplete_details
    stop_reason: str | None = None  # of a message's delta


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """An event or a document, of any surface, or the one within it."""

    id: str | None = None
    type: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    # Of responses and messages
    response: "_Message | str | None" = None
    message: "_Message | str | None" = None
    delta: _Why | str | None = None
    incomplete_details: _Why | None = None
    stop_reason: str | None = None
    # Of Ollama's lines
    done: bool = False
    done_reason: str | None = None
    prompt_eval_count: _Count = 0
    eval_count: _Count = 0
    # Of infill
    stop: Any = None
    stop_type: str | None = None
    tokens_evaluated: _Count = 0
    tokens_predicted: _Count = 0
    tokens_cached: _Count = 0

    @property
    def part_usage(self) -> Usage:
        """Of the last part of Ollama's and of infill."""
        num_prompt = self.prompt_eval_count or self.tokens_evaluated
        return Usage(num_prompt, self.eval_count or self.tokens_predicted, min(self.tokens_cached, num_prompt))

    @property
    def part_reason(self) -> FinishReason:
        return REASONS.get(self.done_reason or self.stop_type or "", FinishReason.STOP)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Of GET /v1/requests/{id}."""

    state: str | None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None


_read_record = msgspec.json.Decoder(_Record).decode
_encode = msgspec.json.encode
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_message = msgspec.json.Decoder(_Message, strict=False).decode


@dataclass(slots=True, eq=False)
class RelayedSequence:
    """One choice, as it passes: `SequenceTimes`."""

    choice: int
    mark: int
    num_tokens: int = 0
    is_finished: bool = False
    last_s: float = NOT_YET
    discounted_s: float = NOT_YET

    @property
    def waits_since_s(self) -> float:
        return max(self.last_s, self.discounted_s)


@dataclass(slots=True, eq=False)
class _Events:
    """Splits a stream into events' data, or into lines; comments are dropped."""

    are_lines: bool = False
    _buffer: bytearray = field(default_factory=bytearray)

    def push(self, data: bytes) -> Iterator[tuple[bytes | None, bytes]]:
        """Each with its name. Raises UpstreamFault: one is too large."""
        searched = max(0, len(self._buffer) - 3)
        self._buffer += data
        end = _LINE_END if self.are_lines else _EVENT_END
        while (match := end.search(self._buffer, searched)) is not None:
            raw = bytes(self._buffer[: match.start()])
            del self._buffer[: match.end()]
            searched = 0
            if self.are_lines:
                yield None, raw
                continue
            if raw.startswith(b"data: ") and b"\n" not in raw and b"\r" not in raw:  # most are
                yield None, raw[6:]
                continue
            name, lines = None, []
            for line in raw.splitlines():
                key, _, value = line.partition(b":")
                if key == b"data":
                    lines.append(value.removeprefix(b" "))
                elif key == b"event":
                    name = value.removeprefix(b" ")
            if lines:
                yield name, b" ".join(lines)  # in JSON, a line break is but space
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise UpstreamFault(f"an event is larger than {MAX_EVENT_BYTES} bytes")


class RelayHandle:
    """A request on its way to an upstream and back: the `Handle` of a relay, and the `Reader` of its answer.

    It goes out in the turn in which it is submitted, if an upstream has room and an open connection; otherwise a task
    waits for that. Until the head of an answer has come that is passed on, it may be sent elsewhere: once within a
    pool, and to the fallbacks.
    """

    def __init__(self, relay: Relay, request: RelayDemand, sink: DeltaSink) -> None:
        call = request.passed.call
        self.request = request
        self.sink = sink
        self.cost = Cost()
        self.sequences = [RelayedSequence(i, sink.on_mark(i, 0)) for i in range(request.num_sequences)]
        self._relay = relay
        self._call = call
        self._passage = _passage(call)
        own_id = self._passage.prefix + request.request_id
        self._names = {"id": msgspec.Raw(sse.json_string(own_id)), "model": msgspec.Raw(sse.json_string(call.model))}
        self._events = _Events(self._passage.is_lines)
        self._usage: Usage | None = None
        self._is_paused = False
        self._is_done = False  # the last event has come
        self._is_cancelled = self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._linger: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._fallbacks = list(relay.fallbacks)
        self._body = request.passed.body
        self._trace = current_trace.get()
        self._enter(relay.pool)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_thought_tokens(self) -> int:
        """As far as the upstream has told."""
        return 0 if self._usage is None else self._usage.num_thought_tokens

    # Called by its owner.

    def cancel(self, reason: FinishReason) -> None:
        """End it; the upstream hears of it in this turn. on_end comes later in the loop. Idempotent."""
        if self._has_ended or self._is_cancelled:
            return
        upstream, exchange = self._slot.upstream, self._exchange
        is_told = exchange is not None and not exchange.is_over and self._pool.settings.trusted
        self._stop()
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
        if not self._call.is_stream or not self._passage.has_chunks:
            message = "The token quota was used up before the answer was complete. Ask for fewer tokens at once."
            self.sink.fail(ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded"))
            return
        for sequence in unfinished:
            sequence.is_finished = True
            content: dict[str, Any] = {"delta": {}} if self._passage.prefix == "chatcmpl-" else {"text": ""}
            line = {
                "id": self._passage.prefix + self.request.request_id,
                "model": self._call.model,
                "choices": [{"index": sequence.choice, **content, "finish_reason": reason.value}],
            }
            event = sse.event(sse.json_line(line))
            self.sink.on_delta(
                sequence.choice, RelayedDelta(text="", num_tokens=0, finish_reason=reason, event=event), now_s
            )
        self.cancel(reason)

    def pause(self) -> None:
        self._is_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._exchange is not None:
            self._exchange.resume()

    # On its way out.

    def _enter(self, pool: Pool) -> None:
        request = self.request
        self._pool = pool
        self._may_retry = True
        self._slot = pool.take_slot(request.passed.prompt, request.priority, request.tenant)
        self._go()

    def _go(self) -> None:
        """Send the request, now or once it can be."""
        self._head: AnswerHead | None = None
        self._document = bytearray()  # or what it is refused with
        upstream = self._slot.upstream
        connection = None if upstream is None else upstream.free_connection()
        if connection is None:
            self._task = asyncio.create_task(self._wait())
        else:
            self._send(connection)

    async def _wait(self) -> None:
        with self._held():
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

    def _send(self, connection: Connection) -> None:
        now_s, pool = self._loop.time(), self._pool
        self.sink.on_upstream(self._upstream.shown, None if pool is self._relay.pool else pool.settings.name)
        self.sink.on_stage(Stage.QUEUE, Stage.UPSTREAM_CONNECT, now_s)
        self.sink.on_stage(Stage.UPSTREAM_CONNECT, Stage.PREFILL, now_s)
        fields = [
            (b"content-type", b"application/json"),
            (b"accept", b"text/event-stream" if self._call.is_stream else b"application/json"),
            (b"x-request-id", self.request.request_id.encode()),
        ]
        if self._trace is not None:
            fields.append((b"traceparent", self._trace.value))
        outgoing = pool.request(self._upstream, b"POST", self._passage.path, tuple(fields), self._body)
        self._exchange = connection.send(outgoing, self)
        if self._is_paused:
            self._exchange.pause()

    def _lose(self, fault: UpstreamFault) -> None:
        """No answer has come."""
        self._pool.note_outcome(self._upstream, False)
        if not self._move(str(fault)):
            self._fall_back(self._pool.error_of(fault))

    def _be_refused(self, head: AnswerHead) -> None:
        if head.status == 503 and self._move("it refuses requests"):
            return
        error = refusal_of(head.status, bytes(self._document), head)
        if head.status >= 500 or head.status == 429:
            self._fall_back(error)
        else:
            self._refuse(error)

    def _move(self, why: str) -> bool:
        """Send it to another upstream. False: it cannot be."""
        failed = self._upstream
        other = self._pool.move(self._slot) if self._may_retry else None
        if other is None:
            return False
        logger.warning("the upstream %s failed: %s: %s is asked", failed.url, why, other.url)
        self._may_retry = False
        self._go()
        return True

    def _fall_back(self, error: ServiceError) -> None:
        """Send it to another model's upstreams, if there are any."""
        if not self._fallbacks:
            self._refuse(error)
            return
        passed, pool = self.request.passed, self._fallbacks.pop(0)
        logger.warning("%s is asked instead of %s: %s", pool.settings.name, self._call.model, error)
        self._slot.leave()
        fields = msgspec.json.decode(passed.body)
        _address_to(pool.settings, fields, passed.tenant_salt, passed.asked_salt)
        self._body = sse.json_line(fields)
        self._enter(pool)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """What goes wrong with this answer ends it, and no other of the connection."""
        try:
            yield
        except UpstreamFault as fault:
            self._pool.note_outcome(self._upstream, False)
            self._fail(self._pool.error_of(fault))
        except Exception:
            logger.exception("a request cannot be passed on", extra={"request_id": self.request.request_id})
            self._fail(ServiceError(ErrorKind.ENGINE, "The server failed to pass this request on.", "internal_error"))

    # What the upstream sends: exchange.Reader.

    def on_head(self, head: AnswerHead) -> None:
        self._head = head
        self._pool.note_outcome(self._upstream, head.status < 500 or head.status == 503)

    def on_data(self, data: bytes) -> None:
        assert self._head is not None
        is_refusal = self._head.status != 200
        begun_s = self._loop.time()
        with self._held():
            if self._call.is_stream and not is_refusal:
                for name, event in self._events.push(data):
                    if not (self._is_done or self._is_cancelled):
                        self._take_event(name, event, begun_s)
            else:
                self._document += data
                if len(self._document) > (most := MAX_ERROR_BYTES if is_refusal else MAX_DOCUMENT_BYTES):
                    self._document.clear()  # it is no answer
                    raise UpstreamFault(f"its answer is larger than {most} bytes")
        self._relay.work.busy_s += self._loop.time() - begun_s

    def on_end(self, fault: UpstreamFault | None) -> None:
        with self._held():
            if self._head is None:
                self._lose(fault or UpstreamFault("its answer has no head"))
                return
            if self._head.status != 200:
                self._be_refused(self._head)
                return
            if fault is None and not self._call.is_stream:
                document, self._document = bytes(self._document), bytearray()  # it may be no answer
                self._take_document(document, self._loop.time())
                self._document += document
            if not (self._is_done or all(one.is_finished for one in self.sequences)):
                raise fault or UpstreamFault("its answer ends in the middle")
            self._end()

    @property
    def _upstream(self) -> Upstream:
        assert self._slot.upstream is not None
        return self._slot.upstream

    def _take_event(self, name: bytes | None, data: bytes, now_s: float) -> None:
        if data == _DONE:
            self._be_done()
            return
        message = _decoded(data)
        if message.error is not None and message.type in (None, "error"):
            raise UpstreamFault(f"it ended its answer with an error: {_told(message.error)}")
        if self._passage.is_parts:
            begin, end = (b"", b"\n") if self._passage.is_lines else (sse.event_head(None), sse.EVENT_END)
            self._take_part(message, begin + self._renamed(data) + end, now_s)
            return
        inner = next((one for one in (message.response, message.message) if isinstance(one, _Message)), None)
        for told in (message.usage, None if inner is None else inner.usage):
            if told is not None:
                self._note_usage(told.usage())
        framed = (
            sse.event_head(None if name is None else name.decode("ascii", "replace"))
            + self._renamed(data)
            + sse.EVENT_END
        )
        if not self._passage.has_chunks:
            self._take_named_event(message, framed, now_s)
        elif message.choices:
            self._take_choices(message.choices, framed, now_s)
        elif self._call.includes_usage or message.usage is None:
            self._write(0, framed, now_s, is_last=True)

    def _take_part(self, message: _Message, framed: bytes, now_s: float) -> None:
        """Of Ollama's, or of infill."""
        (sequence,) = self.sequences
        if not (message.done or message.stop is True):
            self._count(sequence, now_s)
            self._write(0, framed, now_s)
            return
        self._usage = message.part_usage
        sequence.is_finished = True
        self._write(0, framed, now_s, message.part_reason, is_last=True)
        self._be_done()

    def _take_choices(self, choices: list[_Choice], framed: bytes, now_s: float) -> None:
        for choice in choices:
            sequence = self._sequence(choice.index)
            if choice.has_text:
                self._count(sequence, now_s)
            reason = None
            if choice.finish_reason is not None and not sequence.is_finished:
                sequence.is_finished = True
                reason = REASONS.get(choice.finish_reason, FinishReason.STOP)
            self._write(choice.index, framed, now_s, reason)
            framed = b""

    def _take_named_event(self, message: _Message, framed: bytes, now_s: float) -> None:
        """Of responses or messages."""
        kind, (sequence,) = message.type or "", self.sequences
        response = message.response if isinstance(message.response, _Message) else None
        if kind == "response.failed":
            raise UpstreamFault(f"it ended its answer with an error: {_told(response and response.error)}")
        if kind.endswith(".delta") or kind == "content_block_delta":
            self._count(sequence, now_s)
        if kind in ("message_delta", "message_stop"):
            reason = None
            if kind == "message_delta" and not sequence.is_finished:
                stop = message.delta.stop_reason if isinstance(message.delta, _Why) else None
                sequence.is_finished, reason = True, REASONS.get(stop or "", FinishReason.STOP)
            self._write(0, framed, now_s, reason, is_last=True)
            if kind == "message_stop":
                self._be_done()
            return
        if kind not in ("response.completed", "response.incomplete") or response is None:
            self._write(0, framed, now_s)
            return
        sequence.is_finished = True
        self._write(0, framed, now_s, _reason_of(response.incomplete_details), is_last=True)
        self._be_done()

    def _take_document(self, data: bytes, now_s: float) -> None:
        message = _decoded(data)
        if self._passage.is_parts:
            reasons = {0: message.part_reason}
        elif self._passage.prefix == messages.ID_PREFIX:
            reasons = {0: REASONS.get(message.stop_reason or "", FinishReason.STOP)}
        elif not self._passage.has_chunks:
            reasons = {0: _reason_of(message.incomplete_details)}
        else:
            reasons = {
                one.index: REASONS.get(one.finish_reason or "stop", FinishReason.STOP) for one in message.choices
            }
        if message.error is not None or not reasons or not all(0 <= one < len(self.sequences) for one in reasons):
            raise UpstreamFault("its answer is not one of the kind that was asked for")
        document = self._renamed(data)
        if self._passage.is_parts:
            self._usage = message.part_usage
        elif message.usage is not None:
            self._usage = message.usage.usage()
        if (asked := self.request.passed.response_fields) is not None:
            document = _encode(infill.shown(msgspec.json.decode(document), asked))
        for index, reason in reasons.items():
            self._count(self.sequences[index], now_s)
            self._write(index, document, now_s, reason)
            document = b""
        for sequence in self.sequences:
            sequence.is_finished = True

    def _sequence(self, index: int) -> RelayedSequence:
        if not 0 <= index < len(self.sequences):
            raise UpstreamFault(f"its answer has a choice {index}, of {len(self.sequences)} that were asked for")
        return self.sequences[index]

    def _count(self, sequence: RelayedSequence, now_s: float) -> None:
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
        self, choice: int, event: bytes, now_s: float, reason: FinishReason | None = None, is_last: bool = False
    ) -> None:
        if self._has_ended or self._is_cancelled:
            return
        delta = RelayedDelta(text=" ", num_tokens=0, finish_reason=reason, event=event, is_last=is_last)
        self.sink.on_delta(choice, delta, now_s)

    def _note_usage(self, usage: Usage) -> None:
        """The latest counts; messages tell those of the prompt at the start alone."""
        before = self._usage
        if before is not None and not usage.num_prompt_tokens:
            counts = {"num_prompt_tokens": before.num_prompt_tokens, "num_cached_tokens": before.num_cached_tokens}
            usage = msgspec.structs.replace(usage, **counts)
        self._usage = usage

    def _renamed(self, data: bytes) -> bytes:
        """With our id and the name that was asked for, also of the response or message in an event."""
        fields = _read_fields(data)
        for name in ("response", "message"):
            if (inner := fields.get(name)) is not None and bytes(inner).startswith(b"{"):
                fields[name] = msgspec.Raw(_encode(self._renamed_fields(_read_fields(inner))))
        return _encode(self._renamed_fields(fields))

    def _renamed_fields(self, fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        for name, own in self._names.items():
            if name in fields:
                fields[name] = own
        return fields

    # Its end.

    def _be_done(self) -> None:
        """The last event has come: the answer's end follows, or is not waited for long."""
        self._is_done = True
        for sequence in self.sequences:
            sequence.is_finished = True
        self._linger = self._loop.call_later(LINGER_S, self._end)

    def _fail(self, error: ServiceError, is_refusal: bool = False) -> None:
        if not self._has_ended:
            self.sink.fail(error, is_refusal)  # which cancels
            self.cancel(FinishReason.ERROR)

    def _refuse(self, error: ServiceError) -> None:
        """No answer has begun. An upstream that failed may have computed something."""
        self._fail(error, error.kind is not ErrorKind.UPSTREAM)

    def _stop(self) -> None:
        """Nothing more is taken from the upstream."""
        self._is_cancelled = True
        for sequence in self.sequences:
            sequence.is_finished = True
        if self._task is not None:
            self._task.cancel()
        if self._exchange is not None:
            self._exchange.cancel()
        self._slot.granted.cancel()
        self._slot.leave()

    async def _end_as_told(self, upstream: Upstream) -> None:
        """After a cancel: with the usage that a server of our own records under our id, if it tells in time."""
        path = b"/v1/requests/" + self.request.request_id.encode()
        try:
            async with asyncio.timeout(TELL_S):
                while (usage := await self._usage_told(upstream, path)) is None:
                    await asyncio.sleep(TELL_EVERY_S)
            self._usage = usage
        except (TimeoutError, UpstreamFault, msgspec.DecodeError) as error:
            logger.info("an upstream does not tell what a cancelled request has used: %r", error)
        self._end()

    async def _usage_told(self, upstream: Upstream, path: bytes) -> Usage | None:
        """None: the request is still in progress there. Raises UpstreamFault or DecodeError."""
        connection = await upstream.connection()
        head, body = await connection.ask(self._pool.request(upstream, b"GET", path), MAX_ERROR_BYTES)
        if head.status != 200:
            raise UpstreamFault(f"it answers with the status {head.status}")
        record = _read_record(body)
        if record.state not in ("done", "failed"):
            return None
        counts = record.num_prompt_tokens, record.num_completion_tokens, record.num_cached_tokens
        return Usage(*(one or 0 for one in counts))

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self._linger is not None:
            self._linger.cancel()
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None  # which refers back: all is freed without the garbage collector
        self._slot.leave()
        try:
            self.sink.on_end(self._usage or self._estimated(), None)
        except Exception:  # there is nothing left to cancel
            logger.exception("an answer cannot be ended", extra={"request_id": self.request.request_id})

    def _estimated(self) -> Usage:
        """Of an answer whose usage has not come."""
        request, num_tokens = self.request, self.num_tokens
        if self._head is not None and self._head.status == 200 and self._document.lstrip().startswith(b"{"):
            num_tokens = max(num_tokens, len(self._document) // BYTES_PER_TOKEN)
        most = min(request.max_tokens, self._relay.cards[0].max_model_len or MANY_TOKENS)
        num_tokens = min(num_tokens, most * request.num_sequences)
        return Usage(request.num_prompt_tokens if num_tokens else 0, num_tokens)


def _reason_of(details: _Why | None) -> FinishReason:
    return FinishReason.STOP if details is None else REASONS.get(details.reason or "", FinishReason.LENGTH)


def _decoded(data: bytes) -> _Message:
    try:
        return _read_message(data)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise UpstreamFault(f"its answer cannot be read: {error}") from error


def _told(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500]


_PASSED_ON = {  # statuses of which the client is the cause
    400: ErrorKind.INVALID_REQUEST,
    413: ErrorKind.BODY_TOO_LARGE,
    422: ErrorKind.INVALID_REQUEST,
}


def refusal_of(status: int, body: bytes, head: AnswerHead) -> ServiceError:
    """The error for the client of a request that an upstream has refused."""
    try:
        told = parse_object(body)
    except InvalidRequest:
        told = {}
    error = told.get("error") or told
    fields = error if isinstance(error, dict) else {"message": error}
    message, code, param = (
        value if isinstance(value := fields.get(name), str) else None for name in ("message", "code", "param")
    )
    message = message or f"The server behind this one refused the request, with the status {status}."
    if status in _PASSED_ON:
        return ServiceError(_PASSED_ON[status], message, code or "invalid_value", param)
    if status in (429, 503):
        after = head.field(b"retry-after") or b""
        retry_s = min(float(after), 60.0) if after.isdigit() else 1.0
        return ServiceError(ErrorKind.UNAVAILABLE, message, code or "overloaded", retry_after_s=retry_s)
    logger.error("an upstream refused a request with the status %d: %s", status, message)
    what = "refused this server's own key" if status in (401, 403) else f"answered with the status {status}"
    return ServiceError(ErrorKind.UPSTREAM, f"The server behind this one {what}. Tell the operator.", "upstream_error")
