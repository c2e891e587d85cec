"""Logprobs as completions say them: parallel lists over one choice's tokens, an echoed prompt first. Thread: loop."""

import codecs
from collections.abc import Iterable
from typing import Any

from core.types import TokenLogprobs
from server.api.answers import LOWEST_LOGPROB, finite
from server.api.surface import ReplyContext

TokenLists = dict[str, list[Any]]

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class OldLogprobs:
    """Of one choice, in the order in which its tokens come. Implements surface.PromptLogprobs.

    Args:
        prompt: number of the prompt that is echoed before them; None: none is.
    """

    __slots__ = ("_context", "_lists", "_offsets", "_prompt", "_prompt_offsets", "_texts")

    def __init__(self, context: ReplyContext, prompt: int | None) -> None:
        self._context = context
        self._texts = _Texts(context)
        self._prompt = prompt
        text = "" if prompt is None else context.prompt_texts[prompt]
        self._prompt_offsets = _PromptOffsets(text)
        self._offsets = _TextOffsets(len(text))
        self._lists = _empty_lists()

    def begin_prompt(self) -> None:
        """The prompt's first token, which nothing comes before that could tell how likely it is."""
        assert self._prompt is not None, "no prompt is echoed"
        token_id = self._context.prompt_ids[self._prompt][0]
        self._add(token_id, None, None, self._prompt_offset(token_id))

    def add_prompt(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """The next of the prompt's other tokens."""
        for token in logprobs:
            self._add_token(token, self._prompt_offset(token.token_id))

    def add(self, logprobs: Iterable[TokenLogprobs], stop: TokenLogprobs | None) -> None:
        """Tokens of the completion; the id that ends it stands in the lists, if not in the text."""
        context = self._context
        for token in logprobs:
            shown = b"" if token.token_id in context.special_ids else context.token_bytes(token.token_id)
            self._add_token(token, self._offsets.next(shown))
        if stop is not None:
            self._add_token(stop, self._offsets.next(b""))

    def take(self) -> TokenLists:
        """What was added since it was asked before."""
        lists, self._lists = self._lists, _empty_lists()
        return lists

    def _prompt_offset(self, token_id: int) -> int:
        context = self._context
        return self._prompt_offsets.next(context.token_bytes(token_id), token_id in context.special_ids)

    def _add_token(self, token: TokenLogprobs, offset: int) -> None:
        self._add(token.token_id, finite(token.logprob), _top_by_text(token, self._texts), offset)

    def _add(self, token_id: int, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self._lists["tokens"].append(self._texts[token_id])
        self._lists["token_logprobs"].append(logprob)
        self._lists["top_logprobs"].append(top)
        self._lists["text_offset"].append(offset)


class _Texts(dict[int, str]):
    """Token id to text, or to `bytes:\\xc3` where it is a part of a character, as OpenAI writes it.

    Each is asked for once: a long prompt with the likeliest beside each token has many twice.
    """

    def __init__(self, context: ReplyContext) -> None:
        super().__init__()
        self._token_bytes = context.token_bytes

    def __missing__(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(map(_shown_byte, data))
        self[token_id] = text
        return text


def _shown_byte(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"


class _TextOffsets:
    """Where the tokens of a completion begin, in characters of its text; one amid a character, where that begins.

    Args:
        num_characters: of the prompt before it.
    """

    __slots__ = ("_decoder", "_num_characters")

    def __init__(self, num_characters: int) -> None:
        self._decoder = _new_utf8_decoder(errors="replace")
        self._num_characters = num_characters  # whole ones, of the tokens so far

    def next(self, shown: bytes) -> int:
        """Of the next token, of which the text shows these bytes."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(shown))
        return offset


class _PromptOffsets:
    """Where a prompt's tokens begin in its text, which may show less of them than their bytes.

    There is no BOS in it that the tokenizer has put before it, and no special id of a prompt that came as ids.
    """

    __slots__ = ("_offsets", "_position", "_text")

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._position = 0  # bytes
        self._offsets = _TextOffsets(0)

    def next(self, token_bytes: bytes, is_special: bool) -> int:
        """Of the next token."""
        end = self._position + self._num_shown(token_bytes, is_special)
        shown = self._text[self._position : end]
        self._position += len(shown)
        return self._offsets.next(shown)

    def _num_shown(self, token_bytes: bytes, is_special: bool) -> int:
        if self._text.startswith(token_bytes, self._position):
            return len(token_bytes)
        if is_special:
            return 0
        bare = token_bytes.removeprefix(b" ")  # sentencepiece puts a space before the first word
        return len(bare) if self._text.startswith(bare, self._position) else len(token_bytes)


def _empty_lists() -> TokenLists:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _top_by_text(token: TokenLogprobs, texts: _Texts) -> dict[str, float]:
    """Text to logprob, likeliest first, the token itself always among them. Of ids with the same text the likeliest."""
    result: dict[str, float] = {}
    for token_id, logprob in token.top:
        result.setdefault(texts[token_id], logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB)
    result.setdefault(texts[token.token_id], finite(token.logprob))
    return result
