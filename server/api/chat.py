"""/v1/chat/completions: messages in, chunks or one answer out. Wire only. Thread: loop."""

from collections.abc import Sequence
from typing import Any

from core.errors import InvalidRequest
from core.types import Delta, TokenLogprobs, Usage
from server.api import fields
from server.api.decoding import decode
from server.api.fields import Message
from server.api.known_fields import rules_of
from server.api.replies import (
    ChunkStream,
    VllmPromptLogprobs,
    envelope,
    logprob_entries,
    refuse_broken,
    sampled_ids,
    usage_object,
    wire_reason,
)
from server.api.surface import Choice, DefaultsOf, Extras, GenerationCall, GenerationDefaults, ReplyContext
from server.wire import sse

RULES = rules_of("chat")
ID_PREFIX = "chatcmpl-"


class ChatBody(fields.ChoiceFields, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatSurface:
    """Implements surface.Surface."""

    def parse(self, body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
        wire, unknown_fields = decode(body, ChatBody, RULES)
        model, defaults = defaults_of(fields.checked_model(wire.model))
        wishes = fields.token_wishes(wire, _num_logprobs(wire, defaults), defaults.limits, is_echoed=False)
        prompt = fields.chat_prompt(wire.messages)
        return fields.generation_call(
            wire,
            fields.sampling_params(wire, defaults, _max_tokens(wire), wishes),
            wishes,
            model=model,
            prompts=(prompt,),
            num_sequences=1 if wire.n is None else wire.n,
            unknown_fields=unknown_fields,
        )

    def stream_reply(self, call: GenerationCall, context: ReplyContext) -> "ChatStream":
        return ChatStream(call, context)

    def prompt_logprobs(self, call: GenerationCall, context: ReplyContext, choice: int) -> VllmPromptLogprobs | None:
        """Of the first choice: all have one prompt."""
        return VllmPromptLogprobs(context) if call.tokens.num_prompt_logprobs is not None and choice == 0 else None

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
        answer = envelope(context, ID_PREFIX, "chat.completion")
        answer["choices"] = [_whole_choice(call, choice, context) for choice in choices]
        answer["usage"] = usage_object(usage)
        if isinstance(choices[0].prompt_logprobs, VllmPromptLogprobs):
            answer["prompt_logprobs"] = choices[0].prompt_logprobs.entries
        if call.tokens.returns_ids:
            answer["prompt_token_ids"] = context.prompt_ids[0]
        return sse.json_line(answer | extras)


class ChatStream(ChunkStream):
    """Implements surface.StreamReply.

    The first chunks say the role, choice 0 first: the SDK's stream helper fails on any other order.
    """

    __slots__ = ()

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        chunk = envelope(context, ID_PREFIX, "chat.completion.chunk")
        super().__init__(call, context, chunk, b'"delta":{"content":', b"}")

    def start(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        prompt_ids = {"prompt_token_ids": self._context.prompt_ids[0]} if self._call.tokens.returns_ids else {}
        lines = (self._line(choice, role) for choice in range(self._call.num_sequences))
        return b"".join(self._chunk(choice, line, prompt_ids) for choice, line in enumerate(lines))

    def delta(self, choice: int, delta: Delta) -> bytes:
        events = b""
        num_last = delta.stop_logprobs is not None  # told with the end
        self._nums_tokens[choice] += delta.num_tokens - num_last
        if delta.text or delta.logprobs:
            events = self._chunk(choice, self._line(choice, {"content": delta.text}, delta.logprobs))
        self._nums_tokens[choice] += num_last
        if reason := wire_reason(delta.finish_reason):
            events += self._chunk(choice, self._line(choice, {}, None, reason, delta.stop_logprobs))
        return events

    def _line(
        self,
        choice: int,
        delta: dict[str, str],
        logprobs: Sequence[TokenLogprobs] | None = None,
        reason: str | None = None,
        stop: TokenLogprobs | None = None,
    ) -> dict[str, Any]:
        """
        Args:
            stop: the id that ends the text.
        """
        wishes = self._call.tokens
        shown = None if wishes.num_logprobs is None else logprobs
        line = {
            "index": choice,
            "delta": delta,
            "logprobs": _logprobs_object(shown, self._context),
            "finish_reason": reason,
        }
        return line | {"token_ids": sampled_ids(logprobs, stop)} if wishes.returns_ids else line


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


def _whole_choice(call: GenerationCall, choice: Choice, context: ReplyContext) -> dict[str, Any]:
    line = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if call.tokens.num_logprobs is None else _logprobs_object(choice.logprobs, context),
        "finish_reason": wire_reason(choice.finish_reason),
    }
    if call.tokens.returns_ids:
        line["token_ids"] = sampled_ids(choice.logprobs, choice.stop_logprobs)
    return line
