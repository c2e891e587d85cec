"""/tokenize and /detokenize: how the model reads a prompt. Thread: loop."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from core.errors import InvalidRequest
from core.tool_detection import ToolStyle
from server.api.decoding import decode
from server.api.fields import ChatPrompt, TextPrompt
from server.api.history import Message, chat_prompt, with_end
from server.api.known_fields import rules_of
from server.api.tools import FunctionTool, tool_wishes
from server.wire import sse


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


def parse_tokenize(
    body: bytes, style: ToolStyle | None = None
) -> tuple[TokenizeBody, TextPrompt | ChatPrompt, tuple[str, ...]]:
    """The body, its prompt, and the names of its unknown fields.

    Args:
        style: of calls, as the model's template writes them.

    Raises:
        InvalidRequest: with `param`, the path of the field to mend.
    """
    wire, unknown_fields = decode(body, TokenizeBody, rules_of("tokenize"))
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("Send either prompt or messages.", "prompt")
    if wire.prompt is not None:
        return wire, TextPrompt(wire.prompt, wire.add_special_tokens is not False), unknown_fields
    if wire.add_special_tokens:
        message = "The chat template already adds the special tokens of messages. Leave it out, or send false."
        raise InvalidRequest(message, "add_special_tokens", "unsupported_parameter")
    tools = tool_wishes([tool.function for tool in wire.tools or ()], None, None, style)
    prompt = chat_prompt(wire.messages or [], style, tools, template_kwargs=wire.chat_template_kwargs)
    return wire, with_end(prompt, wire.add_generation_prompt, wire.continue_final_message), unknown_fields


def tokenize_reply(ids: Sequence[int], max_model_len: int, token_strs: Sequence[str] | None) -> bytes:
    return sse.json_line(
        {"count": len(ids), "max_model_len": max_model_len, "tokens": list(ids), "token_strs": token_strs}
    )


def tokenizer_info_reply(special_tokens: Mapping[str, str], chat_template: str | None, max_model_len: int) -> bytes:
    """As vLLM writes it. Special tokens that the model does not have are null."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return sse.json_line(
        {**dict.fromkeys(names), **special_tokens, "chat_template": chat_template, "model_max_length": max_model_len}
    )


def parse_detokenize(body: bytes) -> tuple[DetokenizeBody, tuple[str, ...]]:
    """The body, whose ids are not checked against the vocabulary, and the names of its unknown fields.

    Raises:
        InvalidRequest: with `param`, the path of the field to mend.
    """
    return decode(body, DetokenizeBody, {})


def detokenize_reply(text: str) -> bytes:
    return sse.json_line({"prompt": text})
