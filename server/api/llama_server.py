"""llama-server's own surfaces: /completion, and /infill for editors, which ask for the text between two others.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. Thread: loop.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import InvalidRequest, ServiceError
from core.types import BANNED, Delta, FinishReason, TokenLogprobs, Usage
from server.api.fields import (
    ClampedFields,
    DefaultsOf,
    GenerationCall,
    IdsPrompt,
    MixedPrompt,
    NumLikely,
    Prompt,
    ReadBody,
    TextPrompt,
    check_range,
    checked_ids,
    generation_call,
    read_body,
)
from server.api.models import ServerCard
from server.api.replies import Extras, ReplyContext, Surface, WholeReply, error_event, logprob_entries
from server.wire import sse

_REPEATS = ("seed", "fingerprint", "model_digest", "settings_digest", "version", "prompt_digest", "token_ids")
_STOP_TYPES = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}
MostTokens = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # 0: the prompt alone is computed, for the cache


class Chunk(msgspec.Struct, frozen=True):
    """A piece of another file."""

    text: str
    filename: str = "tmp"


class _Body(ClampedFields, frozen=True, kw_only=True):
    max_tokens: MostTokens | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None
    n_probs: NumLikely | None = None
    return_tokens: bool | None = None


class CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[Any]]


class InfillBody(_Body, frozen=True, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Meta(max_length=256)] | None = None
    prompt: str | None = None  # the beginning of the line that is edited: it follows the prefix


def parse_completion(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, CompletionBody, "completion", defaults_of)
    return _call(read, _prompt(read.wire.prompt, read.defaults.vocab_size))


def _prompt(given: str | list[int | str | list[Any]], vocab_size: int) -> Prompt:
    """A text, ids, or both in turn. A list of one of them is that one."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return TextPrompt(given)
    ids = [one for one in given if isinstance(one, int)]
    if any(isinstance(one, list) for one in given) or (len(given) > 1 and not ids):
        message = "prompt has several prompts. Send one per request, or all of them to /v1/completions."
        raise InvalidRequest(message, "prompt", "unsupported_parameter")
    checked_ids(ids, "prompt", vocab_size)
    if len(ids) == len(given):
        return IdsPrompt(tuple(ids))
    return MixedPrompt(tuple((one,) if isinstance(one, int) else str(one) for one in given))


def parse_infill(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, InfillBody, "infill", defaults_of)
    wire = read.wire
    extra = tuple((chunk.filename, chunk.text) for chunk in wire.input_extra or ())
    prompt = TextPrompt(
        wire.input_prefix + (wire.prompt or ""), suffix=wire.input_suffix, extra=extra, suffix_param="input_suffix"
    )
    return msgspec.structs.replace(_call(read, prompt), prompts_param="input_prefix")


def _call(read: ReadBody[_Body], prompt: Prompt) -> GenerationCall:
    wire, defaults = read.wire, read.defaults
    if wire.n_probs is not None:
        check_range("n_probs", wire.n_probs, 0, defaults.limits.num_top_logprobs)
    if wire.stream and wire.response_fields:
        raise InvalidRequest("response_fields cannot be used with stream. Leave one of them out.", "response_fields")
    call = generation_call(
        read,
        (prompt,),
        max_tokens=wire.max_tokens,
        num_logprobs=wire.n_probs or (0 if wire.return_tokens else None),
        wire=wire,
    )
    sampling = call.sampling
    if sampling.ignore_eos:  # elsewhere ends are sampled and ignored, as of vLLM
        biases = dict(sampling.logit_bias) | dict.fromkeys(defaults.end_ids, BANNED)
        sampling = msgspec.structs.replace(sampling, logit_bias=tuple(biases.items()))
    return msgspec.structs.replace(call, sampling=sampling, wants_timings=True)


def _part(context: ReplyContext, content: str, is_last: bool) -> dict[str, Any]:
    return {"index": 0, "content": content, "tokens": [], "id_slot": 0, "stop": is_last, "model": context.model}


def _tokens(wire: _Body, context: ReplyContext, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """What single tokens are told of."""
    told: dict[str, Any] = {"tokens": [one.token_id for one in logprobs]} if wire.return_tokens else {}
    if not wire.n_probs:
        return told
    entries = logprob_entries(logprobs, context)
    for entry, one in zip(entries, logprobs, strict=True):
        entry |= {"id": one.token_id}
        for likely, (token_id, _) in zip(entry["top_logprobs"], one.top, strict=True):
            likely |= {"id": token_id}
    return told | {"completion_probabilities": entries}


def _end(usage: Usage, reason: FinishReason, stop_string: str | None, extras: Extras) -> dict[str, Any]:
    """What is known at the end, times in milliseconds."""
    times, others = extras.get("timings", {}), {name: told for name, told in extras.items() if name != "timings"}
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
        **others,
    }


def _rate(name: str, count: int, took_ms: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": took_ms,
        f"{name}_per_token_ms": took_ms / max(1, count),
        f"{name}_per_second": count / took_ms * 1e3 if took_ms else 0.0,
    }


class PartsStream:
    """Implements replies.StreamReply: events with `content`, the last with `stop`."""

    __slots__ = ("_context", "_reason", "_stop_string", "_wire")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._context = context
        self._wire = call.wire
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
        told = _tokens(self._wire, self._context, delta.logprobs or ())
        if not delta.text and not told.get("tokens"):
            return b""
        return sse.event(sse.json_line(_part(self._context, delta.text, is_last=False) | told))

    def end(self, usage: Usage, extras: Extras) -> bytes:
        last = _part(self._context, "", is_last=True) | _end(usage, self._reason, self._stop_string, extras)
        return sse.event(sse.json_line(last))

    def error(self, error: ServiceError) -> bytes:
        return error_event(error)


class Document(WholeReply):
    _stop_string: str | None = None

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context)
        self._told: list[TokenLogprobs] = []

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        self._stop_string = delta.stop_string or self._stop_string

    def add_logprobs(self, choice: int, delta: Delta) -> None:
        self._told += delta.logprobs or ()

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        text = "".join(self.texts[0])
        answer = _part(self._context, text, is_last=True) | {"has_new_line": "\n" in text}
        answer |= _tokens(self._call.wire, self._context, self._told)
        answer |= _end(usage, self._reasons[0], self._stop_string, extras)
        return shown(answer, self._call.wire.response_fields)


def shown(answer: dict[str, Any], asked: list[str] | None) -> dict[str, Any]:
    """What `response_fields` ask for of an answer."""
    return answer if asked is None else {path: _at(answer, path) for path in asked if _at(answer, path) is not None}


def _at(answer: Any, path: str) -> Any:
    """What lies at a path such as "timings/prompt_n"; None: nothing."""
    for name in path.split("/"):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer


COMPLETION = Surface("/completion", "parts", parse_completion, Document, PartsStream)
INFILL = Surface("/infill", "parts", parse_infill, Document, PartsStream)


def props_reply(card: ServerCard, template: str) -> bytes:
    """The fields of llama-server's /props that do not depend on how it computes.

    Args:
        template: the chat template.
    """
    settings = {"n_ctx": card.model.max_model_len, "params": {"n_predict": -1, "stream": True}}
    return sse.json_line(
        {
            "default_generation_settings": settings,
            "total_slots": card.max_sequences,
            "model_alias": card.model.id,
            "model_path": card.model.id,
            "chat_template": template,
            "modalities": {"vision": False, "audio": False},
            "is_sleeping": False,
            "build_info": f"steploop {card.version}",
        }
    )


def slots_reply(card: ServerCard, num_running: int) -> bytes:
    """One for each sequence that may run at once. Whose they are is not told."""
    slots = [
        {"id": i, "n_ctx": card.model.max_model_len, "speculative": card.speculates, "is_processing": i < num_running}
        for i in range(card.max_sequences)
    ]
    return sse.json_line(slots)
