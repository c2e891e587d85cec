"""Messages of a conversation, as chat, responses and tokenize take them: flattened to one string each. Thread: loop."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from core.errors import InvalidRequest
from server.api.surface import ChatPrompt

ROLES = ("system", "developer", "user", "assistant", "tool")

# Part type -> the part's field with its text.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_PART_SEPARATOR = "\n"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET


# Of a message: they would change the answer
_UNSUPPORTED = ("tool_calls", "function_call", "audio", "images", "prefix", "partial")

Content = str | list[Part] | None | UnsetType


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Content = UNSET
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    images: Any = None  # ollama's
    prefix: Any = None  # DeepSeek's and Mistral's: the answer goes on with this text
    partial: Any = None  # Qwen's and Kimi's: the same
    reasoning: str | None = None
    reasoning_content: str | None = None


def chat_prompt(messages: list[Message], param: str = "messages") -> ChatPrompt:
    """
    Raises:
        InvalidRequest: no message, an unknown role, or content that is not text.
    """
    if not messages:
        raise InvalidRequest(f"{param} is empty: send at least one message.", param)
    return ChatPrompt(tuple(_template_message(message, f"{param}[{i}]") for i, message in enumerate(messages)))


def flatten(content: Content, param: str) -> str:
    """Its text; parts are joined by a line break.

    Raises:
        InvalidRequest: it is missing or null, or a part is not text, or without text.
    """
    if content is UNSET:
        raise missing_field(param)
    if content is None:
        raise _null_content(param)
    if isinstance(content, str):
        return content
    return _PART_SEPARATOR.join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def checked_role(role: str, param: str) -> str:
    """The role as chat templates know it."""
    if role not in ROLES:
        raise InvalidRequest(f"{param} must be one of {', '.join(ROLES)}.", param)
    return "system" if role == "developer" else role


def _part_text(part: Part, param: str) -> str:
    field = _TEXT_FIELDS.get(part.type)
    if field is None:
        raise InvalidRequest(
            f"Parts of type {part.type[:32]!r} are not supported: this model reads text only.",
            f"{param}.type",
            "unsupported_content_type",
        )
    text: str | UnsetType | None = getattr(part, field)
    if text is UNSET:
        raise missing_field(f"{param}.{field}")
    if text is None:
        raise InvalidRequest(f"{param}.{field} is null: send a string.", f"{param}.{field}", "invalid_type")
    return text


def missing_field(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing.", param, "missing_required_parameter")


def _null_content(param: str, but: str = "") -> InvalidRequest:
    return InvalidRequest(f"{param} is null: send a string or an array of text parts{but}.", param, "invalid_type")


def _template_message(message: Message, param: str) -> dict[str, Any]:
    for name in _UNSUPPORTED:
        if getattr(message, name):
            where = f"{param}.{name}"
            raise InvalidRequest(f"{where} is not supported. Leave it out.", where, "unsupported_parameter")
    role = checked_role(message.role, f"{param}.role")
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    is_silent = role == "assistant" and message.content in (None, UNSET)  # legal there: the turn had reasoning only
    if message.content is None and not is_silent:
        raise _null_content(f"{param}.content", "; only an assistant's message may have null")
    result: dict[str, Any] = {
        "role": role,
        "content": "" if is_silent else flatten(message.content, f"{param}.content"),
    }
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    result.update((key, value) for key, value in optional.items() if value is not None)
    return result
