"""/v1/completions: prompts in, text out, in the older form that evaluation tools still use. Wire only. Thread: loop."""

from collections.abc import Sequence
from typing import Any

import msgspec

from core.errors import InvalidRequest, ServiceError
from core.types import Delta, Usage
from server.api import fields
from server.api.answers import refuse_broken, usage_object, wire_reason
from server.api.decoding import decode
from server.api.envelope import error_event
from server.api.old_logprobs import OldLogprobs, TokenLists
from server.api.surface import (
    Choice,
    DefaultsOf,
    Extras,
    GenerationCall,
    GenerationDefaults,
    IdsPrompt,
    Prompt,
    ReplyContext,
    TextPrompt,
)
from server.wire import sse
from server.wire.messages import TextFrame

DEFAULT_MAX_TOKENS = 16  # OpenAI's

UNSUPPORTED: dict[str, tuple[Any, ...]] = fields.UNSUPPORTED | {
    "suffix": ("",),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (True,),
}


class CompletionBody(fields.SamplingFields, frozen=True, kw_only=True):
    model: str
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class CompletionsSurface:
    """Implements surface.Surface."""

    def parse(self, body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
        wire, unknown_fields = decode(body, CompletionBody, UNSUPPORTED, fields.WITHOUT_EFFECT)
        defaults = defaults_of(fields.checked_model(wire.model))
        max_tokens = _max_tokens(wire)
        num_logprobs = None
        if wire.logprobs is not None:
            num_logprobs = fields.checked_top_logprobs(wire.logprobs, "logprobs", defaults.limits)
        sampling = fields.sampling_params(wire, defaults, max_tokens, num_logprobs)
        if wire.echo:
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=num_logprobs)
        return GenerationCall(
            model=wire.model,
            prompts=_prompts(wire.prompt, defaults),
            sampling=sampling,
            num_sequences=_num_sequences(wire),
            cache_salt=fields.checked_cache_salt(wire.cache_salt),
            priority=wire.priority,
            deadlines=fields.checked_deadlines(wire.deadlines),
            is_stream=bool(wire.stream),
            includes_usage=wire.includes_usage,
            wants_timings=bool(wire.timings),
            tells_queue=wire.tells_queue,
            echo=bool(wire.echo),
            unknown_fields=unknown_fields,
        )

    def stream_reply(self, call: GenerationCall, context: ReplyContext) -> "CompletionStream":
        return CompletionStream(call, context)

    def prompt_logprobs(self, call: GenerationCall, context: ReplyContext, choice: int) -> OldLogprobs | None:
        if call.sampling.num_prompt_logprobs is None:
            return None
        logprobs = _logprobs(call, context, choice)
        logprobs.begin_prompt()
        return logprobs

    def whole_reply(
        self,
        call: GenerationCall,
        context: ReplyContext,
        choices: Sequence[Choice],
        usage: Usage,
        extras: Extras,
    ) -> bytes:
        """
        Raises:
            ServiceError: a choice did not end well.
        """
        refuse_broken(choices)
        answer = _envelope(context) | {
            "choices": [_whole_choice(call, choice, context) for choice in choices],
            "usage": usage_object(usage),
        }
        return sse.json_line(answer | extras)


class CompletionStream:
    """Implements surface.StreamReply: chunks, [DONE]. Choice p * num_sequences + i is sequence i of prompt p."""

    __slots__ = ("_call", "_context", "_end", "_head", "_heads", "_logprobs", "_tail")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        num_choices = len(call.prompts) * call.num_sequences
        self._head = sse.event_head() + sse.json_line(_envelope(context))[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if call.includes_usage else b"]}") + sse.EVENT_END
        self._heads = tuple(self._head + b'{"index":%d,"text":' % i for i in range(num_choices))
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._end
        self._logprobs = [_logprobs(call, context, choice) for choice in range(num_choices)]

    def start(self) -> bytes:
        return b"".join(map(self._echo, range(len(self._heads)))) if self._call.echo else b""

    def text(self, choice: int, text: str) -> bytes:
        return self._heads[choice] + sse.json_strings[text] + self._tail

    def text_frame(self, choice: int) -> TextFrame:
        return TextFrame(self._heads[choice], sse.json_strings, self._tail)

    def delta(self, choice: int, delta: Delta) -> bytes:
        reason = wire_reason(delta.finish_reason)
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or reason):
            return b""
        lists = None
        if delta.logprobs is not None or delta.prompt_logprobs:
            logprobs = self._logprobs[choice]
            logprobs.add_prompt(delta.prompt_logprobs)
            logprobs.add(delta.logprobs or (), delta.stop_logprobs)
            lists = logprobs.take()
        return self._line(choice, delta.text, lists, reason)

    def end(self, usage: Usage, extras: Extras) -> bytes:
        last = {"usage": usage_object(usage)} | extras if self._call.includes_usage else extras
        if not last:
            return sse.DONE
        return sse.event(sse.json_line(_envelope(self._context) | {"choices": []} | last)) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        return error_event(error)

    def _echo(self, choice: int) -> bytes:
        lists = None
        if self._call.sampling.num_prompt_logprobs is not None:
            logprobs = self._logprobs[choice]
            logprobs.begin_prompt()
            lists = logprobs.take()
        return self._line(choice, _prompt_text(self._call, self._context, choice), lists, None)

    def _line(self, choice: int, text: str, lists: TokenLists | None, reason: str | None) -> bytes:
        line = {"index": choice, "text": text, "logprobs": lists, "finish_reason": reason}
        return self._head + sse.json_line(line) + self._end


def _envelope(context: ReplyContext) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.reply_id}",
        "object": "text_completion",
        "created": context.created_s,
        "model": context.model,
    }


def _max_tokens(wire: CompletionBody) -> int:
    if wire.max_tokens == 0 and wire.echo:
        return 0
    if wire.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1, or 0 with echo: true for the prompt alone.", "max_tokens")
    return fields.checked_max_tokens(wire.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS)


def _num_sequences(wire: CompletionBody) -> int:
    num_sequences = 1 if wire.n is None else wire.n
    if wire.best_of is not None and wire.best_of != num_sequences:
        raise InvalidRequest(
            "best_of is not supported: leave it out, or make it n.", "best_of", "unsupported_parameter"
        )
    return num_sequences


def _prompts(prompt: str | list[str | int | list[int]], defaults: GenerationDefaults) -> tuple[Prompt, ...]:
    """The four forms of a prompt: text, texts, ids, lists of ids."""
    vocab_size, most = defaults.vocab_size, defaults.limits.num_prompts
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if not prompt:
        raise InvalidRequest("prompt is empty: send text or token ids.", "prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return (IdsPrompt(fields.checked_ids(ids, "prompt", vocab_size)),)
    if len(prompt) > most:
        raise InvalidRequest(f"prompt must have at most {most} texts or lists of ids.", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return tuple(map(TextPrompt, texts))
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) != len(prompt):
        raise InvalidRequest("prompt must be of one kind: texts, or token ids, or lists of token ids.", "prompt")
    return tuple(_ids_prompt(item, f"prompt[{i}]", vocab_size) for i, item in enumerate(lists))


def _ids_prompt(ids: list[int], param: str, vocab_size: int) -> IdsPrompt:
    if not ids:
        raise InvalidRequest(f"{param} is empty: send at least one token id.", param)
    return IdsPrompt(fields.checked_ids(ids, param, vocab_size))


def _prompt_text(call: GenerationCall, context: ReplyContext, choice: int) -> str:
    return context.prompt_texts[choice // call.num_sequences]


def _logprobs(call: GenerationCall, context: ReplyContext, choice: int) -> OldLogprobs:
    prompt = choice // call.num_sequences
    return OldLogprobs(context, prompt if call.echo else None)


def _whole_choice(call: GenerationCall, choice: Choice, context: ReplyContext) -> dict[str, Any]:
    lists = None
    if choice.logprobs is not None:
        logprobs = choice.prompt_logprobs
        if not isinstance(logprobs, OldLogprobs):
            logprobs = _logprobs(call, context, choice.index)
        logprobs.add(choice.logprobs, choice.stop_logprobs)
        lists = logprobs.take()
    prompt_text = _prompt_text(call, context, choice.index) if call.echo else ""
    return {
        "index": choice.index,
        "text": prompt_text + choice.text,
        "logprobs": lists,
        "finish_reason": wire_reason(choice.finish_reason),
    }
