"""/v1/responses: text in, text out, as items and named events. What is stored: ledger/responses.py. Thread: loop."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.answer_parts import Arguments, CallBegin, Part, Reasoning, Text
from core.context_policy import Policy
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.tool_detection import ToolStyle
from core.types import Delta, FinishReason, Usage
from server.api.fields import (
    ChatPrompt,
    DefaultsOf,
    GenerationCall,
    MaxTokens,
    NumLikely,
    SamplingFields,
    check_range,
    generation_call,
    read_body,
)
from server.api.history import (
    Content,
    Message,
    ResultPart,
    chat_prompt,
    flatten,
    found_text,
    joined_turn,
    missing_field,
)
from server.api.reasoning import Budget, ReasoningOptions, ThinkingOptions, answer_parser, parts_of, thought_wishes
from server.api.replies import Extras, ReplyContext, Surface, WholeReply, logprob_entries
from server.api.structured import ResponseFormat
from server.api.tools import CalledFunction, Function, ToolCall, ToolWishes, id_of, tool_wishes
from server.wire import sse

INCLUDE_LOGPROBS = "message.output_text.logprobs"
# What OpenAI's API can include. Only logprobs exist here: asking for the rest changes nothing.
INCLUDABLE = frozenset(
    f"{INCLUDE_LOGPROBS} code_interpreter_call.outputs computer_call_output.output.image_url file_search_call.results "
    "message.input_image.image_url reasoning.encrypted_content web_search_call.action.sources "
    "web_search_call.results".split()
)


# Why a sequence ended -> why the response is incomplete; a reason not here completes it.
_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}

# ErrorKind -> code of a failed response; the SDK's type knows no other codes for what can happen here.
_FAILED_CODES = {ErrorKind.RATE_LIMITED: "rate_limit_exceeded", ErrorKind.INVALID_REQUEST: "invalid_prompt"}


# Types of items, beside messages and reasoning. Calls of another server's own tools have their results in them.
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"})
_ANSWERED = frozenset({"code_interpreter_call", "file_search_call", "mcp_call", "web_search_call"})
_NAMED = frozenset({"function_call", "custom_tool_call", "mcp_call"})  # the others are named by their type
_FOUND = frozenset({"shell_call_output", "apply_patch_call_output"})  # results in forms of their own
_RESULTS = _FOUND | {"function_call_output", "custom_tool_call_output", "local_shell_call_output"}
_TEXTLESS = frozenset({"mcp_list_tools", "compaction"})  # no model can read anything of them


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None
    role: str | None = None
    content: Content = msgspec.UNSET
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResultPart | str] | msgspec.UnsetType | None = msgspec.UNSET
    # Of tools that are no functions
    id: str | None = None
    status: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    queries: list[str] | None = None
    code: str | None = None
    outputs: list[dict[str, Any]] | None = None
    results: list[dict[str, Any]] | None = None
    error: str | dict[str, Any] | None = None


class ResponsesTool(Function, frozen=True, kw_only=True):
    """A function as responses has it: flat."""

    type: Literal["function"]


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: NumLikely | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, ResponsesBody, "responses", defaults_of)
    wire, defaults = read.wire, read.defaults
    if wire.previous_response_id is not None and not defaults.stores_responses:
        message = (
            "This server stores no responses. Send the history as input, or ask the operator: --store-responses 30d."
        )
        raise InvalidRequest(message, "previous_response_id", "unsupported_parameter")
    wire = msgspec.structs.replace(wire, store=defaults.stores_responses and wire.store is not False)
    if wire.truncation is not None and wire.context_policy is None:
        policy = Policy.ERROR if wire.truncation == "disabled" else Policy.DROP_OLDEST_TURNS
        wire = msgspec.structs.replace(wire, context_policy=policy)
    _check_include(wire.include or [])
    check_metadata(wire.metadata or {})
    num_logprobs = wire.top_logprobs or 0
    check_range("top_logprobs", num_logprobs, 0, defaults.limits.num_top_logprobs)
    style = defaults.tool_style
    functions: list[Function] = [*(wire.tools or ())]
    tools = tool_wishes(functions, wire.tool_choice, wire.parallel_tool_calls, style, "tools[{}]", wire.max_tool_calls)
    thought, variables = thought_wishes(wire, defaults.thought_style)
    has_logprobs = num_logprobs or INCLUDE_LOGPROBS in (wire.include or ())
    return generation_call(
        read._replace(wire=wire),
        (_prompt(wire, style, tools, variables),),
        tools=tools,
        thought=thought,
        max_tokens=wire.max_output_tokens,
        num_logprobs=num_logprobs if has_logprobs else None,
        text_format=None if wire.text is None else wire.text.format,
        wire=wire,
    )


def _prompt(
    wire: ResponsesBody, style: ToolStyle | None, tools: ToolWishes | None, variables: dict[str, Any] | None
) -> ChatPrompt:
    turns = [[Message(role="system", content=wire.instructions)]] if wire.instructions else []
    num_before = len(turns)
    if isinstance(wire.input, str):
        items = [InputItem(role="user", content=wire.input)]
    elif wire.input:
        items = wire.input
    else:
        raise InvalidRequest("input is empty: send text or at least one message.", "input")
    params = ["instructions"] * num_before
    thoughts: list[str] = []  # of the reasoning items before a message
    for i, item in enumerate(items):
        param = "input" if isinstance(wire.input, str) else f"input[{i}]"
        if item.type == "reasoning":
            thoughts.append(_thought(item, param))
            continue
        for message in _messages(item, param, style is not None):
            if message.role == "assistant":
                message = msgspec.structs.replace(message, reasoning_content="\n".join(filter(None, thoughts)) or None)
            thoughts.clear()
            if message.tool_calls and len(turns) > num_before and turns[-1][0].role == "assistant":
                turns[-1].append(message)  # one turn: its text, and its calls
            else:
                turns.append([message])
                params.append(param)
    if len(turns) == num_before:
        raise InvalidRequest("input has no message: send at least one.", "input")
    return chat_prompt([*map(joined_turn, turns)], style, tools, "input", params, variables, "call_id")


def _thought(item: InputItem, param: str) -> str:
    """The text of a reasoning item, which the chat template may show, without summaries and encrypted content."""
    content = item.content
    if isinstance(content, list):
        content = [part for part in content if not isinstance(part, str) and part.type == "reasoning_text"]
    return flatten(content, f"{param}.content") if content else ""


def _messages(item: InputItem, param: str, has_calls: bool) -> list[Message]:
    """What an item is to the chat template.

    Args:
        has_calls: it has a form for them; without it what another server's tools were asked and found is left out.
    """
    kind = item.type or "message"
    if kind == "message":
        if item.role is None:
            raise missing_field(f"{param}.role")
        return [Message(role=item.role, content=flatten(item.content, f"{param}.content"))]
    if kind in _CALLS or (kind in _ANSWERED and has_calls):
        call_id = item.call_id or (item.id or param if kind in _ANSWERED else None)
        call = Message(role="assistant", tool_calls=[ToolCall(function=_called(item, kind, param), id=call_id)])
        if kind in _CALLS:
            return [call]
        return [call, Message(role="tool", content=_found(item, param), tool_call_id=call_id)]
    if kind in _RESULTS:
        call_id = item.call_id or (item.id if kind == "local_shell_call_output" else None)
        if call_id is None:
            raise missing_field(f"{param}.call_id")
        text = _found(item, param) if kind in _FOUND else flatten(item.output, f"{param}.output")
        return [Message(role="tool", content=text, tool_call_id=call_id)]
    if kind in _ANSWERED | _TEXTLESS:
        return []
    message = f"Items of type {kind[:32]!r} are not supported: send messages, calls and their outputs."
    raise InvalidRequest(message, f"{param}.type", "unsupported_content_type")


def _called(item: InputItem, kind: str, param: str) -> CalledFunction:
    name = item.name if kind in _NAMED else kind.removesuffix("_call")
    if name is None:
        raise missing_field(f"{param}.name")
    texts = {"input": item.input, "queries": item.queries, "code": item.code}
    asked = item.arguments or item.action or item.operation or texts
    if isinstance(asked, dict):
        asked = {key: value for key, value in asked.items() if value is not None and key != "sources"}
    return CalledFunction(name=name, arguments=asked)


def _found(item: InputItem, param: str) -> str:
    told = msgspec.to_builtins(item) | {"content": None, "sources": (item.action or {}).get("sources")}
    return found_text(told, param) or item.status or ""


def _text_format(wire: ResponsesBody) -> dict[str, Any]:
    """As it was asked for."""
    asked = ResponseFormat(type="text") if wire.text is None or wire.text.format is None else wire.text.format
    required = {"description": None, "strict": False} if asked.type == "json_schema" else {}
    return required | {name: value for name, value in msgspec.to_builtins(asked).items() if value is not None}


def _check_include(include: list[str]) -> None:
    for i, name in enumerate(include):
        if name not in INCLUDABLE:
            known = ", ".join(sorted(INCLUDABLE))
            raise InvalidRequest(f"{name[:64]!r} cannot be included. Choose from: {known}.", f"include[{i}]")


def check_metadata(metadata: dict[str, str]) -> None:
    """Apply OpenAI's limits: every answer and three events of a stream repeat the metadata."""
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise InvalidRequest("metadata must have at most 16 keys of 64 and values of 512 characters.", "metadata")


@dataclass(slots=True)
class _Item:
    """An item of the output: a message, a thought, or a call.

    Args:
        kind: of the parts that it is made of.
        call: where it is one.
    """

    id: str
    index: int
    kind: type[Part]
    call: CallBegin | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def event(self) -> str:
        """The name of its events, before `.delta` and `.done`."""
        return _EVENTS[self.kind]

    def part(self) -> dict[str, Any]:
        """Its content so far, where it is no call."""
        text = "".join(self.texts)
        if self.kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def document(self, context: ReplyContext, status: str) -> dict[str, Any]:
        made: dict[str, Any] = {"id": self.id, "type": _TYPES[self.kind], "status": status}
        if self.call is not None:
            call_id = self.call.id or id_of(context.reply_id, 0, self.call.index)
            return made | {"call_id": call_id, "name": self.call.name, "arguments": "".join(self.texts)}
        content = [self.part()] if status != "in_progress" else []
        own = {"summary": list[Any]()} if self.kind is Reasoning else {"role": "assistant"}
        return made | own | {"content": content}


_TYPES = {Text: "message", Reasoning: "reasoning", Arguments: "function_call"}
_PREFIXES = {Text: "msg", Reasoning: "rs", Arguments: "fc"}
_EVENTS = {
    Text: "response.output_text",
    Reasoning: "response.reasoning_text",
    Arguments: "response.function_call_arguments",
}


class ResponseStream:
    """Implements replies.StreamReply: items one after the other. No [DONE]: the last event ends it.

    Without tools and thoughts there is one message item with one text part, and its place is known from the start.
    """

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._items: list[_Item] = []
        self._parser = answer_parser(call.thought, call.tools, call.constraint)
        self._num_events = 0  # written: the next sequence_number
        self._before_end: tuple[int, int] | None = None  # events and items, before its end was composed
        self._reason: FinishReason | None = None
        self._head = b"" if self._parser is not None else self._text_head(self._open(Text))
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not written yet

    def start(self) -> bytes:
        response = _response(self._call, self._context, "in_progress")
        events = self._event("response.created", {"response": response})
        events += self._event("response.in_progress", {"response": response})
        return events if self._parser is not None else events + self._announced(self._items[0])

    def delta(self, choice: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        if self._parser is not None:
            self._logprobs += logprob_entries(delta.logprobs or (), self._context)
            return self._parts(parts_of(self._parser, delta.text, delta.finish_reason, delta.stop_string))
        if not delta.logprobs:
            return self.text(choice, delta.text) if delta.text else b""
        entries = logprob_entries(delta.logprobs, self._context)
        item = self._items[0]
        item.texts.append(delta.text)
        item.logprobs += entries
        return self._event("response.output_text.delta", _place(item) | {"logprobs": entries, "delta": delta.text})

    def text(self, choice: int, text: str) -> bytes:
        if self._parser is not None:
            return self._parts(self._parser.feed(text))
        self._items[-1].texts.append(text)
        number = self._num_events
        self._num_events = number + 1
        return self._head + b'%d,"delta":' % number + sse.json_strings[text] + b"}\n\n"

    def text_frame(self, choice: int) -> None:
        """None: events are numbered, and the last ones repeat the text."""

    def end(self, usage: Usage, extras: Extras) -> bytes:
        self._before_end = self._num_events, len(self._items)
        events = b"" if self._items else self._opened(Text)
        response = self.document(usage, extras)
        events += self._closed(response["status"])
        return events + self._event(f"response.{response['status']}", {"response": response})

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        """The whole response, once its last delta has come."""
        if not self._items:
            self._open(Text)
        status = "incomplete" if self._reason in _INCOMPLETE else "completed"
        response = _response(self._call, self._context, status)
        if self._reason in _INCOMPLETE:
            response["incomplete_details"] = {"reason": _INCOMPLETE[self._reason]}
        response["output"] = self._documents(status)
        response["usage"] = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_thought_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }
        return response | extras

    def error(self, error: ServiceError) -> bytes:
        """Closes the item with the text so far, and fails the response, whose end may have been composed in vain."""
        if self._before_end is not None:
            self._num_events, num_items = self._before_end
            del self._items[num_items:]
        events = self._closed("incomplete")
        response = _response(self._call, self._context, "failed") | {
            "error": {
                "code": _FAILED_CODES.get(error.kind, "server_error"),
                "message": error.message,
                "type": error.code,
                "param": error.param,
            },
            "output": self._documents("incomplete"),
        }
        return events + self._event("response.failed", {"response": response})

    def _parts(self, parts: list[Part]) -> bytes:
        return b"".join(map(self._added, parts))

    def _added(self, part: Part) -> bytes:
        """The events of one part of the answer."""
        if isinstance(part, CallBegin):
            return self._closed("completed") + self._opened(Arguments, part)
        events = b""
        if not self._items or self._items[-1].kind is not type(part):
            events = self._closed("completed") + self._opened(type(part))
        item = self._items[-1]
        item.texts.append(part.text)
        fields = {"item_id": item.id, "output_index": item.index} if item.call else _place(item)
        entries, self._logprobs = self._logprobs, []
        if item.kind is Text:
            item.logprobs += entries
            fields["logprobs"] = entries
        return events + self._event(f"{item.event}.delta", fields | {"delta": part.text})

    def _open(self, kind: type[Part], call: CallBegin | None = None) -> _Item:
        number = len(self._items)
        suffix = f"_{number}" if number else ""
        self._items.append(_Item(f"{_PREFIXES[kind]}_{self._context.reply_id}{suffix}", number, kind, call))
        return self._items[-1]

    def _opened(self, kind: type[Part], call: CallBegin | None = None) -> bytes:
        return self._announced(self._open(kind, call))

    def _documents(self, status: str) -> list[dict[str, Any]]:
        """All items; the last one has the status, those before it are complete."""
        statuses = ["completed"] * (len(self._items) - 1) + [status]
        return [item.document(self._context, one) for item, one in zip(self._items, statuses, strict=True)]

    def _announced(self, item: _Item) -> bytes:
        fields = {"output_index": item.index, "item": item.document(self._context, "in_progress")}
        events = self._event("response.output_item.added", fields)
        if item.call is not None:
            return events
        return events + self._event("response.content_part.added", _place(item) | {"part": item.part()})

    @staticmethod
    def _text_head(item: _Item) -> bytes:
        """What is before the number of a text's event."""
        place = sse.json_line({"type": "response.output_text.delta", **_place(item)})
        return sse.event_head("response.output_text.delta") + place[:-1] + b',"logprobs":[],"sequence_number":'

    def _closed(self, status: str) -> bytes:
        """The events that end the item that is open."""
        if not self._items:
            return b""
        item = self._items[-1]
        document = item.document(self._context, status)
        if item.call is not None:
            done = {"item_id": item.id, "output_index": item.index, "name": item.call.name}
            events = self._event(f"{item.event}.done", done | {"arguments": document["arguments"]})
        else:
            part = item.part()
            done = _place(item) | {name: value for name, value in part.items() if name in ("text", "logprobs")}
            events = self._event(f"{item.event}.done", done)
            events += self._event("response.content_part.done", _place(item) | {"part": part})
        return events + self._event("response.output_item.done", {"output_index": item.index, "item": document})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        line = sse.json_line({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return sse.event(line, name)


class ResponseDocument(WholeReply):
    """What a stream comes to."""

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context)
        self._stream = ResponseStream(call, context)

    def add_logprobs(self, choice: int, delta: Delta) -> None:
        self._stream.delta(choice, delta)

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        if self._call.tokens.num_logprobs is None:  # with them, all deltas have passed add_logprobs
            text, stop = "".join(self.texts[0]), self._stop_reasons[0]
            stop_string = stop if isinstance(stop, str) else None
            delta = Delta(text=text, num_tokens=0, finish_reason=self._reasons[0], stop_string=stop_string)
            self._stream.delta(0, delta)
        return self._stream.document(usage, extras)


def input_tokens_reply(num_tokens: int) -> bytes:
    """The answer of /v1/responses/input_tokens."""
    return sse.json_line({"object": "response.input_tokens", "input_tokens": num_tokens})


def _place(item: _Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def _response(call: GenerationCall, context: ReplyContext, status: str) -> dict[str, Any]:
    """A response without output, as at its start. It repeats the parameters it ran under."""
    wire: ResponsesBody = call.wire
    reasoning = wire.reasoning or ReasoningOptions()
    return {
        "id": f"resp_{context.reply_id}",
        "object": "response",
        "created_at": context.created_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "model": context.model,
        "output": [],
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "reasoning": {"effort": reasoning.effort or wire.reasoning_effort, "summary": None},
        "background": False,
        "completed_at": int(context.unix_clock()) if status == "completed" else None,
        "presence_penalty": call.sampling.presence_penalty,
        "frequency_penalty": call.sampling.frequency_penalty,
        "max_tool_calls": wire.max_tool_calls,
        "safety_identifier": wire.safety_identifier,
        "prompt_cache_key": wire.prompt_cache_key,
        "user": wire.user,
        "service_tier": "default",
        "store": bool(wire.store),
        "temperature": call.sampling.temperature,
        "text": {"format": _text_format(wire)},
        "tool_choice": wire.tool_choice or "auto",
        "tools": [msgspec.to_builtins(tool) | {"strict": bool(tool.strict)} for tool in wire.tools or ()],
        "top_logprobs": call.sampling.num_logprobs or 0,
        "top_p": call.sampling.top_p,
        "truncation": wire.truncation or "disabled",
        "usage": None,
        "metadata": wire.metadata or {},
    }


def _error_event(error: ServiceError, request_id: str, number: int) -> bytes:
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return sse.event(sse.json_line({"type": "error", "sequence_number": number, **fields}), "error")


SURFACE = Surface("/v1/responses", "names", parse, ResponseDocument, ResponseStream, "resp_", elsewhere=_error_event)
