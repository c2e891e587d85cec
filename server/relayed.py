"""What passes: a body, as an upstream gets it, and its answer: what it says of text, ends and usage. Thread: loop.

    bytes ─▶ UpstreamAnswer.push, document ─▶ Part ─▶ PassedReply ─▶ client

Its id and model become ours. All else passes as it came, comments between events excepted.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, TypeVar

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import LOWEST_CLASS, TOP_CLASS, Delta, FinishReason, Usage
from server.api import chat, completions, embeddings, llama_server, messages, ollama, responses, scores
from server.api.decoding import parse_object
from server.api.fields import MOST_MAX_TOKENS, GenerationCall, MaxTokens
from server.api.replies import Extras, ReplyContext, Surface, error_event, usage_object
from server.gate.tenants import LOCAL_NAME, DeadlineTable, OwnDeadlineExceeded, Tenant
from server.gate.text_rules import rule_book
from server.upstream.exchange import MAX_EVENT_BYTES, AnswerHead, EventReader, UpstreamFault
from server.upstream.pool import LeadingBlocks
from server.upstream.settings import ModelSettings, keep_alive_of
from server.values import UNREADABLE
from server.wire import sse

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES, MAX_ERROR_BYTES = 64 * 1024 * 1024, 64 * 1024
MOST_EVENTS_A_TOKEN, MORE_EVENTS = 16, 1024  # some servers send letters; and pings, starts and ends
LEAST_PIECE_BYTES = 16  # on average, of pieces of an answer beyond MORE_EVENTS
EMPTY_A_SECOND = 16  # events that pass nothing on, beyond MORE_EVENTS: news of a queue come 10 times a second
MOST_TOKENS = 2**53  # more than there are: usage that says so is not believed
MANY_TOKENS = 2**31  # where a request sets no bound, or the model's context is not known
UNSEEN_TOKENS = 16_384  # beyond one a byte: of images that a prompt links to, of thoughts that are not shown
EVENTS_A_SHAPE, MAX_SHAPE_BYTES = 8, 4096  # that pay for another's being found out; of an event whose shape is kept
BYTES_PER_TOKEN = 3  # fewer than tokenizers make of text: an estimate that reserves enough
MOST_BYTES_PER_TOKEN = 8  # of an answer: usage by which a token has more is not of all of it
REASONS = {  # others: stop
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "limit"), FinishReason.LENGTH),
    **dict.fromkeys(("tool_calls", "tool_use"), FinishReason.TOOL_CALLS),
    **dict.fromkeys(("content_filter", "refusal"), FinishReason.CONTENT_FILTER),
}
_ENDS = ("message_delta", "response.completed", "response.incomplete")  # named events: of the text
_LASTS = ("message_stop", "response.completed", "response.incomplete")  # of the answer


SURFACES = (
    *(chat.SURFACE, completions.SURFACE, responses.SURFACE, messages.SURFACE, ollama.CHAT, ollama.GENERATE),
    *(llama_server.INFILL, llama_server.COMPLETION, embeddings.SURFACE, embeddings.OLLAMA),
    *(scores.RERANK, scores.COHERE_RERANK, scores.SCORE),
)


# A body: what the gate reads of it, and what takes the place of what was sent.


Salts = tuple[str | None, str | None]  # for upstreams of our own, which know no tenants; for others
# As templates order them, and as /infill puts them before its prompt
PROMPT_FIELDS = (
    *("tools", "system", "instructions", "messages"),
    *("input_extra", "input_prefix", "prompt", "input", "suffix", "input_suffix"),
    *("query", "documents", "text_1", "text_2"),
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate must know of a body; the rest is the upstream's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    best_of: int | None = None
    beam_width: int | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_MAX_TOKENS)] | None = None
    max_completion_tokens: MaxTokens | None = None
    max_output_tokens: MaxTokens | None = None
    priority: Annotated[int, msgspec.Meta(ge=LOWEST_CLASS, le=TOP_CLASS)] | None = None
    deadlines: DeadlineTable | None = None
    cache_salt: str | None = None
    resumable: bool | None = None
    timings: dict[str, Any] | bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    response_fields: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None


@dataclass(frozen=True, slots=True)
class Passed:
    """A body, ready to be sent: `Prepared` of a relay.

    Args:
        prompt: all prompts, estimated, and what may be cached of them.
        body: for the model's own upstreams.
        salts: of what its prompt shares.
        context: of the model.
        num_computed: answers, of which call.num_sequences are shown.
        keep_alive_s: as Ollama's clients ask.
        shown_fields: response_fields of /infill, applied here: the whole answer has the usage.
        sent: of its class and deadlines, as upstreams that are not our own get them.
        last_fields: for which a stream's last chunk passes, if its usage does not.
    """

    call: GenerationCall
    surface: Surface
    prompt: LeadingBlocks
    body: bytes = b""
    salts: Salts = (None, None)
    context: int = MANY_TOKENS
    num_prompts: int = 1
    num_computed: int = 1
    keep_alive_s: float | None = None
    shown_fields: list[str] | None = None
    last_fields: frozenset[str] = frozenset()
    sent: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[tuple[int, ...], ...] = ()
    table: None = None
    continues_text: bool = False

    @property
    def tells_tokens(self) -> bool:
        return self.call.is_stream

    @property
    def most_tokens(self) -> int:
        """Of each answer; of one without tokens beside its prompt, what its upstream makes of that."""
        return min(self.call.sampling.max_tokens or (MANY_TOKENS if self.call.echo else 0), self.context)


def checked_prompt(fields: dict[str, Any], tenant: Tenant) -> tuple[list[str], int]:
    """A body's texts, held to the tenant's rules, and how many tokens are reserved for them."""
    rules = rule_book(tenant.text_rules)
    if rules.on_answer:
        message = (
            "Your tenant has text rules for answers. They cannot be enforced on this model, which another server runs."
            " Use another model, or ask the operator."
        )
        raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied", "model")
    all_texts, num_ids, num_bytes = list[str](), 0, 0
    for name in [one for one in PROMPT_FIELDS if one in fields]:
        leaves = list(_leaves(fields[name]))
        texts = [one for one in leaves if isinstance(one, str)]
        num_ids += len(leaves) - len(texts)
        rules.check_prompt(texts, name)
        all_texts += texts
        num_bytes += sum(len(one.encode("utf-8", "replace")) for one in texts) - sum(map(len, _images(fields[name])))
    return all_texts, max(1, num_ids + -(-num_bytes // BYTES_PER_TOKEN))


def salts_of(tenant: Tenant, asked: Any) -> Salts:
    if tenant.name == LOCAL_NAME:
        return asked, asked
    return sha256(f"{tenant.cache_salt_domain}\0{asked or ''}".encode("utf-8", "replace")).hexdigest(), asked


def keep_alive_asked(value: str | float | None) -> float | None:
    """Seconds. Raises InvalidRequest."""
    try:
        return None if value is None else keep_alive_of(value)
    except ValueError as error:
        raise InvalidRequest(f"{error}.", "keep_alive") from error


def address_to(settings: ModelSettings, fields: dict[str, Any], salts: Salts) -> bytes:
    """A body as an upstream of these settings gets it: with what takes the place of what the client has sent."""
    fields["model"] = settings.name_there(fields.get("model"))
    fields.pop("cache_salt", None)
    if (salt := salts[0 if settings.trusted else 1]) is not None:
        fields["cache_salt"] = salt
    return sse.json_line(fields)


def _leaves(value: Any) -> Iterator[str | int]:
    """The texts and numbers in JSON. Its depth is bounded by the parser."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        yield value


def _images(value: Any, name: str = "") -> Iterator[str]:
    """The data URLs that are a body's images: what an image counts for is the model's."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _images(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from _images(one, name)
    elif isinstance(value, str) and name in ("url", "image_url") and _is_data_url(value):
        yield value


# An answer: what is read.


class _Choice(msgspec.Struct, frozen=True):
    index: int | None = 0  # some servers write null
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: Any = None
    finish_reason: str | None = None

    @property
    def said(self) -> list[Any]:
        """All that there is, but who says it."""
        told = self.delta or self.message or {}
        said = [value for name, value in told.items() if value and name != "role"]
        return [self.text, *said] if self.text else said

    @property
    def num_text_bytes(self) -> int:
        return sum(len(one.encode("utf-8", "replace")) for one in self.said if isinstance(one, str))

    @property
    def reason(self) -> FinishReason:
        return REASONS.get(self.finish_reason or "", FinishReason.STOP)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """An event or a document, of any surface, or what is within it."""

    type: str | None = None
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    code: Any = None  # of an error in Ollama's lines
    response: "_Message | str | None" = None
    message: "_Message | str | None" = None
    delta: "_Message | str | None" = None
    done: bool = False  # Ollama's lines
    stop: Any = None  # infill
    prompt_eval_count: Any = None  # Ollama's embeddings
    # Why it ended: of responses, messages, Ollama's lines, infill
    reason: str | None = None
    incomplete_details: "_Message | None" = None
    stop_reason: str | None = None
    done_reason: str | None = None
    stop_type: str | None = None

    @property
    def finish_reason(self) -> FinishReason:
        if self.incomplete_details is not None:
            return REASONS.get(self.incomplete_details.reason or "", FinishReason.LENGTH)
        return REASONS.get(self.stop_reason or self.done_reason or self.stop_type or "", FinishReason.STOP)

    @property
    def inner(self) -> "_Message | None":
        """The response or message that an event is about."""
        return next((one for one in (self.response, self.message) if isinstance(one, _Message)), None)


# Codes of errors that end an answer, of which the request is the cause
_REQUESTS_OWN = {"deadline_exceeded": ErrorKind.DEADLINE_EXCEEDED, "grammar_too_complex": ErrorKind.INVALID_REQUEST}
T = TypeVar("T")
# Of a chunk of one choice's text: the upstream's bytes around the text, ours, and the choice
_Shape = tuple[bytes, bytes, bytes, bytes, tuple[int, ...]]
PROBE = "Another text, of no upstream's."
_is_data_url = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,[\w+/=-]*", re.ASCII).fullmatch
_is_plain = re.compile(rb'[^"\\\x00-\x1f]*').fullmatch
_encode = msgspec.json.encode
_NULL = msgspec.Raw(b"null")
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_message = msgspec.json.Decoder(_Message, strict=False).decode


def usage_of(told: Mapping[str, Any]) -> Usage:
    """Of chat and completions, responses, messages, Ollama's and infill. Raises ValueError: no request uses so much."""
    counts = dict(told)
    for name, details in told.items():
        if name.endswith("_tokens_details") and isinstance(details, dict):
            counts |= details

    def count(*names: str) -> int:
        value = next((value for name in names if (value := counts.get(name))), 0)
        if not (isinstance(value, int | float) and 0 <= value <= MOST_TOKENS):
            raise ValueError(f"{names[0]} is {str(value)[:50]}")
        return int(value)

    read = count("cache_read_input_tokens")  # of messages, beside input_tokens
    beside = read + count("cache_creation_input_tokens")
    prompt = count("prompt_tokens", "input_tokens", "prompt_eval_count", "tokens_evaluated") + beside
    completion = count("completion_tokens", "output_tokens", "eval_count", "tokens_predicted")
    cached = min(count("cached_tokens", "tokens_cached") or read, prompt)
    return Usage(prompt, completion, cached, min(count("reasoning_tokens"), completion))


class Part(Delta, frozen=True, kw_only=True):
    """An event or a document.

    Args:
        data: as it goes on; empty: nothing does.
        texts: choices of which it has text.
        ends: choices that end with it, and why.
        is_last: it is written once the answer is settled.
    """

    text: str = " "  # so that it is written
    num_tokens: int = 0
    data: bytes = b""
    texts: tuple[int, ...] = ()
    ends: Mapping[int, FinishReason] = {}
    is_last: bool = False


class UpstreamAnswer:
    """What one upstream answers. `push` and `document` raise UpstreamFault: it is no answer to what was asked; or a
    ServiceError with which it has ended, and of which the request itself is the cause.

    Args:
        request_id: ours, that the answer's id is made of.
        is_trusted: the upstream is one of our own, and what it tells is exact.

    Attributes:
        head: once it has come.
        body: of what is no stream, as far as it has come: a document, or what the request is refused with.
        usage: as it has been told, as far as that can be true.
        is_of_start: it was told before any text: what has come since is not in it.
        is_done: the last event has come; later ones are dropped.
    """

    def __init__(self, asked: Passed, request_id: str, is_trusted: bool) -> None:
        self.head: AnswerHead | None = None
        self.body = bytearray()
        self.usage: Usage | None = None
        self.is_of_start = self.is_done = False
        self._is_believed = True  # what it has told of usage
        self._asked, self._call, self._form, self._is_trusted = asked, asked.call, asked.surface.form, is_trusted
        own = {"id": asked.surface.prefix + request_id, "model": asked.call.model}
        self._names = {name: msgspec.Raw(sse.json_string(value)) for name, value in own.items()}
        self._events = EventReader(are_lines=self._form == "lines")
        self._num_bytes = self._num_pieces = self._num_parts = self._num_empty = 0
        self._most_parts = asked.most_tokens * asked.num_computed * MOST_EVENTS_A_TOKEN + MORE_EVENTS
        self._num_held = 0  # bytes of parts that wait for the end
        self._num_texts = 0
        # Of a document's choices: bytes of text, and whether its length ended it
        self._sizes: list[tuple[int, bool]] = []
        self._shape: _Shape | None = None  # of the next event, probably
        self._num_shapes = self._num_shaped = 0  # and events that had them
        self._counts: dict[str, Any] = {}  # as they have been told

    @property
    def is_refusal(self) -> bool:
        return self.head is not None and self.head.status != 200

    def push(self, data: bytes, after_s: float = 0.0) -> Iterator[Part]:
        """Take a piece.

        Args:
            after_s: since the request was sent: EMPTY_A_SECOND bounds what passes nothing on.
        """
        self._num_bytes += len(data)
        self._num_pieces += 1
        if self._num_pieces > MORE_EVENTS + self._num_bytes // LEAST_PIECE_BYTES:
            raise UpstreamFault(f"it has sent {self._num_bytes} bytes in {self._num_pieces} pieces")
        if self.is_refusal or not self._call.is_stream:
            self.body += data
            if len(self.body) > (most := MAX_ERROR_BYTES if self.is_refusal else MAX_DOCUMENT_BYTES):
                self.body.clear()  # it is no answer
                raise UpstreamFault(f"its answer is larger than {most} bytes")
            return
        for name, event in () if self.is_done else self._events.push(data):
            if self.is_done:
                return
            part = Part() if event is None else self._read(name, event)
            self._bound(part, after_s)
            yield part

    def _bound(self, part: Part, after_s: float) -> None:
        """Raises UpstreamFault: there are more events than an answer to this request can have."""
        self._num_texts += len(part.texts)
        self._num_held += len(part.data) if part.is_last else 0
        if self._num_held > MAX_EVENT_BYTES:
            raise UpstreamFault(f"its last events are larger than {MAX_EVENT_BYTES} bytes")
        self._num_parts += 1
        self._num_empty += part.is_last or not part.data
        is_flood = self._num_parts > self._most_parts or self._num_empty > MORE_EVENTS + EMPTY_A_SECOND * after_s
        if is_flood and not self._is_trusted:
            raise UpstreamFault(f"it has sent {self._num_parts} events, more than an answer to this request has")

    def document(self) -> Part:
        """All that has come."""
        data, self.body = bytes(self.body), bytearray()  # which may be no answer
        message = _decoded(data, _read_message)
        choices = message.choices or []
        ends, sizes = {0: message.finish_reason}, [(len(data), False)]
        if self._form == "chunks":
            self._texts_of(choices)
            ends = {one.index or 0: one.reason for one in choices}
            sizes = [(one.num_text_bytes, one.reason is FinishReason.LENGTH) for one in choices]
        if message.error is not None or not ends:
            raise UpstreamFault("its answer is not of the kind that was asked for")
        self.body += data
        self._num_texts, self._sizes = sum(size > 0 for size, _ in sizes), sizes
        self._note_usage(message, data)
        renamed, shown_fields = self._renamed(data), self._asked.shown_fields
        if shown_fields is not None:
            renamed = _encode(llama_server.shown(msgspec.json.decode(renamed), shown_fields))
        self.is_done = True
        return Part(data=renamed, texts=tuple(ends), ends=ends, is_last=True)

    def estimated(self) -> Usage:
        """By what has come: a token for each event with text, or for BYTES_PER_TOKEN of a document."""
        is_document = not self.is_refusal and self.body.lstrip().startswith(b"{")
        num_tokens = max(self._num_texts, len(self.body) // BYTES_PER_TOKEN if is_document else 0)
        num_tokens = min(num_tokens, self._asked.most_tokens * self._call.num_sequences)
        has_answered = num_tokens or self.is_done or not self._is_believed
        return Usage(self._asked.prompt.num_tokens if has_answered else 0, num_tokens)

    def billed(self) -> Usage:
        """What has been told, or an estimate of what nothing has been told of. The client is told no other."""
        estimate = self.estimated()
        if self.usage is None:
            return estimate
        usage = self._bounded(self.usage)
        least = estimate.num_completion_tokens if self.is_of_start else 0
        return msgspec.structs.replace(usage, num_completion_tokens=max(usage.num_completion_tokens, least))

    def _bounded(self, told: Usage) -> Usage:
        """Of what others tell, no more than was asked for, or where that has no bounds, than bytes have passed.

        Of several choices no less than has come: some servers tell what the first alone has used.
        """
        if self._is_trusted:
            return told
        asked, least_prompt, least = self._asked, 0, 0
        if self._call.num_sequences > 1 and not self._call.echo:
            least = min(self._least_of_choices(told), asked.most_tokens * self._call.num_sequences)
            least_prompt = asked.prompt.num_tokens if least and asked.num_prompts > 1 else 0
        most_prompt, most = len(asked.body) + UNSEEN_TOKENS, self._num_bytes + UNSEEN_TOKENS
        if asked.context < MANY_TOKENS and self._form != "document":  # which has any number of inputs
            most_prompt = asked.context * asked.num_computed
        if asked.most_tokens < MANY_TOKENS:
            most = asked.most_tokens * asked.num_computed
        prompt = min(max(told.num_prompt_tokens, least_prompt), most_prompt)
        completion = min(max(told.num_completion_tokens, least), most)
        return Usage(prompt, completion, min(told.num_cached_tokens, prompt), min(told.num_thought_tokens, completion))

    def _least_of_choices(self, told: Usage) -> int:
        """The tokens of several choices, if `told` cannot be of all of them: then it is of the first. 0: it can be.

        A document's choice that its length has ended has as many as it may have; another, as many a byte as the first.
        """
        num_told, sizes = told.num_completion_tokens, self._sizes
        full = max(1, min(self._asked.most_tokens, self._asked.context - told.num_prompt_tokens))

        def num_tokens(rate: float) -> list[int]:
            return [full if is_full and size >= full else min(full, round(size * rate)) for size, is_full in sizes]

        if num_told >= max(self._num_texts, sum(num_tokens(1 / MOST_BYTES_PER_TOKEN))):
            return 0
        rate = num_told / sizes[0][0] if num_told and sizes and sizes[0][0] else 1 / BYTES_PER_TOKEN
        return max(self._num_texts, num_told + sum(num_tokens(rate)[1:]))

    def _read(self, name: bytes | None, data: bytes) -> Part:
        """An event, or a line."""
        if data == b"[DONE]":
            self.is_done = True
            return Part()
        if data == b"null":  # llama-server's first event, of several prompts
            return Part()
        if name is None and (part := self._read_shaped(data)) is not None:
            return part
        message = _decoded(data, _read_message)
        if message.error is not None and message.type in (None, "error"):
            raise self._error_of(message.error, message.code)
        if message.usage is not None or self._form != "chunks":
            self._note_usage(message, data)
        event_name = None if name is None else name.decode("ascii", "ignore")
        shows_usage = self._call.tokens.counts_usage if message.choices else self._call.includes_usage
        renamed = self._renamed(data, hides_usage=self._form == "chunks" and not shows_usage)
        framed = renamed + b"\n" if self._form == "lines" else sse.event(renamed, event_name)
        if self._asked.surface.is_parts:
            self.is_done = message.done or message.stop is True
            if self.is_done:
                return Part(data=framed, ends={0: message.finish_reason}, is_last=True)
            return Part(data=framed, texts=(0,))
        if self._form == "names":
            return self._read_named(message, framed)
        if message.choices:
            texts = self._texts_of(message.choices)
            ends = {one.index or 0: one.reason for one in message.choices if one.finish_reason is not None}
            if texts and not ends and name is None and message.usage is None:
                self._learn_shape(data, message.choices[0].said)
            return Part(data=framed, texts=texts, ends=ends)
        shows = self._call.includes_usage or self._asked.last_fields & _read_fields(data).keys()
        if message.usage is not None and not shows:
            return Part()
        return Part(data=framed, is_last=message.usage is not None)

    def _read_named(self, message: _Message, framed: bytes) -> Part:
        """Of responses or messages."""
        kind, inner = message.type or "", message.inner
        if kind == "response.failed":
            raise self._error_of(inner and inner.error)
        if (kind.startswith("response.") and inner is None) or kind not in (*_ENDS, *_LASTS):
            return Part(data=framed, texts=(0,) if kind.endswith(".delta") or kind == "content_block_delta" else ())
        self.is_done = kind in _LASTS
        ended = message.delta if kind == "message_delta" else inner
        reason = ended.finish_reason if isinstance(ended, _Message) else FinishReason.STOP
        return Part(data=framed, ends={0: reason} if kind in _ENDS else {}, is_last=True)

    def _error_of(self, told: Any, code: Any = None) -> Exception:
        """What an answer ended with: the request's own error, if an upstream of our own says so, or its fault."""
        fields = told if isinstance(told, dict) else {"message": told, "code": code}
        message = str(fields.get("message"))[:500]
        for name in ("code", "type") if self._is_trusted else ():  # responses have the code as the type
            if isinstance(one := fields.get(name), str) and one in _REQUESTS_OWN:
                return ServiceError(_REQUESTS_OWN[one], message, one)
        return UpstreamFault(f"it ended its answer with an error: {message}")

    def _texts_of(self, choices: list[_Choice]) -> tuple[int, ...]:
        """The choices that have text. Raises UpstreamFault: one was not asked for."""
        for one in choices:
            if not 0 <= (one.index or 0) < self._call.num_sequences:
                asked_for = f"{self._call.num_sequences} that were asked for"
                raise UpstreamFault(f"its answer has a choice {one.index}, of {asked_for}")
        return tuple([one.index or 0 for one in choices if one.said])

    # Most events of an answer differ in their text alone: they are recognized by their bytes, and not parsed.

    def _read_shaped(self, data: bytes) -> Part | None:
        """An event of the shape that is known: between its bytes is text without quotes and escapes, hence no more."""
        if self._shape is None:
            return None
        head, tail, own_head, own_tail, texts = self._shape
        text = data[len(head) : len(data) - len(tail)]
        if not (text and data.startswith(head) and data.endswith(tail) and _is_plain(text)):
            return None
        _decoded(text, bytes.decode)
        self._num_shaped += 1
        return Part(data=own_head + text + own_tail, texts=texts)

    def _learn_shape(self, data: bytes, said: list[Any]) -> None:
        """Of an event with text that is not the first. Another text in its place tells whether it is the place."""
        is_paid = self._num_texts and self._num_shaped >= EVENTS_A_SHAPE * (self._num_shapes - 2)
        if not (is_paid and len(data) <= MAX_SHAPE_BYTES and len(said) == 1 and isinstance(said[0], str)):
            return
        self._num_shapes += 1
        try:
            head, found, tail = data.rpartition(_encode(said[0]))
            other = _read_message(probed := head + _encode(PROBE) + tail)
        except UNREADABLE:
            return
        around = sse.event(self._renamed(probed)).split(PROBE.encode())
        if found and len(around) == 2 and [one.said for one in other.choices or ()] == [[PROBE]]:
            texts = self._texts_of(other.choices or [])
            self._shape = head + b'"', b'"' + tail, around[0], around[1], texts

    def _note_usage(self, message: _Message, data: bytes) -> None:
        """The latest counts of each kind: messages tell those of the prompt at the start alone. Of nonsense, none."""
        told = message.usage or (message.inner and message.inner.usage)
        if not told and (message.done or message.stop is True or message.prompt_eval_count is not None):
            told = _decoded(data, msgspec.json.decode)
        if not told:
            return
        why, was_believed = "", self._is_believed
        try:
            if not isinstance(told, dict):
                raise ValueError(f"usage is {str(told)[:50]}")
            self._counts |= {name: count for name, count in told.items() if count}
            usage = usage_of(self._counts)
            self.usage, self.is_of_start = self._bounded(usage), self._call.is_stream and not self._num_texts
            self._is_believed = self.usage == usage
        except ValueError as error:
            self.usage, self._is_believed, why = None, False, f" ({error})"
        if was_believed and not self._is_believed:
            what = "an upstream of %s reports usage that cannot be this request's%s: %s; %s is billed"
            logger.warning(what, self._call.model, why, str(told)[:500], self.billed())

    def _renamed(self, data: bytes, hides_usage: bool = False) -> bytes:
        """With our id and the name that was asked for, also of the response or message in an event.

        Args:
            hides_usage: it has an event of its own, which some servers leave to the last choice's.
        """
        fields = _decoded(data, _read_fields)
        fields |= {name: own for name, own in self._names.items() if name in fields}
        for name in ("response", "message") if self._form == "names" else ():
            if (inner := fields.get(name)) is not None and bytes(inner).startswith(b"{"):
                fields[name] = msgspec.Raw(self._renamed(bytes(inner)))
        if hides_usage and "usage" in fields:
            fields["usage"] = _NULL
        elif not self._is_believed and bytes(fields.get("usage", _NULL)) != b"null":
            usage = self.billed()
            counts = {"input_tokens": usage.num_prompt_tokens, "output_tokens": usage.num_completion_tokens}
            fields["usage"] = msgspec.Raw(_encode(counts if self._form == "names" else usage_object(usage)))
        return _encode(fields)


def _decoded(data: bytes, read: Callable[[bytes], T]) -> T:
    """Raises UpstreamFault."""
    try:
        return read(data)
    except UNREADABLE as error:
        raise UpstreamFault(f"its answer cannot be read: {error}") from error


# What is written.


class PassedReply:
    """Writes what an upstream has written: as a StreamReply that gets no texts, and as a WholeReply."""

    def __init__(self, surface: Surface, call: GenerationCall, context: ReplyContext) -> None:
        self._surface = surface
        self._is_of_chunks = surface.form == "chunks" and call.is_stream
        self._includes_usage = call.includes_usage
        self._reply_id = context.reply_id
        self._envelope = {"id": surface.prefix + context.reply_id, "model": context.model}
        self._last = b""

    def start(self) -> bytes:
        return b""

    def delta(self, choice: int, delta: Delta) -> bytes:
        assert isinstance(delta, Part)
        if delta.is_last:
            self._last += delta.data
            return b""
        if delta.data or delta.finish_reason is None:
            return delta.data
        # The choice was ended here
        content: dict[str, Any] = {"delta": {}} if self._surface.prefix == chat.SURFACE.prefix else {"text": ""}
        return self._chunk(choices=[{"index": choice, **content, "finish_reason": delta.finish_reason.value}])

    add = delta

    def _chunk(self, **fields: Any) -> bytes:
        return sse.event(sse.json_line(self._envelope | fields))

    def end(self, usage: Usage, extras: Extras) -> bytes:
        if not self._is_of_chunks:
            return self._last
        if not self._last and self._includes_usage:  # it was ended here
            extras = extras | {"usage": usage_object(usage)}
        return self._last + (self._chunk(choices=[], **extras) if extras else b"") + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        if self._surface.prefix == messages.SURFACE.prefix:
            return sse.event(messages.ERRORS.body(error, self._reply_id), "error")
        return ollama.ERRORS.body(error, "") + b"\n" if self._surface.form == "lines" else error_event(error)


# Refusals.


LOOP = "upstream_loop"
_PASSED_ON = {  # statuses of which the client is the cause
    400: ErrorKind.INVALID_REQUEST,
    413: ErrorKind.BODY_TOO_LARGE,
    422: ErrorKind.INVALID_REQUEST,
}
_CODES = {"exceed_context_size_error": "context_length_exceeded"}  # of llama-server's types, where its code is a number


def _renamed_in(message: str, there: str, asked: str) -> str:
    """With the name that was asked for in place of the model's name there: where it is quoted, or is no mere word."""
    name = re.escape(there)
    bare = "" if there.isalpha() else rf"|(?<![\w/-]){name}(?![\w/-])"
    return re.sub(rf"(?<=['\"`]){name}(?=['\"`]){bare}", lambda _: asked, message)


def _detail_of(document: dict[str, Any]) -> str | None:
    """FastAPI's: a text, or one for each place in the body."""
    detail = document.get("detail")
    if isinstance(detail, list):
        found = [one for one in detail[:8] if isinstance(one, dict) and isinstance(one.get("msg"), str)]
        places = (one.get("loc") for one in found)
        names = (".".join(map(str, one)) if isinstance(one, list) else "body" for one in places)
        detail = "; ".join(f"{name}: {one['msg']}" for name, one in zip(names, found, strict=True))
    return detail[:500] if isinstance(detail, str) and detail else None


def loop_error() -> ServiceError:
    """A request goes round: also what gateways before this one tell of it."""
    message = (
        "The request goes in a circle between servers. Tell the operator: an upstream of this model leads back to a"
        " server that the request has already passed."
    )
    return ServiceError(ErrorKind.UPSTREAM, message, LOOP)


def refusal_of(head: AnswerHead, body: bytes, settings: ModelSettings, asked: str) -> ServiceError:
    """The error for the client of a request that an upstream has refused.

    Args:
        asked: the model's name, as the client has it.
    """
    try:
        document = parse_object(body)
    except InvalidRequest:
        document = {}
    status, error = head.status, document.get("error") or document
    fields = error if isinstance(error, dict) else {"message": error}
    message, code, param, kind = (
        value if isinstance(value := fields.get(name), str) else None for name in ("message", "code", "param", "type")
    )
    code = code or _CODES.get(kind or "")
    message = message or _detail_of(document)
    told = message or f"The server behind this one refused the request, with the status {status}."
    message = _renamed_in(told, settings.name_there(asked), asked)
    if status in _PASSED_ON:
        return ServiceError(_PASSED_ON[status], message, code or "invalid_value", param)
    if status in (429, 503, 529):
        after = head.field(b"retry-after") or b""
        retry_s = min(float(after), 60.0) if after.isdigit() else 1.0
        return ServiceError(ErrorKind.UNAVAILABLE, message, code or "overloaded", retry_after_s=retry_s)
    if settings.trusted and (status, code) == (504, "deadline_exceeded"):  # the request's, and not the server's
        error_type = OwnDeadlineExceeded if head.field(b"x-should-retry") is None else ServiceError
        return error_type(ErrorKind.DEADLINE_EXCEEDED, message, code)
    if (status, code) == (502, LOOP):
        return loop_error()
    logger.error("an upstream refused a request with the status %d: %s", status, told)
    what = "refused this server's own key" if status in (401, 403) else f"answered with the status {status}"
    return ServiceError(ErrorKind.UPSTREAM, f"The server behind this one {what}. Tell the operator.", "upstream_error")
