"""/infill: llama-server's surface for editors, which ask for the text between two others. Thread: loop."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import InvalidRequest, ServiceError
from core.types import Delta, FinishReason, Usage
from server.api.completions import RULES as COMPLETION_RULES
from server.api.decoding import decode
from server.api.fields import (
    DefaultsOf,
    GenerationCall,
    MaxTokens,
    SamplingFields,
    TextPrompt,
    check_range,
    generation_call,
)
from server.api.known_fields import COMPLETIONS, Does, Known
from server.api.replies import Extras, ReplyContext, Surface, WholeReply, error_event
from server.wire import sse

# What editors send that steers llama-server's own ways: its cache, its chain of samplers, its patience.
_IGNORED = "samplers t_max_prompt_ms t_max_predict_ms n_indent"
RULES = COMPLETION_RULES | {name: Known(name, COMPLETIONS, Does.IGNORED) for name in _IGNORED.split()}
del RULES["response_fields"]
_REPEATS = ("seed", "fingerprint", "model_digest", "settings_digest", "version", "prompt_digest", "token_ids")
_STOP_TYPES = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}


class Chunk(msgspec.Struct, frozen=True):
    """A piece of another file."""

    text: str
    filename: str = "tmp"


class InfillBody(SamplingFields, frozen=True, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Meta(max_length=256)] | None = None
    prompt: str | None = None  # the beginning of the line that is edited: it follows the prefix
    max_tokens: MaxTokens | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    wire, unknown_fields = decode(body, InfillBody, RULES)
    model, defaults = defaults_of(wire.model)
    if wire.n is not None:
        check_range("n", wire.n, 1, 1)
    if wire.stream and wire.response_fields:
        raise InvalidRequest("response_fields are of a whole answer. Leave out stream.", "response_fields")
    extra = tuple((chunk.filename, chunk.text) for chunk in wire.input_extra or ())
    prompt = TextPrompt(
        wire.input_prefix + (wire.prompt or ""), suffix=wire.input_suffix, extra=extra, suffix_param="input_suffix"
    )
    call = generation_call(
        wire,
        model,
        defaults,
        (prompt,),
        max_tokens=wire.max_tokens,
        num_logprobs=None,
        wire=wire,
        unknown_fields=unknown_fields,
    )
    return msgspec.structs.replace(call, wants_timings=True)


def _part(context: ReplyContext, content: str, is_last: bool) -> dict[str, Any]:
    return {"index": 0, "content": content, "tokens": [], "id_slot": 0, "stop": is_last, "model": context.model}


def _end(usage: Usage, reason: FinishReason, stop_string: str | None, extras: Extras) -> dict[str, Any]:
    """What is known at the end, times in milliseconds."""
    times = extras.get("timings", {})
    num_computed, num_sampled = usage.num_prompt_tokens - usage.num_cached_tokens, usage.num_completion_tokens
    return {
        "tokens_predicted": num_sampled,
        "tokens_evaluated": usage.num_prompt_tokens,
        "tokens_cached": usage.num_cached_tokens,
        "truncated": False,
        "stop_type": "word" if stop_string else _STOP_TYPES.get(reason, "none"),
        "stopping_word": stop_string or "",
        "timings": {
            **_rate("prompt", num_computed, times.get("prefill", 0.0)),
            **_rate("predicted", num_sampled, times.get("decode", 0.0)),
            "cache_n": usage.num_cached_tokens,
            **{name: told for name, told in times.items() if name in _REPEATS},
        },
    }


def _rate(name: str, count: int, took_ms: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": took_ms,
        f"{name}_per_token_ms": took_ms / max(1, count),
        f"{name}_per_second": count / took_ms * 1e3 if took_ms else 0.0,
    }


class InfillStream:
    """Implements replies.StreamReply: events with `content`, the last with `stop`."""

    __slots__ = ("_context", "_reason", "_stop_string")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._context = context
        self._reason = FinishReason.STOP
        self._stop_string: str | None = None

    def start(self) -> bytes:
        return b""

    def text(self, choice: int, text: str) -> bytes:
        return sse.event(sse.json_line(_part(self._context, text, is_last=False)))

    def text_frame(self, choice: int) -> None:
        """None: text() writes each."""

    def delta(self, choice: int, delta: Delta) -> bytes:
        self._reason, self._stop_string = delta.finish_reason or self._reason, delta.stop_string or self._stop_string
        return self.text(choice, delta.text) if delta.text else b""

    def end(self, usage: Usage, extras: Extras) -> bytes:
        last = _part(self._context, "", is_last=True) | _end(usage, self._reason, self._stop_string, extras)
        return sse.event(sse.json_line(last))

    def error(self, error: ServiceError) -> bytes:
        return error_event(error)


class InfillDocument(WholeReply):
    _stop_string: str | None = None

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        self._stop_string = delta.stop_string or self._stop_string

    def end(self, usage: Usage, extras: Extras) -> bytes:
        self._extras = extras
        return super().end(usage, {})

    def document(self, usage: Usage) -> dict[str, Any]:
        text = "".join(self.texts[0])
        answer = _part(self._context, text, is_last=True) | {"has_new_line": "\n" in text}
        answer |= _end(usage, self._reasons[0], self._stop_string, self._extras)
        return shown(answer, self._call.wire.response_fields)


def shown(answer: dict[str, Any], asked: list[str] | None) -> dict[str, Any]:
    """What `response_fields` ask for of an answer."""
    return answer if asked is None else {path: _at(answer, path) for path in asked if _at(answer, path) is not None}


def _at(answer: Any, path: str) -> Any:
    """What lies at a path such as "timings/prompt_n"; None: nothing."""
    for name in path.split("/"):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer


SURFACE = Surface(parse, InfillStream, InfillDocument)
