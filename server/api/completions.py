"""/v1/completions: prompts in, text out, in the older form that evaluation tools still use. Wire only. Thread: loop."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from core.errors import InvalidRequest
from core.types import Delta, TokenLogprobs, Usage
from server.api import fields
from server.api.decoding import decode
from server.api.known_fields import rules_of
from server.api.replies import (
    LOWEST_LOGPROB,
    ChunkStream,
    VllmPromptLogprobs,
    envelope,
    finite,
    refuse_broken,
    sampled_ids,
    usage_object,
    wire_reason,
)
from server.api.surface import (
    Choice,
    DefaultsOf,
    Extras,
    GenerationCall,
    GenerationDefaults,
    IdsPrompt,
    Prompt,
    ReplyContext,
    TextPrompt,
)
from server.wire import sse

DEFAULT_MAX_TOKENS = 16  # OpenAI's
TokenLists = dict[str, list[Any]]

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")
MAX_ANSWERS = 4096  # prompts times n: 16,384 kept the loop from others for up to 0.9 s, 4,096 for 0.2

RULES = rules_of("completions")


class CompletionBody(fields.ChoiceFields, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class CompletionsSurface:
    """Implements surface.Surface."""

    def parse(self, body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
        wire, unknown_fields = decode(body, CompletionBody, RULES)
        model, defaults = defaults_of(fields.checked_model(wire.model))
        max_tokens = _max_tokens(wire)
        num_logprobs = None
        if wire.logprobs is not None:
            num_logprobs = fields.checked_top_logprobs(wire.logprobs, "logprobs", defaults.limits)
        wishes = fields.token_wishes(wire, num_logprobs, defaults.limits, bool(wire.echo))
        prompts = _prompts(wire.prompt, defaults, wire.add_special_tokens is not False)
        if len(prompts) * _num_sequences(wire) > MAX_ANSWERS:
            message = f"{len(prompts)} prompts with n answers each must be at most {MAX_ANSWERS} answers. Send fewer."
            raise InvalidRequest(message, "n")
        return fields.generation_call(
            wire,
            fields.sampling_params(wire, defaults, max_tokens, wishes, bool(wire.echo)),
            wishes,
            model=model,
            prompts=prompts,
            num_sequences=_num_sequences(wire),
            echo=bool(wire.echo),
            unknown_fields=unknown_fields,
        )

    def stream_reply(self, call: GenerationCall, context: ReplyContext) -> "CompletionStream":
        return CompletionStream(call, context)

    def prompt_logprobs(self, call: GenerationCall, context: ReplyContext, choice: int) -> "_PromptLogprobs | None":
        if call.sampling.num_prompt_logprobs is None:
            return None
        return _PromptLogprobs(call, context, choice)

    def whole_reply(
        self,
        call: GenerationCall,
        context: ReplyContext,
        choices: Sequence[Choice],
        usage: Usage,
        extras: Extras,
    ) -> bytes:
        """
        Raises:
            ServiceError: a choice did not end well.
        """
        refuse_broken(choices)
        answer = _envelope(context) | {
            "choices": [_whole_choice(call, choice, context) for choice in choices],
            "usage": usage_object(usage),
        }
        return sse.json_line(answer | extras)


class LegacyLogprobs:
    """Parallel lists over one choice's tokens, as they come, an echoed prompt first. Implements surface.PromptLogprobs.

    Args:
        prompt: number of the prompt that is echoed before them; None: none is.
    """

    __slots__ = ("_context", "_lists", "_offsets", "_position", "_prompt", "_prompt_offsets", "_prompt_text", "_texts")

    def __init__(self, context: ReplyContext, prompt: int | None) -> None:
        self._context = context
        self._texts = _Texts(context)
        self._prompt = prompt
        text = "" if prompt is None else context.prompt_texts[prompt]
        self._prompt_text = text.encode()
        self._position = 0  # of the prompt's next token in it
        self._prompt_offsets, self._offsets = _TextOffsets(0), _TextOffsets(len(text))
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
        """Where it begins in the prompt's text, which may show less of it than its bytes.

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


def _empty_lists() -> TokenLists:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _top_by_text(token: TokenLogprobs, texts: _Texts) -> dict[str, float]:
    """Text to logprob, likeliest first, the token itself always among them. Of ids with the same text the likeliest."""
    result: dict[str, float] = {}
    for token_id, logprob in token.top:
        result.setdefault(texts[token_id], logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB)
    result.setdefault(texts[token.token_id], finite(token.logprob))
    return result


class _PromptLogprobs:
    """Of one choice, in the forms that are asked for. Implements surface.PromptLogprobs."""

    __slots__ = ("echoed", "vllm")

    def __init__(self, call: GenerationCall, context: ReplyContext, choice: int) -> None:
        self.echoed = _logprobs(call, context, choice) if call.echo and call.tokens.num_logprobs is not None else None
        self.vllm = None if call.tokens.num_prompt_logprobs is None else VllmPromptLogprobs(context)
        if self.echoed is not None:
            self.echoed.begin_prompt()

    def add_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for form in (self.echoed, self.vllm):
            if form is not None:
                form.add_prompt(logprobs)


class CompletionStream(ChunkStream):
    """Implements surface.StreamReply."""

    __slots__ = ("_logprobs",)

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context, _envelope(context), b'"text":', b"")
        self._logprobs = [_logprobs(call, context, choice) for choice in range(len(self._heads))]

    def start(self) -> bytes:
        has_first = self._call.echo or self._call.tokens.returns_ids
        return b"".join(map(self._first, range(len(self._heads)))) if has_first else b""

    def delta(self, choice: int, delta: Delta) -> bytes:
        reason = wire_reason(delta.finish_reason)
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or reason):
            return b""
        lists = None
        self._nums_tokens[choice] += delta.num_tokens
        if self._call.tokens.num_logprobs is not None and (delta.logprobs is not None or delta.prompt_logprobs):
            logprobs = self._logprobs[choice]
            logprobs.add_prompt(delta.prompt_logprobs)
            logprobs.add(delta.logprobs or (), delta.stop_logprobs)
            lists = logprobs.take()
        ids = {"token_ids": sampled_ids(delta.logprobs, delta.stop_logprobs), "prompt_token_ids": None}
        return self._line(choice, delta.text, lists, reason, ids)

    def _first(self, choice: int) -> bytes:
        """What a choice begins with: its prompt, as text or as ids."""
        call, lists = self._call, None
        if call.echo and call.tokens.num_logprobs is not None:
            logprobs = self._logprobs[choice]
            logprobs.begin_prompt()
            lists = logprobs.take()
        text = _prompt_text(call, self._context, choice) if call.echo else ""
        prompt_ids = self._context.prompt_ids[choice // call.num_sequences] if call.tokens.returns_ids else ()
        return self._line(choice, text, lists, None, {"token_ids": [], "prompt_token_ids": prompt_ids})

    def _line(self, choice: int, text: str, lists: TokenLists | None, reason: str | None, ids: dict[str, Any]) -> bytes:
        line = {"index": choice, "text": text, "logprobs": lists, "finish_reason": reason}
        return self._chunk(choice, line | ids if self._call.tokens.returns_ids else line)


def _envelope(context: ReplyContext) -> dict[str, Any]:
    return envelope(context, "cmpl-", "text_completion")


def _max_tokens(wire: CompletionBody) -> int:
    if wire.max_tokens == 0 and wire.echo:
        return 0
    if wire.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1, or 0 with echo: true for the prompt alone.", "max_tokens")
    return fields.checked_max_tokens(wire.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS)


def _num_sequences(wire: CompletionBody) -> int:
    num_sequences = 1 if wire.n is None else wire.n
    if wire.best_of is not None and wire.best_of != num_sequences:
        raise InvalidRequest(
            "best_of is not supported: leave it out, or make it n.", "best_of", "unsupported_parameter"
        )
    return num_sequences


def _prompts(
    prompt: str | list[str | int | list[int]], defaults: GenerationDefaults, adds_special_tokens: bool
) -> tuple[Prompt, ...]:
    """The four forms of a prompt: text, texts, ids, lists of ids."""
    vocab_size, most = defaults.vocab_size, defaults.limits.num_prompts
    if isinstance(prompt, str):
        return (TextPrompt(prompt, adds_special_tokens),)
    if not prompt:
        raise InvalidRequest("prompt is empty: send text or token ids.", "prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return (IdsPrompt(fields.checked_ids(ids, "prompt", vocab_size)),)
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
    return IdsPrompt(fields.checked_ids(ids, param, vocab_size))


def _prompt_text(call: GenerationCall, context: ReplyContext, choice: int) -> str:
    return context.prompt_texts[choice // call.num_sequences]


def _logprobs(call: GenerationCall, context: ReplyContext, choice: int) -> LegacyLogprobs:
    prompt = choice // call.num_sequences
    return LegacyLogprobs(context, prompt if call.echo else None)


def _whole_choice(call: GenerationCall, choice: Choice, context: ReplyContext) -> dict[str, Any]:
    lists = None
    of_prompt = choice.prompt_logprobs if isinstance(choice.prompt_logprobs, _PromptLogprobs) else None
    if choice.logprobs is not None and call.tokens.num_logprobs is not None:
        logprobs = of_prompt.echoed if of_prompt is not None else None
        if logprobs is None:
            logprobs = _logprobs(call, context, choice.index)
        logprobs.add(choice.logprobs, choice.stop_logprobs)
        lists = logprobs.take()
    prompt_text = _prompt_text(call, context, choice.index) if call.echo else ""
    line = {
        "index": choice.index,
        "text": prompt_text + choice.text,
        "logprobs": lists,
        "finish_reason": wire_reason(choice.finish_reason),
    }
    if of_prompt is not None and of_prompt.vllm is not None:
        line["prompt_logprobs"] = of_prompt.vllm.entries
    if call.tokens.returns_ids:
        line["token_ids"] = sampled_ids(choice.logprobs, choice.stop_logprobs)
        line["prompt_token_ids"] = context.prompt_ids[choice.index // call.num_sequences]
    return line
