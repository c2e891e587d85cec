"""The fields that several surfaces share: how to sample, with their ranges, and the messages of a conversation.

Thread: loop.
"""

import math
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from core.errors import InvalidRequest
from core.types import LOWEST_CLASS, TOP_CLASS, SamplingParams
from server.api.decoding import MAX_SHOWN_KEY
from server.api.surface import (
    UNLIMITED_TOKENS,
    ChatPrompt,
    GenerationCall,
    GenerationDefaults,
    RequestLimits,
    TokenWishes,
)
from server.gate.tenants import ANY_TIME, MAX_DEADLINE_MS, Deadlines

ROLES = ("system", "developer", "user", "assistant", "tool")
# Part type -> the part's field with its text.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_PART_SEPARATOR = "\n"
# Of a message: they would change the answer
_UNSUPPORTED = ("tool_calls", "function_call", "audio", "images", "prefix", "partial")
MAX_STOP_LENGTH = 1024  # characters: the detokenizer holds back that much
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT = 256  # characters: enough for any digest

ANY_SEED = -1  # as of vLLM, llama-server and ollama: asks for another answer each time
# Below it the division of logits overflows, and the draw is greedy all the same.
_GREEDY_TEMPERATURE = 1e-4

RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_k", -1, 2**63 - 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),  # beyond these the scaled logits leave float32
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", -(2**63), 2**64 - 1),
    ("priority", LOWEST_CLASS, TOP_CLASS),
)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DeadlineFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ours alone, so that a name that is not known is a slip."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None
    total_ms: float | None = None


class TimingsFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As `true`, and more."""

    queue: bool = False


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """As on the wire: null is as good as absent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    deadlines: DeadlineFields | None = None
    timings: bool | TimingsFields | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """In every chunk of a stream, as vLLM does: beside include_usage alone."""
        return (
            self.includes_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )


class ChoiceFields(SamplingFields, frozen=True, kw_only=True):
    """What chat and completions have in common beside, all of it as vLLM has it."""

    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None


def token_wishes(fields: ChoiceFields, num_logprobs: int | None, limits: RequestLimits, is_echoed: bool) -> TokenWishes:
    """
    Args:
        num_logprobs: that are asked for with each token.
        is_echoed: the answer begins with its prompt, with logprobs of its own.

    Raises:
        InvalidRequest: prompt_logprobs are out of range, or beside what they do not go with.
    """
    num_prompt_logprobs = fields.prompt_logprobs
    if num_prompt_logprobs is not None:
        _check_range("prompt_logprobs", num_prompt_logprobs, 0, limits.num_top_logprobs)
        if fields.stream:
            message = "prompt_logprobs come with a whole answer alone. Leave out stream, or send false."
            raise InvalidRequest(message, "prompt_logprobs")
        if is_echoed and num_logprobs not in (None, num_prompt_logprobs):
            message = f"prompt_logprobs must be as many as logprobs ({num_logprobs}) where the prompt is echoed."
            raise InvalidRequest(message, "prompt_logprobs")
    return TokenWishes(num_logprobs, num_prompt_logprobs, bool(fields.return_token_ids), fields.counts_usage)


def sampling_params(
    fields: SamplingFields, defaults: GenerationDefaults, max_tokens: int, wishes: TokenWishes, is_echoed: bool = False
) -> SamplingParams:
    """Checked, with the model's defaults where the request is silent.

    Raises:
        InvalidRequest: a field out of its range.
    """
    limits = defaults.limits
    num_logprobs = wishes.num_logprobs
    if num_logprobs is None and wishes.param is not None:
        num_logprobs = 0  # ids and counts of single tokens come with their logprobs
    num_prompt_logprobs = wishes.num_prompt_logprobs
    if num_prompt_logprobs is None and is_echoed:
        num_prompt_logprobs = wishes.num_logprobs
    _check_ranges(fields)
    if fields.n is not None:
        _check_range("n", fields.n, 1, limits.num_choices)
    if max_tokens == UNLIMITED_TOKENS:
        max_tokens = defaults.max_tokens
    biases = _logit_bias(fields.logit_bias or {}, defaults.vocab_size, limits.num_logit_biases)
    temperature = _or(fields.temperature, defaults.temperature)
    top_k = _or(fields.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _GREEDY_TEMPERATURE else 0.0,
        top_k=top_k if 0 < top_k < defaults.vocab_size else 0,
        top_p=_or(fields.top_p, defaults.top_p),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_without(biases, defaults.suppressed_ids) if defaults.suppressed_ids else biases,
        min_tokens=_min_tokens(_or(fields.min_tokens, min(defaults.min_tokens, max_tokens)), max_tokens),
        seed=None if fields.seed in (None, ANY_SEED) else fields.seed % 2**64,
        stop=_stops(fields.stop, limits.num_stops),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids or [], defaults.vocab_size),
        ignore_eos=bool(fields.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def generation_call(
    fields: SamplingFields, sampling: SamplingParams, wishes: TokenWishes, **own: Any
) -> GenerationCall:
    """What every surface reads alike of these fields, beside what is its own.

    Raises:
        InvalidRequest: a field out of its range.
    """
    return GenerationCall(
        sampling=sampling,
        cache_salt=checked_cache_salt(fields.cache_salt),
        priority=fields.priority,
        deadlines=checked_deadlines(fields.deadlines),
        is_stream=bool(fields.stream),
        includes_usage=fields.includes_usage,
        wants_timings=bool(fields.timings),
        tells_queue=isinstance(fields.timings, TimingsFields) and fields.timings.queue,
        tokens=wishes,
        **own,
    )


def checked_max_tokens(value: int | None, param: str, default: int = UNLIMITED_TOKENS) -> int:
    """The request's limit, at least one token, fit for 32 bits."""
    if value is None:
        return default
    if not 1 <= value < 2**63:
        raise InvalidRequest(f"{param} is {value}: it must be from 1 to {2**63 - 1}.", param)
    return min(value, UNLIMITED_TOKENS)


def checked_top_logprobs(value: int | None, param: str, limits: RequestLimits) -> int:
    if value is None:
        return 0
    _check_range(param, value, 0, limits.num_top_logprobs)
    return value


def checked_ids(ids: list[int], param: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids, each one of the vocabulary's."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        where = f"{param}[{position}]"
        raise InvalidRequest(f"{where} is {ids[position]}: token ids are from 0 to {vocab_size - 1}.", where)
    return tuple(ids)


def checked_cache_salt(salt: str | None) -> str:
    """Prompts with one salt share nothing with those of another, nor with those without any.

    Raises:
        InvalidRequest: it is empty, which is more often a value that was not filled in than a wish, or too long.
    """
    if salt is None:
        return ""
    if not 0 < len(salt) <= MAX_CACHE_SALT:
        message = f"cache_salt must have 1 to {MAX_CACHE_SALT} characters. Leave it out to share cached prompts."
        raise InvalidRequest(message, "cache_salt")
    return salt


def checked_deadlines(deadlines: DeadlineFields | None) -> Deadlines:
    """
    Raises:
        InvalidRequest: one of them is not from a millisecond to a week.
    """
    if deadlines is None:
        return ANY_TIME
    seconds: dict[str, Any] = {}
    for name in DeadlineFields.__struct_fields__:
        value = getattr(deadlines, name)
        if value is not None:
            _check_range(f"deadlines.{name}", value, 1, MAX_DEADLINE_MS)
            seconds[f"{name.removesuffix('_ms')}_s"] = value / 1e3
    return Deadlines(**seconds)


def checked_model(name: str | None) -> str | None:
    """None: the one that is served."""
    if name == "":
        raise InvalidRequest("model is empty: name one that GET /v1/models lists.", "model")
    return name


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_ranges(fields: SamplingFields) -> None:
    for name, low, high in RANGES:
        value = getattr(fields, name)
        if value is not None:
            _check_range(name, value, low, high)
    if fields.top_p is not None and not 0 < fields.top_p <= 1:
        raise InvalidRequest("top_p must be above 0 and at most 1.", "top_p")


def _check_range(param: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails every comparison
        raise InvalidRequest(f"{param} must be from {low} to {high}.", param)


def _min_tokens(value: int, max_tokens: int) -> int:
    if not 0 <= value <= max_tokens:
        raise InvalidRequest("min_tokens must be from 0 to max_tokens.", "min_tokens")
    return value


def _logit_bias(biases: dict[str, float], vocab_size: int, most: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > most:
        raise InvalidRequest(f"logit_bias must have at most {most} entries.", "logit_bias")
    for key, value in biases.items():
        param = f"logit_bias[{key[:MAX_SHOWN_KEY]}]"
        if not _is_id(key, vocab_size):
            shown = key[:MAX_SHOWN_KEY]
            message = f"logit_bias has the key {shown!r}: its keys must be token ids from 0 to {vocab_size - 1}."
            raise InvalidRequest(message, param)
        _check_range(param, value, -100, 100)
    return tuple((int(key), value) for key, value in biases.items())


def _without(biases: tuple[tuple[int, float], ...], suppressed_ids: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """The biases, and those ids never sampled."""
    return tuple((dict(biases) | dict.fromkeys(suppressed_ids, -math.inf)).items())


def _is_id(key: str, vocab_size: int) -> bool:
    """Whether key is an id in the one way of writing it: "07" beside "7" would name a token twice."""
    return len(key) <= 20 and key.isascii() and key.isdecimal() and str(int(key)) == key and int(key) < vocab_size


def _stops(stop: str | list[str] | None, most: int) -> tuple[str, ...]:
    if not stop and not isinstance(stop, str):
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > most:
        raise InvalidRequest(f"stop must have at most {most} strings.", "stop")
    for i, text in enumerate(stops):
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            param = "stop" if isinstance(stop, str) else f"stop[{i}]"
            raise InvalidRequest(f"{param} must have 1 to {MAX_STOP_LENGTH} characters.", param)
    return stops


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} ids.", "stop_token_ids")
    return checked_ids(ids, "stop_token_ids", vocab_size)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET


Content = str | list[Part] | None | UnsetType


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Content = UNSET
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    images: Any = None  # ollama's
    prefix: Any = None  # DeepSeek's and Mistral's: the answer goes on with this text
    partial: Any = None  # Qwen's and Kimi's: the same
    reasoning: str | None = None
    reasoning_content: str | None = None


def chat_prompt(messages: list[Message], param: str = "messages") -> ChatPrompt:
    """
    Raises:
        InvalidRequest: no message, an unknown role, or content that is not text.
    """
    if not messages:
        raise InvalidRequest(f"{param} is empty: send at least one message.", param)
    return ChatPrompt(tuple(_template_message(message, f"{param}[{i}]") for i, message in enumerate(messages)))


def flatten(content: Content, param: str) -> str:
    """Its text; parts are joined by a line break.

    Raises:
        InvalidRequest: it is missing or null, or a part is not text, or without text.
    """
    if content is UNSET:
        raise missing_field(param)
    if content is None:
        raise _null_content(param)
    if isinstance(content, str):
        return content
    return _PART_SEPARATOR.join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def checked_role(role: str, param: str) -> str:
    """The role as chat templates know it."""
    if role not in ROLES:
        raise InvalidRequest(f"{param} must be one of {', '.join(ROLES)}.", param)
    return "system" if role == "developer" else role


def _part_text(part: Part, param: str) -> str:
    field = _TEXT_FIELDS.get(part.type)
    if field is None:
        raise InvalidRequest(
            f"Parts of type {part.type[:32]!r} are not supported: this model reads text only. "
            'Send {"type": "text", "text": "..."}.',
            f"{param}.type",
            "unsupported_content_type",
        )
    text: str | UnsetType | None = getattr(part, field)
    if text is UNSET:
        raise missing_field(f"{param}.{field}")
    if text is None:
        raise InvalidRequest(f"{param}.{field} is null: send a string.", f"{param}.{field}", "invalid_type")
    return text


def missing_field(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing.", param, "missing_required_parameter")


def _null_content(param: str, but: str = "") -> InvalidRequest:
    return InvalidRequest(f"{param} is null: send a string or an array of text parts{but}.", param, "invalid_type")


def _template_message(message: Message, param: str) -> dict[str, Any]:
    for name in _UNSUPPORTED:
        if getattr(message, name):
            where = f"{param}.{name}"
            raise InvalidRequest(f"{where} is not supported. Leave it out.", where, "unsupported_parameter")
    role = checked_role(message.role, f"{param}.role")
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    is_silent = role == "assistant" and message.content in (None, UNSET)  # legal there: the turn had reasoning only
    if message.content is None and not is_silent:
        raise _null_content(f"{param}.content", "; only an assistant's message may have null")
    result: dict[str, Any] = {
        "role": role,
        "content": "" if is_silent else flatten(message.content, f"{param}.content"),
    }
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    result.update((key, value) for key, value in optional.items() if value is not None)
    return result
