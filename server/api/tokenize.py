"""/tokenize and /detokenize: how the model reads a prompt. Wire only. Thread: loop."""

from collections.abc import Sequence
from typing import Any

import msgspec

from core.errors import InvalidRequest
from server.api.content import Message, chat_prompt
from server.api.decoding import decode
from server.api.surface import ChatPrompt, TextPrompt
from server.wire import sse

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None  # None: one that the caller may use
    prompt: TextPrompt | ChatPrompt
    wants_token_strs: bool
    unknown_fields: tuple[str, ...] = ()


class DetokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    ids: list[int]  # as they were sent: the model's vocabulary is not looked at
    unknown_fields: tuple[str, ...] = ()


def parse_tokenize(body: bytes) -> TokenizeCall:
    """
    Raises:
        InvalidRequest: with `param`, the path of the field to mend.
    """
    wire, unknown_fields = decode(body, TokenizeBody, UNSUPPORTED)
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("Send either prompt or messages.", "prompt")
    prompt = TextPrompt(wire.prompt) if wire.prompt is not None else chat_prompt(wire.messages or [])
    return TokenizeCall(
        model=wire.model,
        prompt=prompt,
        wants_token_strs=bool(wire.return_token_strs),
        unknown_fields=unknown_fields,
    )


def tokenize_reply(ids: Sequence[int], max_model_len: int, token_strs: Sequence[str] | None) -> bytes:
    return sse.json_line(
        {"count": len(ids), "max_model_len": max_model_len, "tokens": list(ids), "token_strs": token_strs}
    )


def parse_detokenize(body: bytes) -> DetokenizeCall:
    """
    Raises:
        InvalidRequest: with `param`, the path of the field to mend.
    """
    wire, unknown_fields = decode(body, DetokenizeBody, {})
    return DetokenizeCall(model=wire.model, ids=wire.tokens, unknown_fields=unknown_fields)


def detokenize_reply(text: str) -> bytes:
    return sse.json_line({"prompt": text})
