"""/v1/chat/completions: messages in, chunks or one answer out. Wire only. Thread: loop."""

from collections.abc import Sequence
from typing import Any

from core.errors import InvalidRequest, ServiceError
from core.types import Delta, TokenLogprobs, Usage
from server.api import fields
from server.api.answers import logprob_entries, refuse_broken, usage_object, wire_reason
from server.api.content import Message, chat_prompt
from server.api.decoding import decode
from server.api.envelope import error_event
from server.api.surface import Choice, DefaultsOf, Extras, GenerationCall, GenerationDefaults, ReplyContext
from server.wire import sse
from server.wire.messages import TextFrame

UNSUPPORTED: dict[str, tuple[Any, ...]] = fields.UNSUPPORTED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "best_of": (1,),
    "echo": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class ChatBody(fields.SamplingFields, frozen=True, kw_only=True):
    model: str
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatSurface:
    """Implements surface.Surface."""

    def parse(self, body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
        wire, unknown_fields = decode(body, ChatBody, UNSUPPORTED, fields.WITHOUT_EFFECT)
        defaults = defaults_of(fields.checked_model(wire.model))
        return GenerationCall(
            model=wire.model,
            prompts=(chat_prompt(wire.messages),),
            sampling=fields.sampling_params(wire, defaults, _max_tokens(wire), _num_logprobs(wire, defaults)),
            num_sequences=1 if wire.n is None else wire.n,
            cache_salt=fields.checked_cache_salt(wire.cache_salt),
            priority=wire.priority,
            deadlines=fields.checked_deadlines(wire.deadlines),
            is_stream=bool(wire.stream),
            includes_usage=wire.includes_usage,
            wants_timings=bool(wire.timings),
            tells_queue=wire.tells_queue,
            unknown_fields=unknown_fields,
        )

    def stream_reply(self, call: GenerationCall, context: ReplyContext) -> "ChatStream":
        return ChatStream(call, context)

    def prompt_logprobs(self, call: GenerationCall, context: ReplyContext, choice: int) -> None:
        """No prompt is echoed."""

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
        answer = _envelope(context, "chat.completion")
        answer["choices"] = [_whole_choice(choice, context) for choice in choices]
        answer["usage"] = usage_object(usage)
        return sse.json_line(answer | extras)


class ChatStream:
    """Implements surface.StreamReply: chunks, [DONE].

    The first chunks say the role, choice 0 first: the SDK's stream helper fails on any other order.
    """

    __slots__ = ("_call", "_context", "_end", "_head", "_heads", "_tail")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        envelope = sse.json_line(_envelope(context, "chat.completion.chunk"))
        self._head = sse.event_head() + envelope[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if call.includes_usage else b"]}") + sse.EVENT_END
        self._heads = tuple(self._head + b'{"index":%d,"delta":{"content":' % i for i in range(call.num_sequences))
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._end

    def start(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, role) for choice in range(self._call.num_sequences))

    def text(self, choice: int, text: str) -> bytes:
        return self._heads[choice] + sse.json_strings[text] + self._tail

    def text_frame(self, choice: int) -> TextFrame:
        return TextFrame(self._heads[choice], sse.json_strings, self._tail)

    def delta(self, choice: int, delta: Delta) -> bytes:
        events = b""
        if delta.text or delta.logprobs:
            events = self._chunk(choice, {"content": delta.text}, delta.logprobs)
        if reason := wire_reason(delta.finish_reason):
            events += self._chunk(choice, {}, None, reason)
        return events

    def end(self, usage: Usage, extras: Extras) -> bytes:
        last = {"usage": usage_object(usage)} | extras if self._call.includes_usage else extras
        if not last:
            return sse.DONE
        chunk = _envelope(self._context, "chat.completion.chunk") | {"choices": []} | last
        return sse.event(sse.json_line(chunk)) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        return error_event(error)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, str],
        logprobs: Sequence[TokenLogprobs] | None = None,
        reason: str | None = None,
    ) -> bytes:
        line = {
            "index": choice,
            "delta": delta,
            "logprobs": _logprobs_object(logprobs, self._context),
            "finish_reason": reason,
        }
        return self._head + sse.json_line(line) + self._end


def _envelope(context: ReplyContext, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{context.reply_id}",
        "object": kind,
        "created": context.created_s,
        "model": context.model,
    }


def _max_tokens(wire: ChatBody) -> int:
    """max_completion_tokens is max_tokens' newer name, and wins."""
    if wire.max_completion_tokens is not None:
        return fields.checked_max_tokens(wire.max_completion_tokens, "max_completion_tokens")
    return fields.checked_max_tokens(wire.max_tokens, "max_tokens")


def _num_logprobs(wire: ChatBody, defaults: GenerationDefaults) -> int | None:
    num_logprobs = fields.checked_top_logprobs(wire.top_logprobs, "top_logprobs", defaults.limits)
    if not wire.logprobs and num_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true beside it.", "top_logprobs")
    return num_logprobs if wire.logprobs else None


def _logprobs_object(logprobs: Sequence[TokenLogprobs] | None, context: ReplyContext) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": logprob_entries(logprobs, context), "refusal": None}


def _whole_choice(choice: Choice, context: ReplyContext) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _logprobs_object(choice.logprobs, context),
        "finish_reason": wire_reason(choice.finish_reason),
    }
