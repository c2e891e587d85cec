"""Ollama's API: /api/chat and /api/generate, whose streams are JSON lines, and what its clients ask about models.

Its options are the other surfaces' fields under names of its own. Thread: loop, or wherever a long body is parsed.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict, TypeVar

import msgspec
import numpy as np

from core.answer_parts import Arguments, CallBegin, Part, Reasoning, Text
from core.constraints import ANY_OBJECT
from core.errors import InvalidRequest, ServiceError
from core.tool_detection import ThoughtStyle
from core.types import Delta, FinishReason, Usage
from server.api.decoding import decode, parse_object
from server.api.fields import (
    ChatPrompt,
    ClampedFields,
    DefaultsOf,
    GenerationCall,
    MaxTokens,
    NumLikely,
    ReadBody,
    TextPrompt,
    generation_call,
    num_logprobs_of,
    read_body,
)
from server.api.history import Message, chat_prompt
from server.api.models import ServedModel, ServerCard
from server.api.reasoning import ThoughtWishes, answer_parser, parts_of, wishes_of
from server.api.replies import ErrorForm, Extras, ReplyContext, Surface, WholeReply, logprob_entries, status_of
from server.api.tools import CalledFunction, FunctionTool, ToolCall, ToolWishes, arguments_of, tool_wishes
from server.values import format_count
from server.wire import sse

LATEST = ":latest"  # the tag that clients add to a name without one
_MS_NS = 1_000_000
_CAPABILITIES = {"generate": "completion", "embed": "embedding"}
_REASONS = {FinishReason.LENGTH: "length"}

B = TypeVar("B")


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an earlier turn; it has no id."""

    function: CalledFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class NothingAsked(InvalidRequest):
    """A body with nothing to answer: its client wants the model to be loaded, or unloaded.

    Args:
        model: by the name that the client asked for.
        keep_alive: as it was sent.
    """

    def __init__(self, model: str, is_chat: bool, keep_alive: str | float | None) -> None:
        param = "messages" if is_chat else "prompt"
        super().__init__(f"{param} is missing.", param, "missing_required_parameter")
        self.model, self.is_chat, self.keep_alive = model, is_chat, keep_alive


class OllamaFields(ClampedFields, frozen=True, kw_only=True):
    """Of both; `options` lie beside them by then."""

    max_tokens: MaxTokens | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: NumLikely | None = None


class ChatBody(OllamaFields, frozen=True, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[FunctionTool] | None = None


class GenerateBody(OllamaFields, frozen=True, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    context: list[int] | None = None  # of an earlier answer, which this one goes on from


def parse_chat(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = _read(body, ChatBody, defaults_of)
    wire, defaults = read.wire, read.defaults
    if not wire.messages:
        raise NothingAsked(read.model, True, wire.keep_alive)
    tools = tool_wishes([tool.function for tool in wire.tools or ()], None, None, defaults.tool_style)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(wire.messages)]
    thought, variables = _thought(wire, defaults.thought_style)
    prompt = chat_prompt(messages, defaults.tool_style, tools, template_kwargs=variables, call_field="tool_name")
    return _call(read, prompt, thought, tools)


def parse_generate(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = _read(body, GenerateBody, defaults_of)
    wire = read.wire
    if not (wire.prompt or wire.suffix):
        raise NothingAsked(read.model, False, wire.keep_alive)
    prompt: ChatPrompt | TextPrompt
    is_raw = bool(wire.raw or wire.suffix)
    if is_raw and wire.context:
        raise InvalidRequest(
            "context continues a conversation: it cannot be combined with raw or suffix. Leave one of them out.",
            "context",
        )
    thought, variables = _thought(wire, None if is_raw else read.defaults.thought_style)
    if is_raw:
        prompt = TextPrompt(wire.prompt or "", suffix=wire.suffix or None)
    else:
        turns = [*turns_of(wire.context or []), Message(role="user", content=wire.prompt or "")]
        if wire.system:
            turns = [Message(role="system", content=wire.system), *(one for one in turns if one.role != "system")]
        prompt = chat_prompt(turns, param="prompt", template_kwargs=variables)
    return _call(read, prompt, thought)


# `context` is the turns so far, as JSON: six bytes a number, which every client's numbers hold exactly, behind a mark.
_MARK, _PIECE = int.from_bytes(b"turns:"), 6


class _Turn(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


_TURNS = msgspec.json.Decoder(list[_Turn])


def context_of(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    data = sse.json_line([{"role": turn["role"], "content": turn["content"]} for turn in turns])
    data += b" " * (-len(data) % _PIECE)
    pieces = np.zeros((len(data) // _PIECE, 8), np.uint8)  # on the loop: 100,000 numbers take some 5 ms
    pieces[:, -_PIECE:] = np.frombuffer(data, np.uint8).reshape(-1, _PIECE)
    return [_MARK, *pieces.view(">u8").ravel().tolist()]


def turns_of(context: Sequence[int]) -> list[Message]:
    """Raises InvalidRequest: it is of no answer of a server like this one."""
    if not context:
        return []
    try:
        if context[0] != _MARK:
            raise ValueError("it is another server's")
        turns = _TURNS.decode(b"".join(one.to_bytes(_PIECE) for one in context[1:]))
    except (ValueError, OverflowError, RecursionError):  # msgspec's errors are ValueErrors
        message = "context is not from an answer of this server. Send it unchanged from an answer, or leave it out."
        raise InvalidRequest(message, "context") from None
    return [Message(role=one.role, content=one.content) for one in turns]


def _thought(wire: OllamaFields, style: ThoughtStyle | None) -> tuple[ThoughtWishes | None, dict[str, Any] | None]:
    """`think` is true, false or an effort."""
    effort = wire.think if isinstance(wire.think, str) else None
    is_on = None if wire.think is None else bool(wire.think)
    return wishes_of(style, wire.chat_template_kwargs, is_on, effort, "think")


def _read(body: bytes, shape: type[B], defaults_of: DefaultsOf) -> ReadBody[B]:
    """The body with its options beside the other fields; the format "json" is any object."""
    fields = parse_object(body)
    if fields.get("format") == "json":
        fields["format"] = ANY_OBJECT
    options = fields.pop("options", None)
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise InvalidRequest("options must be an object.", "options", "invalid_type")
    if twice := sorted(fields.keys() & options.keys()):
        raise InvalidRequest(f"options.{twice[0]} is a field of the request itself. Send it once.", "options")
    return read_body(fields | options, shape, "ollama", lambda name: defaults_of(_name(name)))


def _call(
    read: ReadBody[OllamaFields],
    prompt: ChatPrompt | TextPrompt,
    thought: ThoughtWishes | None,
    tools: ToolWishes | None = None,
) -> GenerationCall:
    """A stream unless it says otherwise, and with the times that a last line has."""
    wire = read.wire
    call = generation_call(
        read,
        (prompt,),
        max_tokens=wire.max_tokens,
        num_logprobs=num_logprobs_of(wire.logprobs, wire.top_logprobs, read.defaults.limits),
        thought=thought,
        tools=tools,
    )
    return msgspec.structs.replace(call, is_stream=wire.stream is not False, wants_timings=True, wire=wire)


def _name(model: str | None) -> str | None:
    return None if model is None else model.removesuffix(LATEST)


def _message(message: OllamaMessage, where: str) -> Message:
    if message.images:
        text = f"{where}.images is not supported: this model reads text only. Leave it out."
        raise InvalidRequest(text, f"{where}.images", "unsupported_content_type")
    return Message(
        role=message.role,
        content=message.content,
        reasoning_content=message.thinking,
        name=message.tool_name if message.role == "tool" else None,
        tool_calls=[ToolCall(function=call.function) for call in message.tool_calls or ()] or None,
    )


# Answers.


class _Lines:
    """What the parts of one answer are on Ollama's lines.

    A call is told once it is complete. Logprobs are told with the first line behind their tokens.
    """

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        prompt = call.prompts[0]
        self.is_chat = isinstance(prompt, ChatPrompt) and prompt.param == "messages"
        self._turns = prompt.messages if isinstance(prompt, ChatPrompt) and not self.is_chat else None
        self._content = list[str]()
        self.logprobs = list[dict[str, Any]]()
        self._context = context
        self._shows_timings = bool(call.wire.timings)
        self._parser = answer_parser(call.thought, call.tools, call.constraint)
        self._name = ""
        self._arguments: list[str] | None = None

    def parts(self, text: str, reason: FinishReason | None, stop: str | int | None = None) -> list[dict[str, Any]]:
        """The fields of each line that more text makes."""
        lines = [line for part in parts_of(self._parser, text, reason, stop) for line in self._lines_of(part)]
        return lines if reason is None else [*lines, *self._complete()]

    def _lines_of(self, part: Part) -> Iterable[dict[str, Any]]:
        match part:
            case Arguments(_, text):
                assert self._arguments is not None, "it follows its call's begin"
                self._arguments.append(text)
            case CallBegin(_, name, _):
                yield from self._complete()
                self._name, self._arguments = name, []
            case Text(text) | Reasoning(text):
                yield from self._complete()
                yield self._text("content" if isinstance(part, Text) else "thinking", text)

    def _text(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "content" and self._turns is not None:
            self._content.append(text)
        if self.is_chat:
            return {"message": {"role": "assistant", "content": "", kind: text}}
        return {"response": "", ("response" if kind == "content" else kind): text}

    def _complete(self) -> Iterable[dict[str, Any]]:
        """The line of the call that has ended; one that was cut short is none."""
        if self._arguments is None:
            return
        arguments, self._arguments = arguments_of("".join(self._arguments)), None
        if arguments is not None:
            calls = [{"function": {"name": self._name, "arguments": arguments}}]
            yield {"message": {"role": "assistant", "content": "", "tool_calls": calls}}

    def line(self, fields: Mapping[str, Any], is_done: bool = False) -> dict[str, Any]:
        told = {"logprobs": self.logprobs} if self.logprobs else {}
        self.logprobs = []
        return {
            "model": self._context.model,
            "created_at": _time(self._context.unix_clock()),
            **fields,
            **told,
            "done": is_done,
        }

    def last(self, fields: Mapping[str, Any], reason: FinishReason, usage: Usage, extras: Extras) -> dict[str, Any]:
        """The line that ends an answer."""
        timings = extras.get("timings", {})
        shown = {name: told for name, told in extras.items() if name != "timings" or self._shows_timings}
        times = {name: timings.get(name, 0.0) for name in ("total", "prefill", "decode", "detokenize")}
        return self.line(fields, is_done=True) | {
            "done_reason": _REASONS.get(reason, "stop"),
            "total_duration": round(times["total"] * _MS_NS),
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": round(times["prefill"] * _MS_NS),
            "eval_count": usage.num_completion_tokens,
            "eval_duration": round((times["decode"] + times["detokenize"]) * _MS_NS),
            **(shown if self._turns is None else self._with_context(shown, self._turns)),
        }

    def _with_context(self, shown: Extras, turns: Sequence[Mapping[str, Any]]) -> Extras:
        """With what /api/generate goes on from; what a policy has left out has another name there."""
        context = context_of([*turns, {"role": "assistant", "content": "".join(self._content)}])
        renamed = {"context_policy" if name == "context" else name: told for name, told in shown.items()}
        return {"context": context, **renamed}


class OllamaStream:
    """Implements replies.StreamReply: a JSON object a line, the last with `done`."""

    __slots__ = ("_context", "_lines", "_reason")

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        self._context = context
        self._lines = _Lines(call, context)
        self._reason = FinishReason.STOP

    def start(self) -> bytes:
        return b""

    def text(self, choice: int, text: str) -> bytes:
        return self._written(self._lines.parts(text, None))

    def text_frame(self, choice: int) -> None:
        """None: each line has the time."""

    def delta(self, choice: int, delta: Delta) -> bytes:
        self._reason = delta.finish_reason or self._reason
        self._lines.logprobs += logprob_entries(delta.logprobs or (), self._context)
        return self._written(self._lines.parts(delta.text, delta.finish_reason, delta.stop_string))

    def end(self, usage: Usage, extras: Extras) -> bytes:
        nothing = {"message": {"role": "assistant", "content": ""}} if self._lines.is_chat else {"response": ""}
        return sse.json_line(self._lines.last(nothing, self._reason, usage, extras)) + b"\n"

    def error(self, error: ServiceError) -> bytes:
        return _error_body(error, "") + b"\n"

    def _written(self, parts: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(sse.json_line(self._lines.line(part)) + b"\n" for part in parts)


class OllamaDocument(WholeReply):
    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        lines = _Lines(self._call, self._context)
        said: dict[str, Any] = {"role": "assistant", "content": ""} if lines.is_chat else {"response": ""}
        for part in lines.parts("".join(self.texts[0]), self._reasons[0], self._stop_reasons[0]):
            for name, value in (part["message"] if lines.is_chat else part).items():
                if name != "role" and value:
                    said[name] = said[name] + value if name in said else value
        lines.logprobs = self._logprobs[0]
        return lines.last({"message": said} if lines.is_chat else said, self._reasons[0], usage, extras)


class OllamaError(TypedDict):
    error: str
    code: str | None


def _error_body(error: ServiceError, request_id: str) -> bytes:
    return sse.json_line(OllamaError(error=error.message, code=error.code))


ERRORS = ErrorForm(status_of, _error_body, OllamaError)
CHAT = Surface("/api/chat", "lines", parse_chat, OllamaDocument, OllamaStream)
GENERATE = Surface("/api/generate", "lines", parse_generate, OllamaDocument, OllamaStream)


# Models.


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    name: str | None = None  # its older name
    verbose: bool | None = None


def parse_show(body: bytes) -> tuple[str | None, tuple[str, ...]]:
    """The name of the model that is asked about, and the names of the body's unknown fields."""
    wire, unknown_fields = decode(body, ShowBody, {})
    return _name(wire.model or wire.name), unknown_fields


def kept_reply(asked: NothingAsked, is_unloaded: bool, unix_s: float) -> bytes:
    """To a body with nothing to answer."""
    empty = {"message": {"role": "assistant", "content": ""}} if asked.is_chat else {"response": ""}
    reason = "unload" if is_unloaded else "load"
    return sse.json_line(
        {"model": asked.model, "created_at": _time(unix_s), **empty, "done": True, "done_reason": reason}
    )


def tags_reply(models: Sequence[ServedModel], card: ServerCard) -> bytes:
    return sse.json_line({"models": [_tag(model, card) for model in models]})


NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def running_reply(models: Sequence[tuple[ServedModel, int, float]], card: ServerCard) -> bytes:
    """
    Args:
        models: that are loaded, each with its size in bytes (0: not told), and when it is unloaded if nobody asks for
            it (unix time; inf: never).
    """
    lines = []
    for model, size, expires_s in models:
        expires = _time(min(expires_s, NEVER.timestamp()))
        tag = _tag(model, card)
        more = {"expires_at": expires, "size_vram": 0, "context_length": model.max_model_len}
        lines.append(tag | more | {"size": size or tag["size"]})
    return sse.json_line({"models": lines})


def show_reply(model: ServedModel, card: ServerCard, template: str | None, capabilities: Sequence[str]) -> bytes:
    card = _card_of(model, card)
    kind = card.model_type or "unknown"
    return sse.json_line(
        {
            "modelfile": "",
            "parameters": "",
            "template": template or "",
            "details": _details(card),
            "model_info": {
                "general.architecture": kind,
                "general.parameter_count": card.num_parameters or None,
                f"{kind}.context_length": model.max_model_len,
            },
            "capabilities": [
                *(_CAPABILITIES[task] for task in model.tasks or ("generate",) if task in _CAPABILITIES),
                *capabilities,
            ],
            "modified_at": _time(model.created_s),
        }
    )


def _card_of(model: ServedModel, card: ServerCard) -> ServerCard:
    """The card as far as it tells of a model: nothing of another one, which the server only asks for."""
    if card.model.name in (model.name, model.parent):
        return card
    unknown: dict[str, Any] = {"model_type": None, "num_parameters": 0, "size_bytes": 0, "digest": "", "precision": ""}
    return msgspec.structs.replace(card, **unknown)


def _tag(model: ServedModel, card: ServerCard) -> dict[str, Any]:
    card = _card_of(model, card)
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": _time(model.created_s),
        "size": card.size_bytes,
        "digest": card.digest,
        "details": _details(card),
    }


def _details(card: ServerCard) -> dict[str, Any]:
    family = card.model_type or "unknown"
    return {
        "parent_model": "",
        "format": card.file_format,
        "family": family,
        "families": [family],
        "parameter_size": format_count(card.num_parameters) if card.num_parameters else "",
        "quantization_level": card.precision,
    }


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
