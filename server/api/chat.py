"""/v1/chat/completions: messages in, chunks or one document out. Thread: loop."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from core.answer_parts import Arguments, CallBegin, Part, Reasoning, Text
from core.errors import InvalidRequest
from core.tool_detection import ToolStyle
from core.types import Delta, TokenLogprobs, Usage
from server.api.fields import (
    ChoiceFields,
    DefaultsOf,
    GenerationCall,
    MaxTokens,
    NumLikely,
    generation_call,
    num_logprobs_of,
    read_body,
)
from server.api.history import Message, Prediction, chat_prompt, flatten, with_end
from server.api.reasoning import Budget, ReasoningOptions, ThinkingOptions, answer_parser, parts_of, thought_wishes
from server.api.replies import (
    ChunkStream,
    Envelope,
    Extras,
    LogprobEntry,
    PartialUsage,
    Reason,
    ReplyContext,
    Surface,
    UsageObject,
    WholeReply,
    envelope,
    logprob_entries,
    sampled_ids,
    stop_reason,
    usage_object,
    wire_reason,
)
from server.api.tools import Function, FunctionTool, ToolWishes, id_of, is_old, old_wishes, reason_of, tool_wishes
from server.wire.messages import TextFrame


class ChatBody(ChoiceFields, frozen=True, kw_only=True):
    messages: list[Message]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None  # max_tokens' newer name, which wins
    logprobs: bool | None = None
    top_logprobs: NumLikely | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: list[Function] | None = None  # tools' old name, with function_call for tool_choice
    function_call: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    prediction: Prediction | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, ChatBody, "chat", defaults_of)
    wire, defaults = read.wire, read.defaults
    max_tokens = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    tools = _tools(wire, defaults.tool_style)
    thought, variables = thought_wishes(wire, defaults.thought_style)
    prompt = chat_prompt(wire.messages, defaults.tool_style, tools, template_kwargs=variables)
    documents = tuple(_scored(one, f"documents[{i}].score") for i, one in enumerate(wire.documents or ()))
    prompt = msgspec.structs.replace(prompt, documents=documents)
    return generation_call(
        read,
        (with_end(prompt, wire.add_generation_prompt, wire.continue_final_message),),
        tools=tools,
        thought=thought,
        max_tokens=max_tokens,
        num_logprobs=num_logprobs_of(wire.logprobs, wire.top_logprobs, defaults.limits),
        prediction="" if wire.prediction is None else flatten(wire.prediction.content, "prediction.content"),
    )


def _scored(document: dict[str, Any], where: str) -> dict[str, Any]:
    """With a number as its score, which a context policy goes by."""
    score = document.get("score")
    if isinstance(score, str):
        try:
            return document | {"score": float(score)}
        except ValueError:
            pass
    if score is None or (isinstance(score, int | float) and not isinstance(score, bool)):
        return document
    raise InvalidRequest(f"{where} must be a number.", where, "invalid_type")


def _tools(wire: ChatBody, style: ToolStyle | None) -> ToolWishes | None:
    if wire.functions or wire.function_call not in (None, "none", "auto"):
        if wire.tools:
            raise InvalidRequest("Send tools or functions, which is its old name; not both.", "functions")
        return old_wishes(wire.functions or [], wire.function_call, style)
    functions = [tool.function for tool in wire.tools or ()]
    return tool_wishes(functions, wire.tool_choice, wire.parallel_tool_calls, style)


class CalledObject(TypedDict, total=False):
    name: str
    arguments: str


class CallObject(TypedDict, total=False):
    index: int  # in a stream
    id: str
    type: Literal["function"]
    function: CalledObject


class MessageObject(TypedDict, total=False):
    """Of a chunk: what it adds."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallObject]
    function_call: CalledObject


class LogprobsObject(TypedDict):
    content: list[LogprobEntry]
    refusal: None


class _Choice(TypedDict):
    index: int
    logprobs: LogprobsObject | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChoice(_Choice):
    message: MessageObject


class ChunkChoice(_Choice):
    delta: MessageObject


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class ChatChunk(Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[PartialUsage | None]
    prompt_token_ids: NotRequired[list[int]]


class ChatStream(ChunkStream):
    """Implements replies.StreamReply.

    The first chunks have the roles, choice 0 first: the SDK's stream helper fails on any other order.
    """

    __slots__ = ("_parsers",)

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        chunk = envelope(context, SURFACE.prefix, "chat.completion.chunk")
        super().__init__(call, context, chunk, b'"delta":{"content":', b"}")
        self._parsers = [answer_parser(call.thought, call.tools, call.constraint) for _ in range(call.num_sequences)]

    def text(self, choice: int, text: str) -> bytes:
        parser = self._parsers[choice]
        return super().text(choice, text) if parser is None else self._parts(choice, parser.feed(text))

    def text_frame(self, choice: int) -> TextFrame | None:
        return super().text_frame(choice) if self._parsers[choice] is None else None

    def _parts(self, choice: int, parts: list[Part]) -> bytes:
        has_old = is_old(self._call.tools)
        deltas = (delta_of(part, self._context.reply_id, choice, has_old) for part in parts)
        return b"".join(self._chunk(choice, self._line(choice, delta, None, [], None)) for delta in deltas)

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
        text, reason = delta.text, wire_reason(delta.finish_reason)
        parser = self._parsers[choice]
        if parser is not None:
            events, text = self._parts(choice, parts_of(parser, text, delta.finish_reason, delta.stop_string)), ""
            reason = reason_of(reason, parser, self._call.tools)
        if text or delta.logprobs:
            line = self._line(choice, {"content": text}, delta.logprobs, ids[:num_told], None)
            events += self._chunk(choice, line)
        self._nums_tokens[choice] += len(stop)
        if reason:
            line = self._line(choice, {}, None, ids[num_told:], reason)
            events += self._chunk(choice, line | {"stop_reason": stop_reason(delta, self._call)})
        return events

    def _line(
        self,
        choice: int,
        delta: dict[str, Any],
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
    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        wishes, context = self._call.tokens, self._context
        answer = envelope(context, SURFACE.prefix, "chat.completion")
        answer["choices"] = [self._choice(choice) for choice in range(len(self.texts))]
        answer["usage"] = usage_object(usage)
        if wishes.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs[0]
        if wishes.returns_ids:
            answer["prompt_token_ids"] = context.prompt_ids[0]
        return answer | extras

    def _choice(self, choice: int) -> dict[str, Any]:
        wishes, reason = self._call.tokens, wire_reason(self._reasons[choice])
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts[choice]), "refusal": None}
        parser = answer_parser(self._call.thought, self._call.tools, self._call.constraint)
        if parser is not None:
            parts = parts_of(parser, message["content"], self._reasons[choice], self._stop_reasons[choice])
            message |= collected(parts, self._context.reply_id, choice, is_old(self._call.tools))
            reason = reason_of(reason, parser, self._call.tools)
        line = {
            "index": choice,
            "message": message,
            "logprobs": None if wishes.num_logprobs is None else _logprobs_object(self._logprobs[choice]),
            "finish_reason": reason,
            "stop_reason": self._stop_reasons[choice],
        }
        return line | {"token_ids": self._ids[choice]} if wishes.returns_ids else line


def delta_of(part: Part, reply_id: str, choice: int, has_old: bool = False) -> dict[str, Any]:
    """What a part of the answer adds to the message."""
    if has_old and isinstance(part, CallBegin | Arguments):  # there is one call
        named = {"name": part.name, "arguments": ""} if isinstance(part, CallBegin) else {"arguments": part.text}
        return {"function_call": named}
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallBegin(index, name, call_id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id or id_of(reply_id, choice, index), "type": "function"}
            return {"tool_calls": [call | {"function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def collected(parts: list[Part], reply_id: str, choice: int, has_old: bool = False) -> dict[str, Any]:
    """What the parts of a whole answer are in its message."""
    content, thought = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Text, Reasoning))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            call_id = part.id or id_of(reply_id, choice, part.index)
            calls.append({"id": call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif isinstance(part, Arguments):
            calls[part.index]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"content": content or (None if calls or thought else "")}
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        message |= {"function_call": calls[0]["function"]} if has_old else {"tool_calls": calls}
    return message


def _logprobs_object(entries: list[Any]) -> LogprobsObject:
    return {"content": entries, "refusal": None}


SURFACE = Surface("/v1/chat/completions", "chunks", parse, ChatDocument, ChatStream, "chatcmpl-")
