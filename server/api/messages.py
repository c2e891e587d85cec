"""/v1/messages and its count_tokens: Anthropic's messages in; content blocks out, as named events or one document.

A turn's content blocks become messages of the chat template: text, tool calls and thoughts in one, each result one of
role tool. Thread: loop, or wherever a long body is parsed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType

from core.answer_parts import Arguments, CallBegin, Part, Reasoning, Text
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import Delta, FinishReason, Usage
from server.api.decoding import page_behind, page_of
from server.api.fields import (
    UNLIMITED_TOKENS,
    ChatPrompt,
    DefaultsOf,
    GenerationCall,
    GenerationDefaults,
    MaxTokens,
    SamplingFields,
    generation_call,
    read_body,
)
from server.api.history import Message, chat_prompt, found_text, joined_turn, missing_field, unsupported, with_end
from server.api.models import ServedModel
from server.api.reasoning import ThinkingOptions, answer_parser, parts_of, wishes_of
from server.api.replies import STATUSES, ErrorForm, ErrorObject, Extras, ReplyContext, Surface, WholeReply, list_reply
from server.api.structured import ResponseFormat
from server.api.tools import CalledFunction, Function, ToolCall, arguments_of, id_of, tool_wishes
from server.wire import sse
from server.wire.messages import TextFrame

FUNCTION_KIND = "custom"  # the type of tools that are functions
# A coding client's first lines: they differ from request to request, and with them no prefix would be found again
_BILLING = re.compile(r"(?:\s*+x-anthropic-billing-header:[^\n]*+\n?)+")

# ErrorKind -> (status, type); 529 is Anthropic's own, which its clients retry
_ERRORS = STATUSES | {
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.CONFLICT: (409, "invalid_request_error"),
    ErrorKind.BODY_TOO_LARGE: (413, "request_too_large"),
    ErrorKind.ENGINE: (500, "api_error"),
    ErrorKind.UPSTREAM: (502, "api_error"),
    ErrorKind.UNAVAILABLE: (529, "overloaded_error"),
}
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTENT_FILTER: "refusal",
}


# Requests.


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A content block of any type, by its fields."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET
    tool_use_id: str | UnsetType = UNSET
    content: "str | list[Block] | Block | None" = None  # of a server tool's result one, too
    is_error: bool | None = None
    title: str | None = None
    source: "Source | str | None" = None  # a search result's is a string
    # Of what a server tool has found
    url: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    error_code: str | None = None
    tool_name: str | UnsetType = UNSET
    tool_references: "list[Block] | None" = None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Of a document."""

    type: str = ""
    data: str | UnsetType = UNSET
    content: "str | list[Block] | UnsetType" = UNSET


Blocks = str | list[Block]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function as messages have it."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: ResponseFormat | None = None


class MessagesBody(SamplingFields, frozen=True, kw_only=True):
    messages: list[Turn]
    max_tokens: MaxTokens
    system: Blocks | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountBody(MessagesBody, frozen=True, kw_only=True):
    """What count_tokens takes: the answer's length may be left out."""

    max_tokens: MaxTokens = UNLIMITED_TOKENS


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    return _call(body, MessagesBody, defaults_of)


def parse_count(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    """The call that the request of count_tokens would make."""
    return _call(body, CountBody, defaults_of)


def _call(body: bytes, shape: type[MessagesBody], defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, shape, "messages", defaults_of, FUNCTION_KIND)
    wire, defaults = read.wire, read.defaults
    choice = wire.tool_choice or ToolChoice(type="auto")
    functions = [_function(tool, i) for i, tool in enumerate(wire.tools or ())]
    tools = tool_wishes(
        functions,
        _openai_choice(choice),
        not choice.disable_parallel_tool_use,
        defaults.tool_style,
        "tools[{}]",
        parameters="input_schema",
    )
    config, thinking = wire.output_config or OutputConfig(), wire.thinking or ThinkingOptions(type="adaptive")
    thought, variables = wishes_of(
        defaults.thought_style,
        wire.chat_template_kwargs,
        thinking.is_on,
        config.effort,
        "output_config.effort",
        thinking.budget_tokens,
        thinking.display != "omitted",
    )
    where = "output_config.format" if config.format is not None else "output_format"
    return generation_call(
        read,
        (_prompt(wire, defaults, tools, variables),),
        tools=tools,
        thought=thought,
        max_tokens=wire.max_tokens,
        num_logprobs=None,
        text_format=config.format or wire.output_format,
        format_param=where,
    )


def _function(tool: MessagesTool, position: int) -> Function:
    if tool.input_schema is None:
        raise missing_field(f"tools[{position}].input_schema")
    return Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)


def _openai_choice(choice: ToolChoice) -> Any:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise missing_field("tool_choice.name")
            return {"type": "function", "name": choice.name}
        case mode:
            return mode


def _prompt(
    wire: MessagesBody, defaults: GenerationDefaults, tools: Any, variables: dict[str, Any] | None
) -> ChatPrompt:
    if not wire.messages:
        raise InvalidRequest("messages is empty: send at least one message.", "messages")
    made: list[tuple[list[Message], str]] = []  # turns of one role in a row are one
    system = _without_billing(wire.system)
    if system:
        made.append(([Message(role="system", content=_text(system, "system"))], "system"))
    for i, turn in enumerate(wire.messages):
        where = f"messages[{i}]"
        is_own, has_calls = turn.role == "assistant", defaults.tool_style is not None
        for message, place in _assistant(turn, where, has_calls) if is_own else _others(turn, where):
            if made and made[-1][0][0].role == message.role and message.role in ("user", "assistant"):
                made[-1][0].append(message)
            else:
                made.append(([message], place))
    messages, params = [joined_turn(turn) for turn, _ in made], [where for _, where in made]
    prompt = chat_prompt(messages, defaults.tool_style, tools, "messages", params, variables, "tool_use_id")
    last = messages[-1]
    return with_end(prompt, None, last.role == "assistant" and not last.tool_calls)  # a prefill: the answer goes on


def _without_billing(system: Blocks | None) -> Blocks | None:
    """Leave out the header's lines where a text begins with them; a block that has nothing else goes."""
    if system is None:
        return None
    if isinstance(system, str):
        return _without_header(system)
    kept = list[Block]()
    for block in system:
        rest = _without_header(block.text) if isinstance(block.text, str) else block.text
        if rest == block.text:
            kept.append(block)
        elif isinstance(rest, str) and rest.strip():
            kept.append(msgspec.structs.replace(block, text=rest))
    return kept


def _without_header(text: str) -> str:
    found = _BILLING.match(text)
    return text if found is None else text[found.end() :]


def _text(content: Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _block_text(block: Block, where: str) -> str:
    match block.type:
        case "text" if isinstance(block.text, str):
            return block.text
        case "compaction" if isinstance(block.content, str):
            return block.content
        case "tool_reference" if isinstance(block.tool_name, str):
            return block.tool_name
        case "text":
            raise missing_field(f"{where}.text")
        case "document" if isinstance(block.source, Source) and block.source.type in ("text", "content"):
            name = "data" if block.source.type == "text" else "content"
            content: Blocks | UnsetType = getattr(block.source, name)
            if content is UNSET:
                raise missing_field(f"{where}.source.{name}")
            return "\n".join(filter(None, (block.title, _text(content, f"{where}.source.{name}"))))
        case "search_result" if isinstance(block.content, list):
            return "\n".join(filter(None, (block.title, _text(block.content, f"{where}.content"))))
        case other:
            raise unsupported("Blocks", other, where)


def _others(turn: Turn, where: str) -> list[tuple[Message, str]]:
    """The messages of a turn of the user, with their places: a result each, and the text between them."""
    if isinstance(turn.content, str):
        return [(Message(role=turn.role, content=turn.content), where)]
    made: list[tuple[Message, str]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            made.append((Message(role=turn.role, content="\n".join(texts)), where))
            texts.clear()

    for i, block in enumerate(turn.content):
        place = f"{where}.content[{i}]"
        if block.type != "tool_result":
            texts.append(_block_text(block, place))
            continue
        if block.tool_use_id is UNSET:
            raise missing_field(f"{place}.tool_use_id")
        flush()
        content = [block.content] if isinstance(block.content, Block) else block.content
        text = _text(content or "", f"{place}.content")
        made.append((Message(role="tool", content=text, tool_call_id=block.tool_use_id), place))
    flush()
    return made or [(Message(role=turn.role, content=""), where)]


def _assistant(turn: Turn, where: str, has_calls: bool) -> list[tuple[Message, str]]:
    """The messages of a turn of the assistant, with their places: more than one where server tools have answered in it.

    Args:
        has_calls: the template has a form for them; without it what server tools were asked is left out.
    """
    if isinstance(turn.content, str):
        return [(Message(role="assistant", content=turn.content), where)]
    made: list[tuple[Message, str]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []

    def flush() -> None:
        if made and not (texts or thoughts or calls):
            return
        content, thought = "\n".join(texts) if texts else None, "\n".join(thoughts) or None
        made.append(
            (Message(role="assistant", content=content, tool_calls=calls[:] or None, reasoning_content=thought), where)
        )
        for some in (texts, thoughts, calls):
            some.clear()

    for i, block in enumerate(turn.content):
        place = f"{where}.content[{i}]"
        match block.type:
            case "tool_use" | "server_tool_use" | "mcp_tool_use":
                for name in ("id", "name", "input"):
                    if getattr(block, name) is UNSET:
                        raise missing_field(f"{place}.{name}")
                called = CalledFunction(name=str(block.name), arguments=dict(block.input or {}))
                if has_calls or block.type == "tool_use":
                    calls.append(ToolCall(id=str(block.id), function=called))
            case kind if kind.endswith("_tool_result"):
                if has_calls:
                    flush()
                    found = found_text(msgspec.to_builtins(block.content), f"{place}.content")
                    made.append((Message(role="tool", content=found, tool_call_id=block.tool_use_id or None), place))
            case "thinking":
                if block.thinking is UNSET:
                    raise missing_field(f"{place}.thinking")
                thoughts.append(block.thinking)
            case "redacted_thinking":  # another server's, which nobody here can read
                pass
            case "compaction" if block.content is None:  # one that failed
                pass
            case _:
                texts.append(_block_text(block, place))
    flush()
    return made


# Answers.


@dataclass(slots=True)
class _Block:
    """A content block of the answer."""

    kind: Literal["text", "thinking", "tool_use"]
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    def opening(self) -> dict[str, Any]:
        return replace(self, texts=[]).document()

    def document(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.kind == "tool_use":
            return {"type": self.kind, "id": self.call_id, "name": self.name, "input": _input_of(text)}
        return {"type": self.kind, self.kind: text} | ({"signature": ""} if self.kind == "thinking" else {})

    def delta(self, text: str) -> dict[str, Any]:
        if self.kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.kind}_delta", self.kind: text}


def _input_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; those of a call that is cut short are no JSON, and stay text."""
    value = arguments_of(arguments)
    return {"incomplete_arguments": arguments} if value is None else value


class _Blocks:
    """The blocks of one answer, the last of which is open."""

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self.all: list[_Block] = []
        self.parser = answer_parser(call.thought, call.tools, call.constraint)
        self._reply_id = context.reply_id

    def add(self, part: Part) -> bool:
        """Whether the part begins a block."""
        match part:
            case CallBegin(index, name, call_id):
                self.all.append(_Block("tool_use", call_id or id_of(self._reply_id, 0, index), name))
                return True
            case Arguments(_, text):
                self.all[-1].texts.append(text)
                return False
            case Text(text) | Reasoning(text):
                kind: Literal["text", "thinking"] = "text" if isinstance(part, Text) else "thinking"
                begins = not self.all or self.all[-1].kind != kind
                if begins:
                    self.all.append(_Block(kind))
                self.all[-1].texts.append(text)
                return begins

    def stop_reason(self, delta: Delta) -> dict[str, Any]:
        """stop_reason and stop_sequence of the delta that ends the answer."""
        assert delta.finish_reason is not None, "the last delta"
        reason = _STOP_REASONS.get(delta.finish_reason, "end_turn")
        if delta.stop_string is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self.parser is not None and self.parser.has_complete_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": delta.stop_string}


_NO_STOP: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None}


class MessageStream:
    """Implements replies.StreamReply: blocks one after the other. No [DONE]: message_stop ends it.

    Without tools and thoughts the one text block is open from the start.
    """

    __slots__ = ("_blocks", "_context", "_stop", "_text_head")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._context = context
        self._blocks = _Blocks(call, context)
        self._stop = dict(_NO_STOP)
        self._text_head = (
            sse.event_head("content_block_delta")
            + b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
        )

    def start(self) -> bytes:
        usage = _usage(Usage(sum(self._context.prompt_lengths), 0))
        message = _message(self._context) | {"content": [], **_NO_STOP, "usage": usage}
        events = _event("message_start", message=message)
        if self._blocks.parser is not None:
            return events
        self._blocks.all.append(_Block("text"))
        return events + self._opened()

    def text(self, choice: int, text: str) -> bytes:
        if self._blocks.parser is None:
            return self._text_head + sse.json_strings[text] + b"}}" + sse.EVENT_END
        return b"".join(map(self._added, parts_of(self._blocks.parser, text, None)))

    def text_frame(self, choice: int) -> TextFrame | None:
        if self._blocks.parser is not None:
            return None
        return TextFrame(self._text_head, sse.json_strings, b"}}" + sse.EVENT_END)

    def delta(self, choice: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            self._stop = self._blocks.stop_reason(delta)
        if self._blocks.parser is None:
            return self.text(choice, delta.text) if delta.text else b""
        parts = parts_of(self._blocks.parser, delta.text, delta.finish_reason, delta.stop_string)
        return b"".join(map(self._added, parts))

    def end(self, usage: Usage, extras: Extras) -> bytes:
        events = self._closed()
        events += _event("message_delta", delta=self._stop, usage=_usage(usage), **extras)
        return events + _event("message_stop")

    def error(self, error: ServiceError) -> bytes:
        return _error_event(error, self._context.reply_id)

    def _added(self, part: Part) -> bytes:
        closing = self._closed()  # of the block before, should this part begin one
        events = closing + self._opened() if self._blocks.add(part) else b""
        if isinstance(part, CallBegin):
            return events
        index, block = len(self._blocks.all) - 1, self._blocks.all[-1]
        return events + _event("content_block_delta", index=index, delta=block.delta(part.text))

    def _opened(self) -> bytes:
        index, block = len(self._blocks.all) - 1, self._blocks.all[-1]
        return _event("content_block_start", index=index, content_block=block.opening())

    def _closed(self) -> bytes:
        return _event("content_block_stop", index=len(self._blocks.all) - 1) if self._blocks.all else b""


class MessageDocument(WholeReply):
    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context)
        self._last = Delta(text="", num_tokens=0, finish_reason=FinishReason.STOP)

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        if delta.finish_reason is not None:
            self._last = delta

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        blocks = _Blocks(self._call, self._context)
        for part in parts_of(blocks.parser, "".join(self.texts[0]), self._reasons[0], self._stop_reasons[0]):
            blocks.add(part)
        if blocks.parser is None and not blocks.all:
            blocks.all.append(_Block("text"))
        content, stop = [block.document() for block in blocks.all], blocks.stop_reason(self._last)
        return _message(self._context) | {"content": content, **stop, "usage": _usage(usage), **extras}


def models_reply(models: Sequence[ServedModel], query: Mapping[str, list[str]]) -> bytes:
    """GET /v1/models as Anthropic has it: a page, behind `after_id` or before `before_id`.

    Raises:
        InvalidRequest: of an unknown id, or a limit that is none.
    """
    _, limit = page_of(query, 1000)
    before, after = (query.get(name, [None])[0] for name in ("before_id", "after_id"))
    shown = [_model_object(model) for model in models]
    if before is None:
        return list_reply(*page_behind(shown, after, limit, "after_id"))
    found, has_more = page_behind(shown[::-1], before, limit, "before_id")
    return list_reply(found[::-1], has_more)


def model_reply(model: ServedModel) -> bytes:
    return sse.json_line(_model_object(model))


def _model_object(model: ServedModel) -> dict[str, Any]:
    at, most = datetime.fromtimestamp(model.created_s, UTC).isoformat(), model.max_model_len
    shown = {"type": "model", "id": model.id, "display_name": model.id, "lifecycle": "active", "created_at": at}
    return shown | {"max_input_tokens": most, "max_tokens": most}


def count_reply(num_tokens: int) -> bytes:
    """The answer of /v1/messages/count_tokens."""
    return sse.json_line({"input_tokens": num_tokens})


def _message(context: ReplyContext) -> dict[str, Any]:
    return {"id": SURFACE.prefix + context.reply_id, "type": "message", "role": "assistant", "model": context.model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_thought_tokens},
    }


def _event(name: str, **fields: Any) -> bytes:
    return sse.event(sse.json_line({"type": name, **fields}), name)


class MessagesError(TypedDict):
    type: Literal["error"]
    error: ErrorObject
    request_id: str


def _error_body(error: ServiceError, request_id: str) -> bytes:
    details: ErrorObject = {
        "type": _ERRORS[error.kind][1],
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
    document: MessagesError = {"type": "error", "error": details, "request_id": request_id}
    return sse.json_line(document)


def _error_event(error: ServiceError, request_id: str, number: int = 0) -> bytes:
    return sse.event(_error_body(error, request_id), "error")


ERRORS = ErrorForm(lambda error: _ERRORS[error.kind][0], _error_body, MessagesError, b"request-id")
SURFACE = Surface("/v1/messages", "names", parse, MessageDocument, MessageStream, "msg_", elsewhere=_error_event)
