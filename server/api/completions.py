"""/v1/completions: prompts in, text out, in the older form that evaluation tools still use. Wire only. Thread: loop."""

import codecs
from collections.abc import Sequence
from typing import Any

from core.errors import InvalidRequest, ServiceError
from core.types import Delta, TokenLogprobs, Usage
from server.api import fields
from server.api.answers import finite, refuse_broken, usage_object, wire_reason
from server.api.decoding import decode
from server.api.envelope import error_event
from server.api.surface import (
    Choice,
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

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")

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

    def parse(self, body: bytes, defaults: GenerationDefaults) -> GenerationCall:
        wire, unknown_fields = decode(body, CompletionBody, UNSUPPORTED, fields.WITHOUT_EFFECT)
        max_tokens = fields.checked_max_tokens(wire.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS)
        num_logprobs = None
        if wire.logprobs is not None:
            num_logprobs = fields.checked_top_logprobs(wire.logprobs, "logprobs", defaults.limits)
        if wire.echo and num_logprobs is not None:
            raise InvalidRequest("logprobs of the prompt are not supported: leave out echo or logprobs.", "logprobs")
        sampling = fields.sampling_params(wire, defaults, max_tokens, num_logprobs)
        return GenerationCall(
            model=fields.checked_model(wire.model),
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

    __slots__ = ("_call", "_context", "_end", "_head", "_heads", "_offsets", "_tail")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        num_choices = len(call.prompts) * call.num_sequences
        self._head = sse.event_head() + sse.json_line(_envelope(context))[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if call.includes_usage else b"]}") + sse.EVENT_END
        self._heads = tuple(self._head + b'{"index":%d,"text":' % i for i in range(num_choices))
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._end
        self._offsets = [_TextOffsets() for _ in range(num_choices)]

    def start(self) -> bytes:
        if not self._call.echo:
            return b""
        return b"".join(
            self._heads[choice] + sse.json_string(_prompt_text(self._call, self._context, choice)) + self._tail
            for choice in range(len(self._heads))
        )

    def text(self, choice: int, text: str) -> bytes:
        return self._heads[choice] + sse.json_strings[text] + self._tail

    def text_frame(self, choice: int) -> TextFrame:
        return TextFrame(self._heads[choice], sse.json_strings, self._tail)

    def delta(self, choice: int, delta: Delta) -> bytes:
        reason = wire_reason(delta.finish_reason)
        if not (delta.text or delta.logprobs or reason):
            return b""
        logprobs = None
        if delta.logprobs is not None:
            logprobs = _old_logprobs(delta.logprobs, self._context, self._offsets[choice])
        line = {"index": choice, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}
        return self._head + sse.json_line(line) + self._end

    def end(self, usage: Usage, extras: Extras) -> bytes:
        last = {"usage": usage_object(usage)} | extras if self._call.includes_usage else extras
        if not last:
            return sse.DONE
        return sse.event(sse.json_line(_envelope(self._context) | {"choices": []} | last)) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        return error_event(error)


def _envelope(context: ReplyContext) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.reply_id}",
        "object": "text_completion",
        "created": context.created_s,
        "model": context.model,
    }


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


class _TextOffsets:
    """Where the tokens of one choice begin, in characters of its text; one amid a character, where that begins."""

    __slots__ = ("_decoder", "_num_characters")

    def __init__(self) -> None:
        self._decoder = _new_utf8_decoder(errors="replace")
        self._num_characters = 0  # whole ones, of the tokens so far

    def next(self, token_bytes: bytes) -> int:
        """Of the next token."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(token_bytes))
        return offset


def _old_logprobs(logprobs: Sequence[TokenLogprobs], context: ReplyContext, offsets: _TextOffsets) -> dict[str, Any]:
    """The form with parallel lists."""
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in logprobs:
        result["tokens"].append(context.token_str(token.token_id))
        result["token_logprobs"].append(finite(token.logprob))
        result["top_logprobs"].append(_top_by_text(token, context))
        result["text_offset"].append(offsets.next(context.token_bytes(token.token_id)))
    return result


def _top_by_text(token: TokenLogprobs, context: ReplyContext) -> dict[str, float]:
    """Text to logprob, likeliest first, the drawn token always among them. Of ids with the same text the likeliest."""
    result: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        result.setdefault(context.token_str(token_id), finite(logprob))
    return result


def _whole_choice(call: GenerationCall, choice: Choice, context: ReplyContext) -> dict[str, Any]:
    prompt_text = _prompt_text(call, context, choice.index) if call.echo else ""
    return {
        "index": choice.index,
        "text": prompt_text + choice.text,
        "logprobs": None if choice.logprobs is None else _old_logprobs(choice.logprobs, context, _TextOffsets()),
        "finish_reason": wire_reason(choice.finish_reason),
    }
