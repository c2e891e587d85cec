"""Text to token ids, and each id's bytes, as a Hugging Face tokenizer.json says. Immutable once built; no I/O.

Thread: loop; `encode` of long texts may be offloaded, and may run in several threads at once.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from core.detokenizer import TokenTable
from core.errors import InvalidRequest

# A longer piece is cut before BPE sees it: its merges take O(n log n) time and memory in the piece's length, and a run
# of one class of characters is one piece, however long. No piece of a real text is near it.
MAX_PIECE_CHARS = 8192
METASPACE = "▁"  # SentencePiece's mark of a space
# Where nothing splits a text before BPE (Llama 2), the whole of it is one piece. Cut before a metaspace that follows
# something else, where no merge reaches over; only runs that are too long are cut within. It matches any text at once.
_METASPACE_PIECE = "(?m:.{1,%d}_{0,%d}[^_]{0,%d})".replace("_", METASPACE) % (
    MAX_PIECE_CHARS // 2,
    MAX_PIECE_CHARS // 4,
    MAX_PIECE_CHARS // 4,
)
_SUPPORTED = "only ByteLevel, and SentencePiece's Replace/Metaspace, ByteFallback, Fuse and Strip are"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class UnsupportedTokenizer(Exception):
    """A tokenizer whose ids cannot be turned to bytes one by one, or that cannot be read. The message names what."""


class Tokenizer:
    """One model's tokenizer.

    Args:
        tokenizer_json: the content of tokenizer.json.
        tokenizer_config: the content of tokenizer_config.json: special tokens, add_bos_token, add_eos_token.
        num_embeddings: of the model: texts with tokens beyond are refused; None: there are none.

    Raises:
        UnsupportedTokenizer: the decoder is neither byte-level nor SentencePiece-like, or the content is broken.
    """

    def __init__(
        self,
        tokenizer_json: str | bytes,
        tokenizer_config: Mapping[str, Any] | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        config = tokenizer_config or {}
        self.special_tokens = named_special_tokens(config)  # e.g. {"bos_token": "<s>"}
        backend = _load(tokenizer_json, config, self.special_tokens)
        to_bytes, strip_start = _read_decoder(_parts(backend.decoder))
        _cut_long_pieces(backend)
        self._backend = backend
        self._token_strs = {token_id: string for string, token_id in backend.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._token_strs, default=-1) + 1  # ids are below it; the logits may be wider
        self._num_computable = (
            num_embeddings if num_embeddings is not None and num_embeddings < self.vocab_size else None
        )
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_id = self.id_of(self.special_tokens.get("bos_token"))
        self.eos_id = self.id_of(self.special_tokens.get("eos_token"))
        strings = [self._token_strs.get(token_id) for token_id in range(self.vocab_size)]
        all_bytes = [b"" if string is None else to_bytes(string) for string in strings]
        self.full_table = TokenTable(all_bytes, strip_start)  # special tokens by their names
        shown = [b"" if token_id in self.special_ids else data for token_id, data in enumerate(all_bytes)]
        self.table = TokenTable(shown, strip_start)  # special tokens say nothing: what answers are made of

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            add_special_tokens: as the model wants them around a raw text (BOS); False for a rendered chat template,
                which has them already.

        Raises:
            InvalidRequest: the text has a lone surrogate: it is not Unicode; or a token that the model does not know.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}. "
                "Send valid Unicode."
            ) from error
        # Of the library's ways this one alone lets other threads run; offsets, which nobody asks for, are left out
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if self._num_computable is not None and max(ids, default=0) >= self._num_computable:
            unknown = next(token_id for token_id in ids if token_id >= self._num_computable)
            raise InvalidRequest(
                f"The text has the token {self.str_of(unknown)!r} ({unknown}), which the tokenizer knows and the model "
                f"does not: its ids end at {self._num_computable - 1}. Leave it out."
            )
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids that do not exist say nothing."""
        return (self.table if skip_special_tokens else self.full_table).decode(token_ids)

    def id_of(self, token: str | None) -> int | None:
        """The id of a token by its string in the vocabulary."""
        return None if token is None else self._backend.token_to_id(token)

    def str_of(self, token_id: int) -> str:
        """The token as its vocabulary writes it (`Ġhello`, `▁hello`, `<0x0A>`): what /tokenize shows."""
        return self._token_strs.get(token_id, "")

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special tokens by name: what logprobs show."""
        return self.full_table.bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        """The token's bytes as text, U+FFFD for parts of characters: what logprobs show."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


def named_special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that have a name, e.g. {"eos_token": "</s>"}: also what chat templates know them by."""
    found = {}
    for name in _NAMED_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):  # a serialized AddedToken
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _load(
    tokenizer_json: str | bytes, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> tokenizers.Tokenizer:
    try:
        text = tokenizer_json.decode() if isinstance(tokenizer_json, bytes) else tokenizer_json
        backend = tokenizers.Tokenizer.from_str(text)
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


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """What tokenizer_config.json knows and tokenizer.json does not, in transformers' order."""
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
    """BOS and EOS around raw texts, where tokenizer_config.json says so in words: it then overrides tokenizer.json."""
    if "add_bos_token" not in tokenizer_config and "add_eos_token" not in tokenizer_config:
        return
    before = special_tokens.get("bos_token") if tokenizer_config.get("add_bos_token") else None
    after = special_tokens.get("eos_token") if tokenizer_config.get("add_eos_token") else None
    pieces = [*([before] if before else []), "$A", *([after] if after else [])]
    ids = [(token, backend.token_to_id(token)) for token in {before, after} if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


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


def _read_decoder(parts: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], int]:
    """How a token's string becomes bytes, and how many leading spaces of a text are the tokenizer's own."""
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        return _byte_level_bytes, 0
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


def _metaspace_bytes(token: str) -> bytes:
    return token.replace(METASPACE, " ").encode()


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _metaspace_bytes(token)


def _byte_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:  # an added token, written as it is
        return token.encode()
