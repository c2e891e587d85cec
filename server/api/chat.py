"""/v1/chat/completions: messages in, chunks or one document out. Thread: loop."""

from collections.abc import Sequence
from typing import Any

from core.errors import InvalidRequest
from core.types import Delta, TokenLogprobs, Usage
from server.api.decoding import decode
from server.api.fields import (
    ChoiceFields,
    DefaultsOf,
    GenerationCall,
    MaxTokens,
    Message,
    RequestLimits,
    chat_prompt,
    check_range,
    generation_call,
)
from server.api.known_fields import rules_of
from server.api.replies import (
    ChunkStream,
    ReplyContext,
    Surface,
    WholeReply,
    envelope,
    logprob_entries,
    sampled_ids,
    usage_object,
    wire_reason,
)

RULES = rules_of("chat")
ID_PREFIX = "chatcmpl-"


class ChatBody(ChoiceFields, frozen=True, kw_only=True):
    messages: list[Message]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None  # max_tokens' newer name, which wins
    logprobs: bool | None = None
    top_logprobs: int | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    wire, unknown_fields = decode(body, ChatBody, RULES)
    model, defaults = defaults_of(wire.model)
    max_tokens = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    return generation_call(
        wire,
        model,
        defaults,
        (chat_prompt(wire.messages),),
        max_tokens=max_tokens,
        num_logprobs=_num_logprobs(wire, defaults.limits),
        unknown_fields=unknown_fields,
    )


def _num_logprobs(wire: ChatBody, limits: RequestLimits) -> int | None:
    num_logprobs = wire.top_logprobs or 0
    check_range("top_logprobs", num_logprobs, 0, limits.num_top_logprobs)
    if not wire.logprobs and num_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true beside it.", "top_logprobs")
    return num_logprobs if wire.logprobs else None


class ChatStream(ChunkStream):
    """Implements replies.StreamReply.

    The first chunks have the roles, choice 0 first: the SDK's stream helper fails on any other order.
    """

    __slots__ = ()

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        chunk = envelope(context, ID_PREFIX, "chat.completion.chunk")
        super().__init__(call, context, chunk, b'"delta":{"content":', b"}")

    def start(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        prompt_ids = {"prompt_token_ids": self._context.prompt_ids[0]} if self._call.tokens.returns_ids else {}
        return b"".join(
            self._chunk(choice, self._line(choice, role, None, [], None), prompt_ids)
            for choice in range(self._call.num_sequences)
        )

    def delta(self, choice: int, delta: Delta) -> bytes:
        events = b""
        stop = () if delta.stop_logprobs is None else (delta.stop_logprobs,)  # the id that ends the text comes last
        ids = sampled_ids(delta)
        num_told = len(ids) - len(stop)
        self._nums_tokens[choice] += delta.num_tokens - len(stop)
        if delta.text or delta.logprobs:
            line = self._line(choice, {"content": delta.text}, delta.logprobs, ids[:num_told], None)
            events = self._chunk(choice, line)
        self._nums_tokens[choice] += len(stop)
        if reason := wire_reason(delta.finish_reason):
            events += self._chunk(choice, self._line(choice, {}, None, ids[num_told:], reason))
        return events

    def _line(
        self,
        choice: int,
        delta: dict[str, str],
        logprobs: Sequence[TokenLogprobs] | None,
        ids: list[int],
        reason: str | None,
    ) -> dict[str, Any]:
        wishes = self._call.tokens
        shown = None
        if logprobs is not None and wishes.num_logprobs is not None:
            shown = _logprobs_object(logprob_entries(logprobs, self._context))
        line = {"index": choice, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return line | {"token_ids": ids} if wishes.returns_ids else line


class ChatDocument(WholeReply):
    def document(self, usage: Usage) -> dict[str, Any]:
        wishes, context = self._call.tokens, self._context
        answer = envelope(context, ID_PREFIX, "chat.completion")
        answer["choices"] = [self._choice(choice) for choice in range(len(self.texts))]
        answer["usage"] = usage_object(usage)
        if wishes.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs[0]
        if wishes.returns_ids:
            answer["prompt_token_ids"] = context.prompt_ids[0]
        return answer

    def _choice(self, choice: int) -> dict[str, Any]:
        wishes = self._call.tokens
        line = {
            "index": choice,
            "message": {"role": "assistant", "content": "".join(self.texts[choice]), "refusal": None},
            "logprobs": None if wishes.num_logprobs is None else _logprobs_object(self._logprobs[choice]),
            "finish_reason": wire_reason(self._reasons[choice]),
        }
        return line | {"token_ids": self._ids[choice]} if wishes.returns_ids else line


def _logprobs_object(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


SURFACE = Surface(parse, ChatStream, ChatDocument)
