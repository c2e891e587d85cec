"""What the answers of several surfaces have in common: usage, logprobs, errors as OpenAI writes them. Thread: loop."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from core.errors import ErrorKind, ServiceError
from core.types import FinishReason, TokenLogprobs, Usage
from server.api.surface import Choice, Extras, GenerationCall, ReplyContext
from server.wire import sse
from server.wire.messages import TextFrame

NOTHING: Mapping[str, Any] = MappingProxyType({})
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks
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
    ErrorKind.UNAVAILABLE: (503, "service_unavailable_error"),
    ErrorKind.DEADLINE_EXCEEDED: (504, "timeout_error"),
}

# What is refused below any kind, before there is a request: status -> code
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

# The finish reasons that the wire knows; the others end a request as errors.
WIRE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER})


def status_of(error: ServiceError) -> int:
    return STATUSES[error.kind][0]


def error_object(error: ServiceError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}."""
    return _envelope(error.message, STATUSES[error.kind][1], error.param, error.code)


def error_body(error: ServiceError) -> bytes:
    return sse.json_line(error_object(error))


def protocol_error_body(status: int, message: str) -> bytes:
    """For a status of PROTOCOL_CODES, some of which no kind of error has."""
    error_type = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return sse.json_line(_envelope(message, error_type, None, PROTOCOL_CODES[status]))


def _envelope(message: str, error_type: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_event(error: ServiceError) -> bytes:
    """The last event of a stream that breaks off; no [DONE] follows."""
    return sse.event(error_body(error))


def cut_short(reason: FinishReason, cause: str | None = None) -> ServiceError:
    """The error that a request ends with whose sequence ended for a reason that the wire does not know.

    Args:
        reason: not one of WIRE_REASONS.
        cause: what the engine says of it, fit for the client.
    """
    if reason is FinishReason.CANCELLED:
        return ServiceError(ErrorKind.CANCELLED, "The request was cancelled before it ended.", "request_cancelled")
    if reason is FinishReason.DEADLINE:
        message = "The request's deadline has passed. Ask for fewer tokens or allow more time."
        return ServiceError(ErrorKind.DEADLINE_EXCEEDED, cause or message, "deadline_exceeded")
    if reason is FinishReason.ERROR:
        message = "The engine failed on this request. Try again; if it fails again, tell the operator."
        return ServiceError(ErrorKind.ENGINE, cause or message, "engine_error")
    raise AssertionError(f"{reason} is a reason that the wire knows")


def usage_object(usage: Usage) -> dict[str, Any]:
    """As chat and completions say it."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def partial_usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """Of a choice so far, as vLLM's chunks say it."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN is not above it either


def logprob_entries(logprobs: Iterable[TokenLogprobs], context: ReplyContext) -> list[dict[str, Any]]:
    """One entry per token, as chat and responses say it."""

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


def sampled_ids(logprobs: Iterable[TokenLogprobs] | None, stop: TokenLogprobs | None) -> list[int]:
    """Of tokens that come with their logprobs; the id that ends the text is one of them."""
    ids = [token.token_id for token in logprobs or ()]
    return ids if stop is None else [*ids, stop.token_id]


class VllmPromptLogprobs:
    """A prompt's logprobs as vLLM writes them: by token id, with the rank as far as it is known.

    Implements surface.PromptLogprobs.
    """

    __slots__ = ("_context", "entries")

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self.entries: list[dict[str, Any] | None] = [None]  # nothing comes before the first token

    def add_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self.entries += [self._entry(token) for token in logprobs]

    def _entry(self, token: TokenLogprobs) -> dict[str, Any]:
        entry = {str(token.token_id): self._line(token.token_id, token.logprob, None)}
        for rank, (token_id, logprob) in enumerate(token.top, 1):
            entry[str(token_id)] = self._line(token_id, logprob, rank)
        return entry

    def _line(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._context.token_str(token_id)}


def wire_reason(reason: FinishReason | None) -> str | None:
    """The wire's word for it; None while the sequence goes on, and for what will be told as an error."""
    return reason.value if reason in WIRE_REASONS and reason is not None else None


def refuse_broken(choices: Sequence[Choice]) -> None:
    """
    Raises:
        ServiceError: a choice ended for a reason that the wire does not know: the whole answer is an error then.
    """
    for choice in choices:
        if choice.finish_reason not in WIRE_REASONS:
            raise cut_short(choice.finish_reason)


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
    """What chat and completions stream alike: chunks in one envelope, then [DONE].

    Choice p * num_sequences + i is sequence i of prompt p.

    Args:
        before, after: what is around the text in a choice of a chunk that says text alone.
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
        self._nums_tokens = [0] * num_choices  # said, where each chunk counts them

    def text(self, choice: int, text: str) -> bytes:
        return self._heads[choice] + sse.json_strings[text] + self._tail

    def text_frame(self, choice: int) -> TextFrame:
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
