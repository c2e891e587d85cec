"""The messages of a chat, as any surface has them by then: checked, and made what the chat template takes.

Content becomes one string, and each tool's result finds the call that it answers. Thread: loop, or wherever a long body
is parsed.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from core.errors import InvalidRequest
from core.tool_detection import ToolStyle
from core.tool_formats import FORMATS, with_calls
from server.api.fields import ChatPrompt
from server.api.tools import CalledFunction, ToolCall, ToolWishes, template_calls, template_id

ROLES = ("system", "developer", "user", "assistant", "tool")
# Type of a part -> its field that has the text
_TEXT_FIELDS = {"refusal": "refusal"} | dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text")
_PART_SEPARATOR = "\n"
# Fields that can be read of what another server's tool has found
_FOUND = (
    *("title", "filename", "url", "tool_name", "text", "logs", "stdout", "stderr", "outcome", "error_code", "message"),
    *("content", "source", "data", "output", "outputs", "results", "sources", "tool_references", "error"),
)
# Fields of a message that would change the answer
_UNSUPPORTED = ("audio", "images", "prefix", "partial")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    text: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET


class ResultPart(Part, frozen=True, kw_only=True):
    """Of a call's result in responses; a shell's has these fields alone."""

    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None


Content = str | list[Part | str] | None | UnsetType


class Prediction(msgspec.Struct, frozen=True):
    """Text that the answer is likely to repeat: it is a draft, and changes nothing."""

    type: Literal["content"]
    content: str | list[Part | str]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Content = UNSET
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    audio: Any = None
    images: Any = None  # ollama's
    prefix: Any = None  # of the last, DeepSeek's and Mistral's: the answer goes on with it
    partial: Any = None  # Qwen's and Kimi's: the same
    reasoning: str | None = None
    reasoning_content: str | None = None


def chat_prompt(
    messages: list[Message],
    style: ToolStyle | None = None,
    tools: ToolWishes | None = None,
    param: str = "messages",
    params: list[str] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    call_field: str = "tool_call_id",
) -> ChatPrompt:
    """
    Args:
        param: the request's field that they came in.
        params: the place of each in it; None: their indexes.
        call_field: of a tool's result, which says what call it answers.

    Raises:
        InvalidRequest: no message, an unknown role, content that is not text, or the result of no call that was made.
    """
    if not messages:
        raise InvalidRequest(f"{param} is empty: send at least one message.", param)
    params = params or [f"{param}[{i}]" for i in range(len(messages))]
    messages = [_renewed(message, i) for i, message in enumerate(messages)]
    is_begun = bool(messages[-1].prefix or messages[-1].partial)
    messages[-1] = msgspec.structs.replace(messages[-1], prefix=None, partial=None)
    made = [_template_message(message, style, where) for message, where in zip(messages, params, strict=True)]
    _match_results(made, params, call_field)
    shown = () if tools is None else tuple(tools.for_template())
    return with_end(ChatPrompt(tuple(made), param, params[-1], shown, template_kwargs), None, is_begun)


def joined_turn(messages: Sequence[Message]) -> Message:
    """Messages of one role as one."""
    if len(messages) == 1:
        return messages[0]
    contents = [one.content for one in messages if isinstance(one.content, str)]
    thoughts = [one.reasoning_content for one in messages if one.reasoning_content]
    return msgspec.structs.replace(
        messages[0],
        content="\n".join(contents) if contents else None,
        tool_calls=[call for one in messages for call in one.tool_calls or ()] or None,
        reasoning_content="\n".join(thoughts) or None,
    )


class _Turn:
    """Calls of one turn that have no result, by their places: each is found in a time that does not grow with them."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self.waiting = dict(enumerate(calls))
        self._places: dict[tuple[str | None, bool], deque[int]] = defaultdict(deque)
        self._nums_ids: dict[str | None, Counter[str | None]] = defaultdict(Counter)
        for at, call in self.waiting.items():
            for name in (None, call["function"]["name"]):  # None: of any name
                self._nums_ids[name][call.get("id")] += 1
                for is_without_id in (False, True)[: 1 if "id" in call else 2]:
                    self._places[name, is_without_id].append(at)

    def first(self, name: str | None, is_without_id: bool) -> int | None:
        """The first of a name, or of any; perhaps among those without an id alone."""
        places = self._places[name, is_without_id]
        while places and places[0] not in self.waiting:
            places.popleft()
        return places[0] if places else None

    def num_ids(self, name: str | None) -> int:
        """How many ids those of a name have."""
        return len(self._nums_ids[name])

    def pop(self, at: int) -> dict[str, Any]:
        call = self.waiting.pop(at)
        for name in (None, call["function"]["name"]):
            nums = self._nums_ids[name]
            nums[call.get("id")] -= 1
            if not nums[call.get("id")]:
                del nums[call.get("id")]
        return call


def _match_results(messages: list[dict[str, Any]], params: list[str], call_field: str) -> None:
    """Give each tool's message the id and the name of the call that it answers.

    Raises:
        InvalidRequest: a result is of no call, of one that has its result, or of any of several.
    """
    turns: list[_Turn] = []
    by_id: dict[str, list[tuple[_Turn, int]]] = {}
    for message, where in zip(messages, params, strict=True):
        if calls := message.get("tool_calls"):
            turns.append(_Turn(calls))
            for at, call in enumerate(calls):
                by_id.setdefault(call.get("id", ""), []).append((turns[-1], at))
        if message["role"] == "tool":
            while turns and not turns[-1].waiting:
                turns.pop()
            turn, at = _place_of_call(message, turns[-1] if turns else _Turn([]), by_id, where, call_field)
            call = turn.pop(at)
            message.setdefault("name", call["function"]["name"])
            if "id" in call:
                message["tool_call_id"] = call["id"]


def _place_of_call(
    result: dict[str, Any], last: _Turn, by_id: Mapping[str, list[tuple[_Turn, int]]], where: str, call_field: str
) -> tuple[_Turn, int]:
    """The call that waits for a result: the newest of its id; or else the first of the last turn, by name or at all.

    Args:
        by_id: calls, of which some may have their results.
    """
    call_id, name = result.get("tool_call_id"), result.get("name")
    named = by_id.get(call_id, []) if call_id else []
    while named:
        turn, at = named.pop()
        if at in turn.waiting:
            return turn, at
    found = last.first(name, is_without_id=call_id is not None)
    is_by_name = call_field != "tool_name" and call_id is None and name is not None and found is None
    where = f"{where}.{'name' if is_by_name else call_field}"
    if found is None:
        raise InvalidRequest(f"{where} names no tool call in an earlier message that still lacks its result.", where)
    if call_id is None and last.num_ids(name) > 1:
        raise InvalidRequest(f"{where} is missing, and several tool calls lack their results.", where)
    return last, found


def with_end(prompt: ChatPrompt, begins_answer: bool | None, continues_last: bool | None) -> ChatPrompt:
    """The prompt, with what a request says of its end: add_generation_prompt and continue_final_message.

    Raises:
        InvalidRequest: they contradict each other, or the last message cannot be continued.
    """
    last, where = prompt.messages[-1], prompt.last_param
    if not (prompt.continues_last or continues_last):
        return msgspec.structs.replace(prompt, begins_answer=begins_answer is not False)
    if begins_answer:
        message = (
            "add_generation_prompt starts a new message, continue_final_message continues the last one. Send one of"
            " them."
        )
        raise InvalidRequest(message, "add_generation_prompt")
    if last["role"] != "assistant" or "tool_calls" in last:
        message = f"{where} cannot be continued: it must be an assistant message without tool calls."
        raise InvalidRequest(message, where)
    return msgspec.structs.replace(prompt, begins_answer=False, continues_last=True)


def flatten(content: str | Sequence[Part | str] | UnsetType | None, param: str) -> str:
    """The content's text; parts are joined by a line break.

    Raises:
        InvalidRequest: it is missing or null, or a part is not text, or has none.
    """
    if content is UNSET:
        raise missing_field(param)
    if content is None:
        raise _null_content(param)
    if isinstance(content, str):
        return content
    return _PART_SEPARATOR.join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def found_text(found: Any, param: str) -> str:
    """What can be read of what another server's tool has found, in JSON of a form of its own.

    Raises:
        InvalidRequest: an image is in it.
    """
    match found:
        case str():
            return found
        case {"type": "image" | "input_image" as kind}:
            raise unsupported("Parts", kind, param)
        case {"type": "timeout"}:
            return "timeout"
        case {"type": "exit", "exit_code": int(code)} if code:
            return f"exit code {code}"
        case {"type": "base64"}:
            return ""
        case dict():
            inner = [found_text(found.get(name), f"{param}.{name}") for name in _FOUND]
        case list():
            inner = [found_text(one, f"{param}[{i}]") for i, one in enumerate(found)]
        case _:
            return ""
    return _PART_SEPARATOR.join(filter(None, inner))


def checked_role(role: str, param: str) -> str:
    """The role as chat templates know it."""
    if role not in ROLES:
        raise InvalidRequest(f"{param} must be one of {', '.join(ROLES)}.", param)
    return "system" if role == "developer" else role


def missing_field(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing.", param, "missing_required_parameter")


def unsupported(what: str, kind: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} of type {kind[:32]!r} are not supported: this model reads text only. "
        'Send {"type": "text", "text": "..."}.',
        f"{param}.type",
        "unsupported_content_type",
    )


def _part_text(part: Part | str, param: str) -> str:
    if isinstance(part, str):
        return part
    field = _TEXT_FIELDS.get(part.type)
    if field is None:
        raise unsupported("Parts", part.type, param)
    text: str | UnsetType | None = getattr(part, field)
    if text is UNSET:
        raise missing_field(f"{param}.{field}")
    if text is None:
        raise InvalidRequest(f"{param}.{field} is null: send a string.", f"{param}.{field}", "invalid_type")
    return text


def _null_content(param: str, but: str = "") -> InvalidRequest:
    return InvalidRequest(f"{param} is null: send a string or an array of text parts{but}.", param, "invalid_type")


def _renewed(message: Message, index: int) -> Message:
    """With a call as `tool_calls`, and its result as a tool's, where they have the old form."""
    if message.function_call is not None:
        call = ToolCall(function=message.function_call, id=f"call{index:05}")
        return msgspec.structs.replace(message, function_call=None, tool_calls=[*(message.tool_calls or ()), call])
    return msgspec.structs.replace(message, role="tool") if message.role == "function" else message


def _template_message(message: Message, style: ToolStyle | None, param: str) -> dict[str, Any]:
    for name in _UNSUPPORTED:
        if getattr(message, name):
            where = f"{param}.{name}"
            raise InvalidRequest(f"{where} is not supported. Leave it out.", where, "unsupported_parameter")
    role = checked_role(message.role, f"{param}.role")
    is_silent = role == "assistant" and message.content in (None, UNSET)  # legal there: the turn had reasoning only
    if message.content is None and not is_silent:
        raise _null_content(f"{param}.content", "; only an assistant's message may have null")
    result = {"role": role, "content": "" if is_silent else flatten(message.content, f"{param}.content")}
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if message.tool_calls and role != "assistant":
        where = f"{param}.tool_calls"
        raise InvalidRequest(f"{where} belongs to an assistant's message, not to a {role}'s. Leave it out.", where)
    calls = template_calls(message.tool_calls, style, f"{param}.tool_calls") if message.tool_calls else None
    if calls and style is not None and style.is_left_out:
        result["content"] = with_calls(result["content"], calls, FORMATS[style.format])
    optional = {
        "name": message.name,
        "tool_call_id": template_id(message.tool_call_id, style) if message.tool_call_id else None,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }
    return result | {key: value for key, value in optional.items() if value is not None}
