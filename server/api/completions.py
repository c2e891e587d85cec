"""/v1/completions: prompts in, text out, in the older form that evaluation tools still use. Thread: loop."""

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from core.errors import InvalidRequest
from core.types import Delta, TokenLogprobs, Usage
from server.api.fields import (
    MOST_MAX_TOKENS,
    ChoiceFields,
    DefaultsOf,
    GenerationCall,
    GenerationDefaults,
    IdsPrompt,
    NumChoices,
    NumLikely,
    Prompt,
    TextPrompt,
    check_range,
    checked_ids,
    generation_call,
    read_body,
)
from server.api.replies import (
    ChunkStream,
    Envelope,
    Extras,
    PartialUsage,
    Reason,
    ReplyContext,
    Surface,
    UsageObject,
    WholeReply,
    envelope,
    finite,
    sampled_ids,
    stop_reason,
    usage_object,
    wire_reason,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_ANSWERS = 4096  # prompts times n: 16,384 kept the loop from other requests for up to 0.9 s, 4,096 for 0.2 s

TokenLists = dict[str, list[Any]]
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class CompletionBody(ChoiceFields, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=MOST_MAX_TOKENS)] | None = None
    logprobs: NumLikely | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, CompletionBody, "completions", defaults_of)
    wire, defaults = read.wire, read.defaults
    if wire.max_tokens == 0 and not wire.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 with echo: true for the prompt alone.", "max_tokens")
    if wire.logprobs is not None:
        check_range("logprobs", wire.logprobs, 0, defaults.limits.num_top_logprobs)
    num_sequences = 1 if wire.n is None else wire.n
    best_of = num_sequences if wire.best_of is None else wire.best_of
    check_range("best_of", best_of, num_sequences, max(num_sequences, defaults.limits.num_choices))
    if wire.suffix and wire.echo:
        raise InvalidRequest("echo cannot be combined with suffix. Leave one of them out.", "suffix")
    prompts = _prompts(wire, defaults)
    if len(prompts) * best_of > MAX_ANSWERS:
        message = f"{len(prompts)} prompts with n answers each must be at most {MAX_ANSWERS} answers. Send fewer."
        raise InvalidRequest(message, "n")
    return generation_call(
        read,
        prompts,
        max_tokens=DEFAULT_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens,
        num_logprobs=wire.logprobs,
        echo=bool(wire.echo),
        best_of=best_of,
    )


def _prompts(wire: CompletionBody, defaults: GenerationDefaults) -> tuple[Prompt, ...]:
    """The four forms of a prompt: text, texts, ids, lists of ids."""
    prompt, vocab_size, most = wire.prompt, defaults.vocab_size, defaults.limits.num_prompts
    adds_special_tokens = wire.add_special_tokens is not False
    if isinstance(prompt, str):
        return (TextPrompt(prompt, adds_special_tokens, wire.suffix or None),)
    if wire.suffix:
        raise InvalidRequest("suffix needs a prompt that is one string.", "suffix")
    if not prompt:
        raise InvalidRequest("prompt is empty: send text or token ids.", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return (IdsPrompt(checked_ids(prompt, "prompt", vocab_size)),)  # type: ignore[arg-type]
    if len(prompt) > most:
        raise InvalidRequest(f"prompt must have at most {most} texts or lists of ids.", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return tuple(TextPrompt(text, adds_special_tokens) for text in texts)
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) != len(prompt):
        raise InvalidRequest("prompt must be of one kind: texts, or token ids, or lists of token ids.", "prompt")
    return tuple(_ids_prompt(item, f"prompt[{i}]", vocab_size) for i, item in enumerate(lists))


def _ids_prompt(ids: list[int], param: str, vocab_size: int) -> IdsPrompt:
    if not ids:
        raise InvalidRequest(f"{param} is empty: send at least one token id.", param)
    return IdsPrompt(checked_ids(ids, param, vocab_size))


class LegacyLogprobs:
    """The parallel lists over one choice's tokens, as they come, the echoed prompt's first.

    Args:
        prompt: number of the prompt that is echoed; None: none is.
    """

    __slots__ = ("_context", "_lists", "_offsets", "_position", "_prompt_offsets", "_prompt_text", "_texts")

    def __init__(self, context: ReplyContext, prompt: int | None) -> None:
        self._context = context
        self._texts = _Texts(context)
        text = "" if prompt is None else context.prompt_texts[prompt]
        self._prompt_text = text.encode()
        self._position = 0  # of the prompt's next token, in bytes
        self._prompt_offsets, self._offsets = _TextOffsets(0), _TextOffsets(len(text))
        self._lists = _empty_lists()
        if prompt is not None:  # the first token has no logprob: nothing comes before it
            first_id = context.prompt_ids[prompt][0]
            self._add(first_id, None, None, self._prompt_offset(first_id))

    def add(self, delta: Delta) -> None:
        """Add tokens of the prompt or the completion; the id that ends it is in the lists, if not in the text."""
        context = self._context
        for token in delta.prompt_logprobs:
            self._add_token(token, self._prompt_offset(token.token_id))
        for token in delta.logprobs or ():
            shown = b"" if token.token_id in context.special_ids else context.token_bytes(token.token_id)
            self._add_token(token, self._offsets.next(shown))
        if delta.stop_logprobs is not None:
            self._add_token(delta.stop_logprobs, self._offsets.next(b""))

    def take(self) -> TokenLists:
        """What was added since the last call."""
        lists, self._lists = self._lists, _empty_lists()
        return lists

    def _prompt_offset(self, token_id: int) -> int:
        """Where the token begins in the prompt's text, which may show less of it than its bytes.

        The text has no BOS that the tokenizer has put before it, and no special id of a prompt that came as ids.
        """
        context, text, begin = self._context, self._prompt_text, self._position
        shown = context.token_bytes(token_id)
        # sentencepiece puts a space before the first word
        bare = b"" if token_id in context.special_ids else shown.removeprefix(b" ")
        if not text.startswith(shown, begin) and text.startswith(bare, begin):
            shown = bare
        self._position = min(begin + len(shown), len(text))
        return self._prompt_offsets.next(text[begin : self._position])

    def _add_token(self, token: TokenLogprobs, offset: int) -> None:
        self._add(token.token_id, finite(token.logprob), _top_by_text(token, self._texts), offset)

    def _add(self, token_id: int, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self._lists["tokens"].append(self._texts[token_id])
        self._lists["token_logprobs"].append(logprob)
        self._lists["top_logprobs"].append(top)
        self._lists["text_offset"].append(offset)


def _legacy_logprobs(call: GenerationCall, context: ReplyContext) -> list[LegacyLogprobs]:
    """One of each choice; none where no logprobs are asked for."""
    if call.tokens.num_logprobs is None:
        return []
    prompts = (i // call.num_sequences for i in range(len(call.prompts) * call.num_sequences))
    return [LegacyLogprobs(context, prompt if call.echo else None) for prompt in prompts]


class _Texts(dict[int, str]):
    """Token id to text, or to `bytes:\\xc3` where it is a part of a character, as OpenAI writes it.

    Each is decoded once: a long prompt with the likeliest tokens beside each has many twice.
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
    """Where tokens begin, in characters of the text; a token amid a character begins where the character does.

    Args:
        num_characters: of the prompt before it.
    """

    __slots__ = ("_decoder", "_num_characters")

    def __init__(self, num_characters: int) -> None:
        self._decoder = _new_utf8_decoder(errors="replace")
        self._num_characters = num_characters  # whole ones, of the tokens so far

    def next(self, shown: bytes) -> int:
        """The offset of the next token, of which the text shows these bytes."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(shown))
        return offset


def _empty_lists() -> TokenLists:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _top_by_text(token: TokenLogprobs, texts: _Texts) -> dict[str, float]:
    """Text -> logprob, likeliest first, the token itself included. Of ids with the same text the likeliest counts."""
    result: dict[str, float] = {}
    for token_id, logprob in token.top:
        result.setdefault(texts[token_id], finite(logprob))
    result.setdefault(texts[token.token_id], finite(token.logprob))
    return result


class LogprobLists(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: LogprobLists | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class _Completion(Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Completion(_Completion):
    usage: UsageObject


class CompletionChunk(_Completion):
    usage: NotRequired[PartialUsage | None]


_GOES_ON: Mapping[str, Any] = {"finish_reason": None}


class CompletionStream(ChunkStream):
    """Implements replies.StreamReply."""

    __slots__ = ("_logprobs",)

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context, envelope(context, SURFACE.prefix, "text_completion"), b'"text":', b"")
        self._logprobs = _legacy_logprobs(call, context)

    def start(self) -> bytes:
        """What each choice begins with: its prompt, as text or as ids."""
        call, context = self._call, self._context
        events = b""
        for choice in range(len(self._heads)) if call.echo or call.tokens.returns_ids else ():
            prompt = choice // call.num_sequences
            lists = self._logprobs[choice].take() if call.echo and self._logprobs else None
            text = context.prompt_texts[prompt] if call.echo else ""
            prompt_ids = context.prompt_ids[prompt] if call.tokens.returns_ids else ()
            events += self._line(choice, text, lists, _GOES_ON, {"token_ids": [], "prompt_token_ids": prompt_ids})
        return events

    def delta(self, choice: int, delta: Delta) -> bytes:
        reason = wire_reason(delta.finish_reason)
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or reason):
            return b""
        lists = None
        self._nums_tokens[choice] += delta.num_tokens
        if self._logprobs and (delta.logprobs is not None or delta.prompt_logprobs):
            self._logprobs[choice].add(delta)
            lists = self._logprobs[choice].take()
        ended = {"finish_reason": reason, "stop_reason": stop_reason(delta, self._call)} if reason else _GOES_ON
        return self._line(choice, delta.text, lists, ended, {"token_ids": sampled_ids(delta), "prompt_token_ids": None})

    def _line(
        self, choice: int, text: str, lists: TokenLists | None, ended: Mapping[str, Any], ids: dict[str, Any]
    ) -> bytes:
        line = {"index": choice, "text": text, "logprobs": lists, **ended}
        return self._chunk(choice, line | ids if self._call.tokens.returns_ids else line)


class CompletionDocument(WholeReply):
    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context)
        self._legacy = _legacy_logprobs(call, context)

    def add_logprobs(self, choice: int, delta: Delta) -> None:
        self._legacy[choice].add(delta)

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in range(len(self.texts))]
        answer = envelope(self._context, SURFACE.prefix, "text_completion")
        return answer | {"choices": choices, "usage": usage_object(usage)} | extras

    def _choice(self, choice: int) -> dict[str, Any]:
        call, context = self._call, self._context
        prompt = choice // call.num_sequences
        echoed = context.prompt_texts[prompt] if call.echo else ""
        line = {
            "index": choice,
            "text": echoed + "".join(self.texts[choice]),
            "logprobs": self._legacy[choice].take() if self._legacy else None,
            "finish_reason": wire_reason(self._reasons[choice]),
            "stop_reason": self._stop_reasons[choice],
        }
        if call.tokens.num_prompt_logprobs is not None:
            line["prompt_logprobs"] = self._prompt_logprobs[prompt]
        if call.tokens.returns_ids:
            line |= {"token_ids": self._ids[choice], "prompt_token_ids": context.prompt_ids[prompt]}
        return line


SURFACE = Surface("/v1/completions", "chunks", parse, CompletionDocument, CompletionStream, "cmpl-")
