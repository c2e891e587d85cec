"""What the answers of several surfaces have in common: errors, usage, logprobs, streams and whole documents.

A surface knows JSON and nothing else: no sockets, no engine, no clock. It is a parser of requests and two writers of
answers (Surface). Thread: loop.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import Delta, FinishReason, TokenLogprobs, Usage
from server.api.fields import DefaultsOf, GenerationCall
from server.wire import sse
from server.wire.messages import TextFrame

# Errors.

# ErrorKind -> (status, the envelope's type)
STATUSES: dict[ErrorKind, tuple[int, str]] = {
    ErrorKind.INVALID_REQUEST: (400, "invalid_request_error"),
    ErrorKind.AUTHENTICATION: (401, "authentication_error"),
    ErrorKind.PERMISSION: (403, "permission_error"),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error"),
    ErrorKind.METHOD_NOT_ALLOWED: (405, "invalid_request_error"),
    ErrorKind.REQUEST_TIMEOUT: (408, "timeout_error"),
    ErrorKind.CONFLICT: (409, "conflict_error"),
    ErrorKind.BODY_TOO_LARGE: (413, "invalid_request_error"),
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: (415, "invalid_request_error"),
    ErrorKind.KEY_REUSED: (422, "invalid_request_error"),
    ErrorKind.CANCELLED: (499, "invalid_request_error"),  # nginx's; a status that no SDK retries
    ErrorKind.RATE_LIMITED: (429, "rate_limit_error"),
    ErrorKind.ENGINE: (500, "server_error"),
    ErrorKind.UPSTREAM: (502, "server_error"),
    ErrorKind.UNAVAILABLE: (503, "service_unavailable_error"),
    ErrorKind.DEADLINE_EXCEEDED: (504, "timeout_error"),
}

# Status -> code of what a connection refuses before there is a request, and so before there is an ErrorKind
PROTOCOL_CODES = {
    400: "malformed_request",
    408: "request_timeout",
    414: "request_line_too_long",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    501: "not_implemented",
    503: "draining",
}
_TYPES = dict(STATUSES.values())

# The finish reasons that the wire knows; a sequence that ends for another ends its request with an error.
WIRE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER})


def status_of(error: ServiceError) -> int:
    return STATUSES[error.kind][0]


def error_body(error: ServiceError) -> bytes:
    """{"error": {message, type, param, code}}, as OpenAI writes it."""
    return _error_body(error.message, STATUSES[error.kind][1], error.param, error.code)


def protocol_error_body(status: int, message: str) -> bytes:
    """The body for a status of PROTOCOL_CODES."""
    error_type = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return _error_body(message, error_type, None, PROTOCOL_CODES[status])


def _error_body(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    document: ErrorDocument = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
    return sse.json_line(document)


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(TypedDict):
    error: ErrorObject


class ErrorForm(NamedTuple):
    """How the errors of one API are written.

    Attributes:
        shape: the type of the body.
        status: of the error's kind.
        body: of the error and the request's id.
        id_header: that has the request's id, beside x-request-id; None: no other.
    """

    status: Callable[[ServiceError], int]
    body: Callable[[ServiceError, str], bytes]
    shape: type
    id_header: bytes | None = None


OPENAI_ERRORS = ErrorForm(status_of, lambda error, request_id: error_body(error), ErrorDocument)


def error_event(error: ServiceError) -> bytes:
    """The last event of a stream that breaks off; no [DONE] follows."""
    return sse.event(error_body(error))


def cut_short(reason: FinishReason) -> ServiceError:
    """The error of a request whose sequence ended for a reason that is not one of WIRE_REASONS."""
    if reason is FinishReason.CANCELLED:
        return ServiceError(ErrorKind.CANCELLED, "The request was cancelled before it ended.", "request_cancelled")
    if reason is FinishReason.DEADLINE:
        message = "The request's deadline has passed. Ask for fewer tokens, or allow more time."
        return ServiceError(ErrorKind.DEADLINE_EXCEEDED, message, "deadline_exceeded")
    if reason is FinishReason.TOO_COMPLEX:
        message = "The answer's grammar became too complex. Use fewer alternatives or fewer optional properties."
        return InvalidRequest(message, code="grammar_too_complex")
    if reason is FinishReason.ERROR:
        message = "The engine failed on this request. Try again; if it fails again, tell the operator."
        return ServiceError(ErrorKind.ENGINE, message, "engine_error")
    raise AssertionError(f"{reason} is a reason that the wire knows")


# A surface.

EVENTS = b"text/event-stream; charset=utf-8"
LINES = b"application/x-ndjson"
EVENT_FIELDS = ((b"content-type", EVENTS), (b"x-accel-buffering", b"no"))  # of a head; proxies hold none back


class ReplyContext(msgspec.Struct, frozen=True):
    """What an answer needs beside the call.

    Args:
        reply_id: unique; the surface puts its own prefix before it ("chatcmpl-").
        created_s: unix time.
        unix_clock: for the time of completion.
        fingerprint: identifies what computes the answer: another one may give other tokens for the same seed.
        identity: likewise, by its parts, as `timings` has them.
        token_str, token_bytes: the text and the bytes of a token id, for logprobs.
        prompt_lengths: in tokens, one per prompt.
        prompt_texts: one per prompt, for completions with echo.
        prompt_ids: one per prompt as they were computed, for echo and where they are asked for.
        special_ids: of the tokens that the text does not show.
        context: what was left out of the prompt, where the request or its tenant has a policy for that.
    """

    reply_id: str
    created_s: int
    model: str
    unix_clock: Callable[[], float]
    fingerprint: str
    token_str: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    prompt_lengths: tuple[int, ...] = ()
    prompt_texts: tuple[str, ...] = ()
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    special_ids: Set[int] = frozenset()
    identity: Mapping[str, str] = MappingProxyType({})
    context: dict[str, Any] | None = None


# Fields of ours in a whole answer or a stream's last chunk: "timings" on request, "steploop" if a quota ended it
Extras = dict[str, Any]


class StreamReply(Protocol):
    """Writes one streamed answer as SSE bytes. Each call returns whole events, or b"" for none."""

    def start(self) -> bytes:
        """The events before the first delta. Called once, when the head goes out."""

    def text(self, choice: int, text: str) -> bytes:
        """The event of newly sampled text that comes with nothing else; not empty."""

    def text_frame(self, choice: int) -> TextFrame | None:
        """What text() puts around the text's JSON string, for the hot path; None: that varies."""

    def delta(self, choice: int, delta: Delta) -> bytes:
        """The events of text that comes with logprobs, or with the choice's end."""

    def end(self, usage: Usage, extras: Extras) -> bytes:
        """The events after the last delta of all choices, including the stream's end mark."""

    def error(self, error: ServiceError) -> bytes:
        """The events that break the stream off, instead of end()."""


class WholeReply:
    """Collects one answer that is not streamed, and writes it as a JSON document.

    Logprobs take their wire form as they come, since those of a long prompt take long; a surface's own form overrides
    add_logprobs().

    Attributes:
        texts: of each choice, in pieces.
    """

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        num_choices = len(call.prompts) * call.num_sequences
        self.texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._reasons = [FinishReason.STOP] * num_choices
        self._stop_reasons: list[str | int | None] = [None] * num_choices
        self._ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]
        # In vLLM's form, one list a prompt; its first token has no logprob
        self._prompt_logprobs: list[list[dict[str, Any] | None]] = [[None] for _ in call.prompts]

    def add(self, choice: int, delta: Delta) -> None:
        self.texts[choice].append(delta.text)
        if delta.finish_reason is not None:
            self._reasons[choice], self._stop_reasons[choice] = delta.finish_reason, stop_reason(delta, self._call)
        self._ids[choice] += sampled_ids(delta)
        if self._call.tokens.num_logprobs is not None:
            self.add_logprobs(choice, delta)
        prompt, sequence = divmod(choice, self._call.num_sequences)
        if sequence == 0 and self._call.tokens.num_prompt_logprobs is not None:
            self._prompt_logprobs[prompt] += [_vllm_entry(token, self._context) for token in delta.prompt_logprobs]

    def add_logprobs(self, choice: int, delta: Delta) -> None:
        self._logprobs[choice] += logprob_entries(delta.logprobs or (), self._context)

    def end(self, usage: Usage, extras: Extras) -> bytes:
        """Raises ServiceError: a choice ended for a reason that the wire does not know."""
        for reason in self._reasons:
            if reason not in WIRE_REASONS:
                raise cut_short(reason)
        return sse.json_line(self.document(usage, extras))

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        raise NotImplementedError


def never_streams(call: GenerationCall, context: ReplyContext) -> StreamReply:
    raise AssertionError("it comes in one document")


class Surface(NamedTuple):
    """One way of asking for tokens.

    Attributes:
        form: of its streams: chunks of choices, then [DONE]; events with names; parts without an id, the last with what
            was used, as events or on lines. "document": it never streams.
        parse: raises InvalidRequest with `param`, the path of the field to mend, or what DefaultsOf raises.
        prefix: of its answers' ids.
        does: what it asks of the model: see PoolingStyle.tasks.
        elsewhere: the last event for a reader whose stream goes on without it: of the error, the request's id and the
            number of events before it.
    """

    path: str
    form: Literal["chunks", "names", "parts", "lines", "document"]
    parse: Callable[[bytes, DefaultsOf], GenerationCall]
    whole: Callable[[GenerationCall, ReplyContext], WholeReply]
    stream: Callable[[GenerationCall, ReplyContext], StreamReply] = never_streams
    prefix: str = ""
    does: str = "generate"
    elsewhere: Callable[[ServiceError, str, int], bytes] = lambda error, request_id, number: error_event(error)

    @property
    def is_parts(self) -> bool:
        return self.form in ("parts", "lines")

    @property
    def media_type(self) -> bytes:
        """Of a stream; other types than events have no comments."""
        return LINES if self.form == "lines" else EVENTS


# Parts of answers.

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks
NOTHING: Mapping[str, Any] = MappingProxyType({})


class PartialUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageObject(PartialUsage):
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Envelope(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


Reason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


def usage_object(usage: Usage) -> UsageObject:
    """As chat and completions write it."""
    return {
        **partial_usage(usage.num_prompt_tokens, usage.num_completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_thought_tokens,
            "accepted_prediction_tokens": usage.num_predicted_tokens,
            "rejected_prediction_tokens": usage.num_mispredicted_tokens,
        },
    }


def partial_usage(num_prompt_tokens: int, num_completion_tokens: int) -> PartialUsage:
    """Of a choice so far, as vLLM's chunks have it."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN is not above it either


class Likely(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(Likely):
    top_logprobs: list[Likely]


def logprob_entries(logprobs: Iterable[TokenLogprobs], context: ReplyContext) -> list[dict[str, Any]]:
    """One entry per token, as chat and responses write it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": context.token_str(token_id),
            "logprob": finite(logprob),
            "bytes": list(context.token_bytes(token_id)),
        }

    return [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
        for token in logprobs
    ]


def sampled_ids(delta: Delta) -> list[int]:
    """The ids of tokens that come with their logprobs; the id that ends the text is one of them."""
    ids = [token.token_id for token in delta.logprobs or ()]
    return ids if delta.stop_logprobs is None else [*ids, delta.stop_logprobs.token_id]


def _vllm_entry(token: TokenLogprobs, context: ReplyContext) -> dict[str, Any]:
    """A prompt token's logprobs as vLLM writes them: by token id, with the rank if it is known."""

    def line(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": context.token_str(token_id)}

    entry = {str(token.token_id): line(token.token_id, token.logprob, None)}
    for rank, (token_id, logprob) in enumerate(token.top, 1):
        entry[str(token_id)] = line(token_id, logprob, rank)
    return entry


def wire_reason(reason: FinishReason | None) -> str | None:
    """The wire's word for it; None while the sequence goes on, and for what ends in an error."""
    return reason.value if reason in WIRE_REASONS and reason is not None else None


def stop_reason(delta: Delta, call: GenerationCall) -> str | int | None:
    """Which of the request's stop strings or ids has ended the text, as vLLM tells it."""
    is_asked = delta.stop_id in call.sampling.stop_token_ids
    return delta.stop_id if delta.stop_string is None and is_asked else delta.stop_string


def list_reply(data: Sequence[dict[str, Any]], has_more: bool) -> bytes:
    """One page of a list."""
    ids = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return sse.json_line({"object": "list", "data": data, **ids, "has_more": has_more})


class Deleted(TypedDict):
    id: str
    object: str
    deleted: Literal[True]


def deleted_reply(deleted_id: str, kind: str) -> bytes:
    return sse.json_line(Deleted(id=deleted_id, object=kind, deleted=True))


def envelope(context: ReplyContext, prefix: str, kind: str) -> dict[str, Any]:
    """What chat and completions begin an answer or a chunk with."""
    return {
        "id": prefix + context.reply_id,
        "object": kind,
        "created": context.created_s,
        "model": context.model,
        "system_fingerprint": context.fingerprint,
    }


class ChunkStream:
    """The stream of chat and completions: chunks in one envelope, then [DONE].

    Choice p * num_sequences + i is sequence i of prompt p.

    Args:
        before, after: what is around the text in a choice of a chunk that has text alone.
    """

    __slots__ = ("_call", "_context", "_end", "_envelope", "_head", "_heads", "_nums_tokens", "_tail")

    def __init__(
        self, call: GenerationCall, context: ReplyContext, envelope: dict[str, Any], before: bytes, after: bytes
    ) -> None:
        self._call = call
        self._context = context
        self._envelope = envelope
        num_choices = len(call.prompts) * call.num_sequences
        self._head = sse.event_head() + sse.json_line(envelope)[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if call.includes_usage else b"]}") + sse.EVENT_END
        self._heads = tuple(self._head + b'{"index":%d,' % i + before for i in range(num_choices))
        self._tail = after + b',"logprobs":null,"finish_reason":null}' + self._end
        self._nums_tokens = [0] * num_choices  # written so far, for chunks that count them

    def text(self, choice: int, text: str) -> bytes:
        return self._heads[choice] + sse.json_strings[text] + self._tail

    def text_frame(self, choice: int) -> TextFrame | None:
        return TextFrame(self._heads[choice], sse.json_strings, self._tail)

    def end(self, usage: Usage, extras: Extras) -> bytes:
        last = {"usage": usage_object(usage)} | extras if self._call.includes_usage else extras
        if not last:
            return sse.DONE
        return sse.event(sse.json_line(self._envelope | {"choices": []} | last)) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        return error_event(error)

    def _chunk(self, choice: int, line: dict[str, Any], more: Mapping[str, Any] = NOTHING) -> bytes:
        """
        Args:
            line: the choice.
            more: fields of the chunk itself.
        """
        call = self._call
        if call.tokens.counts_usage:
            num_prompt_tokens = self._context.prompt_lengths[choice // call.num_sequences]
            more = {"usage": partial_usage(num_prompt_tokens, self._nums_tokens[choice]), **more}
        elif more and call.includes_usage:
            more = {"usage": None, **more}
        if not more:
            return self._head + sse.json_line(line) + self._end
        return self._head + sse.json_line(line) + b"]," + sse.json_line(more)[1:] + sse.EVENT_END
