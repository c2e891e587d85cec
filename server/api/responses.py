"""/v1/responses: text in, text out, as items and named events; nothing is stored. Thread: loop."""

from typing import Any

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import Delta, FinishReason, Usage
from server.api.decoding import decode
from server.api.fields import (
    ChatPrompt,
    Content,
    DefaultsOf,
    GenerationCall,
    MaxTokens,
    SamplingFields,
    check_range,
    checked_role,
    flatten,
    generation_call,
    missing_field,
)
from server.api.known_fields import rules_of
from server.api.replies import Extras, ReplyContext, Surface, WholeReply, logprob_entries
from server.wire import sse

INCLUDE_LOGPROBS = "message.output_text.logprobs"
# What OpenAI's API can include. Only logprobs exist here: asking for the rest changes nothing.
INCLUDABLE = frozenset(
    {
        INCLUDE_LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

RULES = rules_of("responses")

# Why a sequence ended -> why the response is incomplete; a reason not here completes it.
_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}

# ErrorKind -> code of a failed response; the SDK's type knows no other codes for what can happen here.
_FAILED_CODES = {ErrorKind.RATE_LIMITED: "rate_limit_exceeded", ErrorKind.INVALID_REQUEST: "invalid_prompt"}


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None
    role: str | None = None
    content: Content = msgspec.UNSET


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """known_fields refuses what asks for something in `text` and `reasoning`."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    tool_choice: str | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    wire, unknown_fields = decode(body, ResponsesBody, RULES)
    model, defaults = defaults_of(wire.model)
    _check_include(wire.include or [])
    _check_metadata(wire.metadata or {})
    num_logprobs = wire.top_logprobs or 0
    check_range("top_logprobs", num_logprobs, 0, defaults.limits.num_top_logprobs)
    has_logprobs = num_logprobs or INCLUDE_LOGPROBS in (wire.include or ())
    return generation_call(
        wire,
        model,
        defaults,
        (_prompt(wire),),
        max_tokens=wire.max_output_tokens,
        num_logprobs=num_logprobs if has_logprobs else None,
        wire=wire,
        unknown_fields=unknown_fields,
    )


def _prompt(wire: ResponsesBody) -> ChatPrompt:
    messages = [{"role": "system", "content": wire.instructions}] if wire.instructions else []
    if isinstance(wire.input, str):
        return ChatPrompt((*messages, {"role": "user", "content": wire.input}), "input")
    if not wire.input:
        raise InvalidRequest("input is empty: send text or at least one message.", "input")
    thought = ""  # the text of the reasoning item before a message
    for i, item in enumerate(wire.input):
        if item.type == "reasoning":
            thought = _thought(item, f"input[{i}]")
            continue
        message = _message(item, f"input[{i}]")
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        thought = ""
        messages.append(message)
    if not messages:
        raise InvalidRequest("input has no message: send at least one.", "input")
    return ChatPrompt(tuple(messages), "input")


def _thought(item: InputItem, param: str) -> str:
    """The text of a reasoning item, which the chat template may show, without summaries and encrypted content."""
    content = item.content
    if isinstance(content, list):
        content = [part for part in content if part.type == "reasoning_text"]
    return flatten(content, f"{param}.content") if content else ""


def _message(item: InputItem, param: str) -> dict[str, Any]:
    if item.type not in (None, "message"):
        raise InvalidRequest(
            f"Items of type {item.type[:32]!r} are not supported: send messages.",
            f"{param}.type",
            "unsupported_content_type",
        )
    if item.role is None:
        raise missing_field(f"{param}.role")
    return {"role": checked_role(item.role, f"{param}.role"), "content": flatten(item.content, f"{param}.content")}


def _check_include(include: list[str]) -> None:
    for i, name in enumerate(include):
        if name not in INCLUDABLE:
            known = ", ".join(sorted(INCLUDABLE))
            raise InvalidRequest(f"{name[:64]!r} cannot be included. Choose from: {known}.", f"include[{i}]")


def _check_metadata(metadata: dict[str, str]) -> None:
    """Apply OpenAI's limits: every answer and three events of a stream repeat the metadata."""
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise InvalidRequest("metadata must have at most 16 keys of 64 and values of 512 characters.", "metadata")


class ResponseStream:
    """Implements replies.StreamReply: one message item with one text part. No [DONE]: the last event ends it."""

    __slots__ = ("_call", "_context", "_head", "_item_id", "_logprobs", "_num_events", "_reason", "_texts")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._call = call
        self._context = context
        self._item_id = _item_id(context)
        self._num_events = 0  # written: the next sequence_number
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason: FinishReason | None = None
        place = sse.json_line({"type": "response.output_text.delta", **self._place()})
        name = "response.output_text.delta"
        self._head = sse.event_head(name) + place[:-1] + b',"logprobs":[],"sequence_number":'

    def start(self) -> bytes:
        response = _response(self._call, self._context, "in_progress")
        item = _item(self._context, "in_progress", [])
        return (
            self._event("response.created", {"response": response})
            + self._event("response.in_progress", {"response": response})
            + self._event("response.output_item.added", {"output_index": 0, "item": item})
            + self._event("response.content_part.added", self._place() | {"part": _part("", [])})
        )

    def delta(self, choice: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        if not delta.logprobs:
            return self.text(choice, delta.text) if delta.text else b""
        entries = logprob_entries(delta.logprobs, self._context)
        self._texts.append(delta.text)
        self._logprobs += entries
        return self._event("response.output_text.delta", self._place() | {"logprobs": entries, "delta": delta.text})

    def text(self, choice: int, text: str) -> bytes:
        self._texts.append(text)
        number = self._num_events
        self._num_events = number + 1
        return self._head + b'%d,"delta":' % number + sse.json_strings[text] + b"}\n\n"

    def text_frame(self, choice: int) -> None:
        """None: events are numbered, and the last ones repeat the text."""

    def end(self, usage: Usage, extras: Extras) -> bytes:
        reason = self._reason or FinishReason.STOP
        item = self._whole_item(_item_status(reason))
        response = _finished(self._call, self._context, reason, item, usage) | extras
        return self._closing_events(item) + self._event(f"response.{response['status']}", {"response": response})

    def error(self, error: ServiceError) -> bytes:
        """Closes the item with the text so far, and fails the response."""
        item = self._whole_item("incomplete")
        response = _response(self._call, self._context, "failed") | {
            "error": {
                "code": _FAILED_CODES.get(error.kind, "server_error"),
                "message": error.message,
                "type": error.code,
                "param": error.param,
            },
            "output": [item],
        }
        return self._closing_events(item) + self._event("response.failed", {"response": response})

    def _closing_events(self, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        done = self._place() | {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", done)
            + self._event("response.content_part.done", self._place() | {"part": part})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
        )

    def _whole_item(self, status: str) -> dict[str, Any]:
        return _item(self._context, status, [_part("".join(self._texts), self._logprobs)])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        line = sse.json_line({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return sse.event(line, name)


class ResponseDocument(WholeReply):
    def document(self, usage: Usage) -> dict[str, Any]:
        (text,), (reason,), (logprobs,) = self.texts, self._reasons, self._logprobs
        item = _item(self._context, _item_status(reason), [_part("".join(text), logprobs)])
        return _finished(self._call, self._context, reason, item, usage)


def input_tokens_reply(num_tokens: int) -> bytes:
    """The answer of /v1/responses/input_tokens."""
    return sse.json_line({"object": "response.input_tokens", "input_tokens": num_tokens})


def _item_id(context: ReplyContext) -> str:
    return f"msg_{context.reply_id}"


def _item(context: ReplyContext, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": _item_id(context), "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _item_status(reason: FinishReason) -> str:
    return "incomplete" if reason in _INCOMPLETE else "completed"


def _finished(
    call: GenerationCall, context: ReplyContext, reason: FinishReason, item: dict[str, Any], usage: Usage
) -> dict[str, Any]:
    response = _response(call, context, _item_status(reason))
    if reason in _INCOMPLETE:
        response["incomplete_details"] = {"reason": _INCOMPLETE[reason]}
    response["output"] = [item]
    response["usage"] = {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
    return response


def _response(call: GenerationCall, context: ReplyContext, status: str) -> dict[str, Any]:
    """A response without output, as at its start. It repeats the parameters it ran under."""
    wire: ResponsesBody = call.wire
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
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "background": False,
        "completed_at": int(context.unix_clock()) if status == "completed" else None,
        "presence_penalty": call.sampling.presence_penalty,
        "frequency_penalty": call.sampling.frequency_penalty,
        "max_tool_calls": wire.max_tool_calls,
        "safety_identifier": wire.safety_identifier,
        "prompt_cache_key": wire.prompt_cache_key,
        "user": wire.user,
        "service_tier": "default",
        "store": False,
        "temperature": call.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": wire.tool_choice or "auto",
        "tools": [],
        "top_logprobs": call.sampling.num_logprobs or 0,
        "top_p": call.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": wire.metadata or {},
    }


SURFACE = Surface(parse, ResponseStream, ResponseDocument)
