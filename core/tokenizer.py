"""Turns text into token ids, and ids into bytes, by a Hugging Face tokenizer.json. Immutable once built; no I/O.

Thread: loop; `encode` of long texts may be offloaded, and may run in several threads at once.
"""

import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors

from core.detokenizer import TokenTable
from core.errors import InvalidRequest
from core.marked_text import MarkedText, Origin
from core.repetition import MOST_TAIL, Breakers
from core.token_bytes import TokenBytes

# A longer piece is cut before BPE: merging takes O(n log n) time and memory in the piece's length, and a run of one
# class of characters is one piece, however long. No piece of a real text is near it.
MAX_PIECE_CHARS = 8192
METASPACE = "▁"  # SentencePiece's mark of a space
# Where nothing splits a text before BPE (Llama 2), all of it is one piece. It is cut before a metaspace that follows
# another character, which no merge spans; only longer runs are cut within. Every text matches without backtracking.
_METASPACE_PIECE = "(?m:.{1,%d}_{0,%d}[^_]{0,%d})".replace("_", METASPACE) % (
    MAX_PIECE_CHARS // 2,
    MAX_PIECE_CHARS // 4,
    MAX_PIECE_CHARS // 4,
)
_DIGITS = "0123456789abcdefABCDEF"
_SUPPORTED = "only ByteLevel, and SentencePiece's Replace/Metaspace, ByteFallback, Fuse and Strip are"
_BYTE_TOKENS = {f"<0x{first}{last}>": bytes.fromhex(first + last) for first in _DIGITS for last in _DIGITS}
# Added tokens that are not special are control tokens if a template writes them and they look like markup (`<think>`),
# or if they have the usual form (`<|file_sep|>`); words, and Gemma's white space and HTML, are not
_MARKUP = re.compile(r"(?=.*\w)[^\w\s].*[^\w\s]", re.DOTALL)
_PIPED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_BLANK = "\N{OBJECT REPLACEMENT CHARACTER}"  # replaces a refused control token; no token contains it
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


MOST_BREAKERS = 16  # sets of texts whose tokens are kept


class UnsupportedTokenizer(Exception):
    """The tokenizer cannot be read, or its ids cannot be turned to bytes one by one."""


class _FillForm(NamedTuple):
    """How a model wants the texts around the one that it fills in."""

    marks: tuple[str, ...]  # before each of the two, and before the answer
    is_suffix_first: bool = False


_FILL_FORMS = (
    _FillForm(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),  # Qwen coder, CodeGemma
    _FillForm(("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),  # StarCoder, Granite
    _FillForm(
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>")
    ),  # DeepSeek
    _FillForm(("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")),  # GLM
    _FillForm(("▁<PRE>", "▁<SUF>", "▁<MID>")),  # Code Llama
    _FillForm(("[SUFFIX]", "[PREFIX]"), is_suffix_first=True),  # Codestral
)
# Before the files that come first, and before each of them: Qwen coder and others have both.
_REPOSITORY_MARKS = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE_MARKS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_FILL_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<file_sep>", "▁<EOT>")


class Tokenizer:
    """One model's tokenizer.

    Args:
        tokenizer_json: the content of tokenizer.json; of a BPE also read already: what JSON decodes to.
        tokenizer_config: the content of tokenizer_config.json: special tokens, add_bos_token, add_eos_token.
        num_embeddings: of the model: texts with tokens beyond them are refused; None: no token is beyond.
        templates: sources of the chat templates: added tokens that they contain are control tokens.
        user_turn: a user's message as the template writes it: an assistant may write none of its tokens.

    Raises:
        UnsupportedTokenizer: the decoder is neither byte-level nor SentencePiece-like, or the content is broken.
    """

    def __init__(
        self,
        tokenizer_json: str | bytes | Mapping[str, Any],
        tokenizer_config: Mapping[str, Any] | None = None,
        num_embeddings: int | None = None,
        templates: Iterable[str] = (),
        user_turn: str = "",
    ) -> None:
        config = tokenizer_config or {}
        self.digest = sha256(msgspec.msgpack.encode(tokenizer_json) + repr(config).encode()).hexdigest()
        self.special_tokens = named_special_tokens(config)  # e.g. {"bos_token": "<s>"}
        backend = _load(tokenizer_json, config, self.special_tokens)
        to_bytes, strip_start = _read_decoder(_parts(backend.decoder))
        _cut_long_pieces(backend)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        vocab: Mapping[str, int] = (
            tokenizer_json["model"]["vocab"] if isinstance(tokenizer_json, Mapping) else backend.get_vocab(True)
        )
        self.vocab_size = max([*vocab.values(), *added], default=-1) + 1  # the logits may be wider
        texts = [""] * self.vocab_size
        for token, token_id in vocab.items():
            texts[token_id] = token
        for token_id, named in added.items():
            texts[token_id] = named.content
        self._num_computable = (
            num_embeddings if num_embeddings is not None and num_embeddings < self.vocab_size else None
        )
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id = self.id_of(self.special_tokens.get("bos_token"))
        self.eos_id = self.id_of(self.special_tokens.get("eos_token"))
        self.full_table = TokenTable(to_bytes(texts), strip_start)  # special tokens by name
        self.table = TokenTable(self.full_table.token_bytes, strip_start, self.special_ids)  # for answers
        self._breakers: dict[tuple[str, ...], Breakers] = {}
        self._tables = {frozenset[str](): self.table}
        self._control = _ControlTokens(backend, "\n".join(templates), user_turn, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            add_special_tokens: those that the model expects around a raw text (BOS); False for a rendered chat
                template, which has them already.

        Raises:
            InvalidRequest: the text has a lone surrogate (not Unicode), or a token that the model does not know.
        """
        return self._encoded(text, lambda: _ids(self._backend, [text], add_special_tokens)[0])

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[tuple[int, ...], int]:
        """The ids of two texts as the model wants them together, and where the second begins; 0 if it is not told.

        Args:
            most: of the ids; of the longer text the end is left out, of texts that are still too long both. None: all.

        Raises:
            InvalidRequest: as encode.
        """
        lengths: list[int] = []

        def ids() -> list[int]:
            encoding = self._backend.encode_batch([(first, second)])[0]
            parts = encoding.sequence_ids
            places = [[at for at, part in enumerate(parts) if part == index] for index in (0, 1)]
            over = 0 if most is None else len(parts) - most
            if over > 0:
                kept = _kept_of_pair(len(places[0]), len(places[1]), over)
                cut = {at for place, num in zip(places, kept, strict=True) for at in place[num:]}
            else:
                cut = set()
            types = [encoding.type_ids[at] for at in range(len(parts)) if at not in cut]
            lengths.append(types.index(1) if 1 in types else 0)
            return [token_id for at, token_id in enumerate(encoding.ids) if at not in cut]

        found = tuple(self._encoded(first + second, ids))
        return found, lengths[-1]

    def encode_around(
        self, prefix: str, suffix: str, add_special_tokens: bool = True, extra: Sequence[tuple[str, str]] = ()
    ) -> list[int] | None:
        """The ids of a prompt whose answer is the text between two others; None: the model has no marks for that.

        As in a user's message, a control token's name in them is text: they are files.

        Args:
            extra: names and texts of other files: they come first, as llama-server's /infill puts them.

        Raises:
            InvalidRequest: as encode.
        """
        for form in _FILL_FORMS:
            marks = [self.id_of(mark) for mark in form.marks]
            if None in marks:
                continue
            prefix_ids, suffix_ids = (self.encode_chat(MarkedText(text)) for text in (prefix, suffix))
            first, second = (suffix_ids, prefix_ids) if form.is_suffix_first else (prefix_ids, suffix_ids)
            parts = zip(marks, (first, second, []), strict=False)
            filled = [one for mark, ids in parts for one in (mark, *ids) if one is not None]
            return self.encode("", add_special_tokens) + self._encode_files(extra) + filled
        return None

    def _encode_files(self, files: Sequence[tuple[str, str]]) -> list[int]:
        """Files before the one that is filled in, under the model's marks, or else behind lines that say so."""
        repository, mark = (
            next((found for name in names if (found := self.id_of(name)) is not None), None)
            for names in (_REPOSITORY_MARKS, _FILE_MARKS)
        )
        ids: list[int] = []
        if files and repository is not None:
            ids += [repository, *self.encode("myproject\n", False)]
        for name, text in files:
            if mark is None:
                ids += self.encode_chat(MarkedText(f"\n\n--- snippet ---\n\n{text}"))
            else:
                ids += [mark, *self.encode_chat(MarkedText(f"{name}\n")), *self.encode_chat(MarkedText(text))]
        if files and mark is not None:
            ids += [mark, *self.encode("filename\n", False)]
        return ids

    @cached_property
    def fill_end_ids(self) -> tuple[int, ...]:
        """The tokens that end such a text, beside those that end every answer."""
        return tuple(found for mark in _FILL_ENDS if (found := self.id_of(mark)) is not None)

    def breakers(self, strings: tuple[str, ...]) -> Breakers:
        """The tokens of these texts, as breakers of repetitions; takes a millisecond or two for new ones."""
        if strings in self._breakers:
            return self._breakers[strings]
        alone: set[int] = set()
        tails: dict[int, tuple[tuple[int, ...], ...]] = {}
        for string in strings:
            alone.update(self.full_table.token_bytes.containing(string.encode()))
            for end in range(1, len(string)):
                tail = tuple(self.encode(string[end:], add_special_tokens=False)[:MOST_TAIL])
                for token_id in self._token_texts.ending_with(string[:end].encode()):
                    tails[token_id] = (*tails.get(token_id, ()), tail)
        if len(self._breakers) >= MOST_BREAKERS:
            self._breakers.pop(next(iter(self._breakers)), None)
        self._breakers[strings] = found = Breakers(frozenset(alone), tails)
        return found

    @cached_property
    def _token_texts(self) -> "_TokenTexts":
        return _TokenTexts(self.full_table.token_bytes)

    def encode_chat(self, text: str) -> list[int]:
        """The ids of a rendered chat template, in which only the template can write control tokens.

        A control token's name in text that is marked as another's is plain text, also where such text and the
        template's together spell it. In a user's text this holds for every control token; in the model's own text, for
        those that no answer shows and those that begin a user's turn. So an assistant's turn is read as it was
        generated: its `<think>` is the token.

        Raises:
            InvalidRequest: as encode.
        """

        def ids() -> list[int]:
            if isinstance(text, MarkedText) and self._control.may_be_forged(text):
                return self._control.encode(text)
            return _ids(self._backend, [text], add_special_tokens=False)[0]

        return self._encoded(text, ids)

    def may_cut(self, text: str, at: int) -> bool:
        """Whether the ids of a rendered chat are those of its parts before and behind a place, where the template's own
        text begins: the place is before a control token, or the tokenizer adds nothing to a text's beginning."""
        if at >= len(text) or (isinstance(text, MarkedText) and text.origins[at]):
            return False
        return self._adds_nothing or self._control.begins_at(text, at)

    @cached_property
    def _adds_nothing(self) -> bool:
        return b"".join(map(self.bytes_of, _ids(self._backend, ["a"], add_special_tokens=False)[0])) == b"a"

    def spelled(self, token_ids: Sequence[int]) -> tuple[str, list["ControlToken"]] | None:
        """An answer's text, special tokens by name, and where its control tokens are; None: it is no whole text."""
        text, control, pending = "", list[ControlToken](), b""
        try:
            for token_id in token_ids:
                if not self._control.has(token_id):
                    pending += self.bytes_of(token_id)
                    continue
                text, pending = text + pending.decode(), b""
                name = self.bytes_of(token_id).decode()
                control.append(ControlToken(len(text), len(text) + len(name), token_id))
                text += name
            return text + pending.decode(), control
        except UnicodeDecodeError:
            return None

    def without_end(self, token_ids: Sequence[int], end: str) -> list[int]:
        """The ids of a text without its end: those before it, and of the id in which it begins the rest, tokenized.

        None are left where the end begins within a character, or has ids without text.
        """
        ids, left, data = list(token_ids), b"", end.encode()
        while ids and len(left) < len(data):
            left = self.bytes_of(ids.pop()) + left
        try:
            rest = left[: -len(data)].decode()
        except UnicodeDecodeError:
            return []
        return ids + self.encode(rest, add_special_tokens=False) if left.endswith(data) else []

    def control_of(self, text: str) -> list["ControlToken"]:
        """The control tokens of a rendered chat, in their order; none, where its text does not tell them."""
        return self._control.tokens_of(text)

    def places_of_control(self, token_ids: Sequence[int], start: int) -> list[int]:
        """Where a chat's ids have control tokens, from a place on."""
        found: list[int] = np.flatnonzero(self._control.are_control[np.array(token_ids[start:], np.int32)]).tolist()
        return [start + at for at in found]

    def may_have(self, text: str, part: slice, control: Sequence["ControlToken"]) -> bool:
        """Whether ids with these control tokens may stand for a part of a rendered chat that spells them."""
        return self._control.may_have(text, part, control)

    def _encoded(self, text: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}. "
                "Send valid Unicode."
            ) from error
        ids = encode()
        if self._num_computable is not None and max(ids, default=0) >= self._num_computable:
            unknown = next(token_id for token_id in ids if token_id >= self._num_computable)
            raise InvalidRequest(
                f"The text has the token {self.str_of(unknown)!r} ({unknown}), which the tokenizer knows and the model "
                f"does not: its ids end at {self._num_computable - 1}. Leave it out."
            )
        return ids

    def table_showing(self, names: Set[str]) -> TokenTable:
        """That of answers in which these special tokens are shown by their names."""
        shown = frozenset(names & set(map(self.str_of, self.special_ids)))
        if shown not in self._tables:
            hidden = {token_id for token_id in self.special_ids if self.str_of(token_id) not in shown}
            self._tables[shown] = TokenTable(self.table.token_bytes, self.table.strip_start, hidden)
        return self._tables[shown]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; unknown ids are empty."""
        return (self.table if skip_special_tokens else self.full_table).decode(token_ids)

    def id_of(self, token: str | None) -> int | None:
        """The id of a token by its string in the vocabulary."""
        return None if token is None else self._backend.token_to_id(token)

    def str_of(self, token_id: int) -> str:
        """The token as its vocabulary writes it (`Ġhello`, `▁hello`, `<0x0A>`): what /tokenize shows."""
        return (self._backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special tokens by name: what logprobs show."""
        return self.full_table.bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        """The token's bytes as text, U+FFFD for parts of characters: what logprobs show."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


def _kept_of_pair(num_first: int, num_second: int, over: int) -> tuple[int, int]:
    """How many tokens of each text are kept: the longer one gives first."""
    most = max(0, num_first + num_second - over)
    shorter = min(num_first, num_second)
    if most - shorter >= shorter:
        return (shorter, most - shorter) if num_first <= num_second else (most - shorter, shorter)
    return most - most // 2, most // 2


class ControlToken(NamedTuple):
    """Where a control token is in a text.

    Args:
        may_cut: the ids of a rendered chat are those of its parts before and behind the token's beginning.
    """

    start: int
    stop: int
    id: int
    may_cut: bool = False


class _TokenTexts:
    """Finds tokens by the end of their text."""

    def __init__(self, texts: TokenBytes) -> None:
        self._reversed = sorted((text[::-1], token_id) for token_id, text in enumerate(texts))

    def ending_with(self, part: bytes) -> Iterator[int]:
        wanted = part[::-1]
        for text, token_id in self._reversed[bisect_left(self._reversed, (wanted, -1)) :]:
            if not text.startswith(wanted):
                return
            yield token_id


class _ControlTokens:
    """The tokens that structure a chat, kept apart from text that only spells their names.

    These are all special tokens, and the other added tokens that _MARKUP and _PIPED select.
    """

    def __init__(self, backend: tokenizers.Tokenizer, templates: str, user_turn: str, vocab_size: int) -> None:
        added = backend.get_added_tokens_decoder()
        in_turn = set(_ids(backend, [user_turn], add_special_tokens=False)[0]) if user_turn else set()
        self._tokens: dict[int, AddedToken] = {}
        self._refused_from: dict[int, Origin] = {}  # the lowest origin whose characters it may not have
        for token_id, token in added.items():
            is_markup = _MARKUP.fullmatch(token.content) is not None
            if token.special or (is_markup and token_id in in_turn):
                self._refused_from[token_id] = Origin.MODEL
            elif is_markup and (token.content in templates or _PIPED.fullmatch(token.content)):
                self._refused_from[token_id] = Origin.CALL
            else:
                continue
            self._tokens[token_id] = token
        self._backend = backend
        # If a normalizer can turn other characters into a token's name, only the library can find the tokens
        self._is_spelled_out = backend.normalizer is None or not any(t.normalized for t in self._tokens.values())
        longest_first = sorted({t.content for t in self._tokens.values() if t.content}, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)))
        self._ids = {token.content: token_id for token_id, token in self._tokens.items()}
        self._plain = _without_control(backend, self._tokens.keys())
        self._plain_inner = self._plain  # for later parts of a text
        if (pre_tokenizer := _never_prepending(backend.pre_tokenizer)) is not None:
            self._plain_inner = _without_control(backend, self._tokens.keys())
            self._plain_inner.pre_tokenizer = pre_tokenizer

        self.are_control = np.zeros(vocab_size, np.bool_)  # by id
        self.are_control[list(self._tokens)] = True

    def has(self, token_id: int) -> bool:
        return token_id in self._tokens

    def tokens_of(self, text: str) -> list[ControlToken]:
        """As Tokenizer.control_of."""
        origins = text.origins if isinstance(text, MarkedText) else bytes(len(text))
        found: list[ControlToken] = []
        for match in self._spelled.finditer(text) if self._tokens and self._is_spelled_out else ():
            (start, stop), token_id = match.span(), self._ids[match[0]]
            if not self._is_refused(token_id, written := origins[start:stop]):
                token = self._tokens[token_id]
                may_cut = not (any(written) or token.lstrip or token.single_word)
                found.append(ControlToken(start, stop, token_id, may_cut))
        return found

    def begins_at(self, text: str, at: int) -> bool:
        return bool(self._tokens) and self._spelled.match(text, at) is not None

    def may_have(self, text: str, part: slice, control: Sequence[ControlToken]) -> bool:
        """Whether each of them may be where it is, and each special token that the text has there is among them."""
        if not self._is_spelled_out:
            return False
        origins = text.origins if isinstance(text, MarkedText) else bytes(len(text))
        in_call, by_model = bytes((Origin.CALL,)), bytes((Origin.MODEL,))  # what was generated may be in a call, too
        if any(self._is_refused(one.id, origins[one.start : one.stop].replace(in_call, by_model)) for one in control):
            return False
        starts = {one.start for one in control}
        for match in self._spelled.finditer(text, part.start, part.stop) if self._tokens else ():
            token_id = self._ids[match[0]]
            is_free = match.start() in starts or not self._tokens[token_id].special
            if not is_free and not self._is_refused(token_id, origins[match.start() : match.end()]):
                return False
        return True

    def may_be_forged(self, text: MarkedText) -> bool:
        """Whether it may have a control token that the template did not write."""
        if not self._tokens:
            return False
        return not self._is_spelled_out or next(self._refused_spellings(text), None) is not None

    def _refused_spellings(self, text: MarkedText) -> Iterator[slice]:
        """Where text that is not the template's spells a control token."""
        match = self._spelled.search(text)
        while match is not None:
            place = slice(match.start(), match.end())
            if self._is_refused(self._ids[match[0]], text.origins[place]):
                yield place
            match = self._spelled.search(text, match.start() + 1)

    def encode(self, text: MarkedText) -> list[int]:
        """The ids; the library sees only those control tokens that are allowed."""
        plain = str.__str__(text)
        spelled = list(self._refused_spellings(text))
        visible = _blanked(plain, spelled, text.origins) if spelled else plain
        ids, found = self._found(visible)
        while refused := [place for place in found if self._is_refused(place.id, text.origins[place.core])]:
            visible = _blanked(visible, [place.core for place in refused], text.origins)
            _, found = self._found(visible)  # a refused token may have covered one of the template's
        if visible is plain:
            return ids
        ids = []
        end = 0
        for place in found:
            ids += self._plain_ids(plain[end : place.whole.start], is_first=end == 0)
            ids.append(place.id)
            end = place.whole.stop
        return ids + self._plain_ids(plain[end:], is_first=end == 0)

    def _found(self, text: str) -> tuple[list[int], list["_Place"]]:
        """The library's ids, and where it found control tokens."""
        encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        found = []
        for at, token_id in enumerate(ids):
            if (token := self._tokens.get(token_id)) is None or (place := encoding.token_to_chars(at)) is None:
                continue
            start, stop = place
            covered = text[start:stop]
            core_at = covered.find(token.content)
            if core_at >= 0:
                core = slice(start + core_at, start + core_at + len(token.content))
            elif token.normalized and _BLANK not in covered:
                core = slice(start, stop)
            else:  # an unknown character's id
                continue
            found.append(_Place(token_id, core, slice(start, stop)))
        return ids, found

    def _is_refused(self, token_id: int, origins: bytes) -> bool:
        return max(origins, default=0) >= self._refused_from[token_id]

    def _plain_ids(self, text: str, is_first: bool) -> list[int]:
        """The ids of text without control tokens, whatever it spells."""
        if not text:
            return []
        backend = self._plain if is_first else self._plain_inner
        ids = _ids(backend, [text], add_special_tokens=False)[0]
        if self._tokens.keys().isdisjoint(ids):
            return ids
        # A piece of the model has a control token's name, or unknown characters have its id: cut the names
        cuts = [0, *(match.start() + 1 for match in self._spelled.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        head, *rest = pieces
        inner = _ids(self._plain_inner, rest, add_special_tokens=False)
        return [*_ids(backend, [head], add_special_tokens=False)[0], *itertools.chain.from_iterable(inner)]


class _Place(NamedTuple):
    """Where a control token is in a text: its name alone, and with the white space that it absorbs."""

    id: int
    core: slice
    whole: slice


def _blanked(text: str, places: Sequence[slice], origins: bytes) -> str:
    """The text, with all characters in these places blanked that the template did not write."""
    characters = list(text)
    for place in places:
        for at in range(*place.indices(len(text))):
            if origins[at]:
                characters[at] = _BLANK
    return "".join(characters)


def _without_control(backend: tokenizers.Tokenizer, control_ids: Set[int]) -> tokenizers.Tokenizer:
    """The same tokenizer, except that control tokens' names are plain text to it."""
    plain = tokenizers.Tokenizer(backend.model)  # shared, not copied
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    tokens = []
    for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
        token.special = token_id in control_ids
        tokens.append(token)
    plain.add_tokens(tokens)  # in the order of their ids, so that each gets its own
    plain.encode_special_tokens = True
    return plain


def _never_prepending(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer for a text's later parts, if it prepends a space to the first; None: it does not."""
    state = b"" if pre_tokenizer is None else pre_tokenizer.__getstate__()
    if b'"prepend_scheme":"first"' not in state:
        return None
    changed = pre_tokenizers.Metaspace()  # whose state may be any pre-tokenizer's
    changed.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
    return changed


def named_special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, e.g. {"eos_token": "</s>"}; chat templates use the same names."""
    found = {}
    for name in _NAMED_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):  # a serialized AddedToken
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _ids(backend: tokenizers.Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    # The only method of the library that releases the GIL; it skips offsets
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]


def _load(
    tokenizer_json: str | bytes | Mapping[str, Any], config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> tokenizers.Tokenizer:
    try:
        backend = _backend(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedTokenizer(f"cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    try:
        _add_missing_tokens(backend, config, special_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedTokenizer(f"tokenizer_config.json: added_tokens_decoder is broken: {error!r}") from error
    _set_template(backend, config, special_tokens)
    return backend


def _backend(content: str | bytes | Mapping[str, Any]) -> tokenizers.Tokenizer:
    if not isinstance(content, Mapping):
        return tokenizers.Tokenizer.from_str(content.decode() if isinstance(content, bytes) else content)
    model = dict(content["model"])
    small = json.dumps(
        {**content, "added_tokens": [], "model": {**model, "vocab": {}, "merges": [], "unk_token": None}}
    )
    backend = tokenizers.Tokenizer.from_str(small)
    del model["type"]
    backend.model = models.BPE(**model)  # 150,000 tokens and as many merges in half of the time that JSON takes
    added = [{name: value for name, value in token.items() if name != "id"} for token in content["added_tokens"]]
    backend.add_tokens([AddedToken(**token) for token in added])
    return backend


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens that only tokenizer_config.json has, in transformers' order."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = tokenizer_config.get("added_tokens_decoder") or {}
    for _, fields in sorted(listed.items(), key=lambda item: int(item[0])):
        if fields["content"] not in known:
            backend.add_tokens([AddedToken(**fields)])
            known.add(fields["content"])
    missing = [AddedToken(token, special=True) for token in special_tokens.values() if token not in known]
    backend.add_tokens(missing)


def _set_template(
    backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """BOS and EOS around raw texts: by tokenizer_config.json's add_bos_token and add_eos_token, else tokenizer.json."""
    encoding = backend.encode("x", add_special_tokens=True)
    own = [at for at, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
    first, last = (own[0], own[-1]) if own else (len(encoding.ids), len(encoding.ids))
    found = (encoding.tokens[:first], encoding.tokens[last + 1 :])
    before, after = map(list, found)
    for side, name in ((before, "bos_token"), (after, "eos_token")):
        token, is_wanted = special_tokens.get(name), tokenizer_config.get(f"add_{name}")
        if token is None or is_wanted is None or bool(is_wanted) == (token in side):
            continue
        if not is_wanted:
            side.remove(token)
        else:
            side.insert(0 if side is before else len(side), token)
    if (before, after) != found:
        ids = [(token, backend.token_to_id(token)) for token in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _cut_long_pieces(backend: tokenizers.Tokenizer) -> None:
    """Bound the pieces that BPE merges: see MAX_PIECE_CHARS."""
    is_byte_level = any(part["type"] == "ByteLevel" for part in _parts(backend.pre_tokenizer))
    cutter: Any = (
        pre_tokenizers.FixedLength(length=MAX_PIECE_CHARS)
        if is_byte_level
        else pre_tokenizers.Split(Regex(_METASPACE_PIECE), "isolated")
    )
    before = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, cutter])


def _parts(component: Any) -> list[dict[str, Any]]:
    """A decoder or pre-tokenizer as its JSON, sequences flattened; nothing for None."""
    return [] if component is None else _flatten(json.loads(component.__getstate__()))


def _flatten(fields: dict[str, Any]) -> list[dict[str, Any]]:
    if fields["type"] != "Sequence":
        return [fields]
    parts = fields["decoders"] if "decoders" in fields else fields["pretokenizers"]
    return [part for inner in parts for part in _flatten(inner)]


def _read_decoder(parts: list[dict[str, Any]]) -> tuple[Callable[[list[str]], TokenBytes], int]:
    """How tokens' strings become bytes, and how many leading spaces of a text the tokenizer has added."""
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        return _byte_level_bytes, 0
    if types == ["WordPiece"]:
        prefix = parts[0].get("prefix", "##")
        return partial(_word_piece_bytes, prefix), 1
    if not {"Replace", "Metaspace"} & set(types):
        raise UnsupportedTokenizer(f"decoder {' + '.join(types) or 'null'} is not supported: {_SUPPORTED}")
    strip_start = 0
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip_start = start
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                strip_start = 0 if scheme == "never" else 1
            case _:
                raise UnsupportedTokenizer(f"decoder {json.dumps(part)} is not supported: {_SUPPORTED}")
    return (_sentencepiece_bytes if "ByteFallback" in types else _metaspace_bytes), strip_start


def _word_piece_bytes(prefix: str, tokens: list[str]) -> TokenBytes:
    texts = (token[len(prefix) :] if token.startswith(prefix) else f" {token}" for token in tokens)
    return TokenBytes.of([text.encode() for text in texts])


def _metaspace_bytes(tokens: list[str]) -> TokenBytes:
    return TokenBytes.of([token.replace(METASPACE, " ").encode() for token in tokens])


def _sentencepiece_bytes(tokens: list[str]) -> TokenBytes:
    bytes_of = _BYTE_TOKENS.get
    return TokenBytes.of([bytes_of(token) or token.replace(METASPACE, " ").encode() for token in tokens])


_NO_BYTE = 256


def _bytes_of_characters() -> npt.NDArray[np.uint16]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards, in order.

    The last one is for all other characters: these have no meaning.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    found = np.full(256 + len(others) + 1, _NO_BYTE, np.uint16)
    found[printable], found[256:-1] = printable, others
    return found


_BYTES_OF_CHARACTERS = _bytes_of_characters()


def _byte_level_bytes(tokens: list[str]) -> TokenBytes:
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    characters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    numbers = _BYTES_OF_CHARACTERS[np.minimum(characters, len(_BYTES_OF_CHARACTERS) - 1)]
    found = TokenBytes(numbers.astype(np.uint8).tobytes(), lengths.tolist())
    foreign = np.searchsorted(np.cumsum(lengths), np.flatnonzero(numbers == _NO_BYTE), "right")
    if len(foreign):  # of added tokens, which are written as they are
        written = {token_id: tokens[token_id].encode() for token_id in foreign.tolist()}
        found = TokenBytes.of([written.get(token_id, data) for token_id, data in enumerate(found)])
    return found
