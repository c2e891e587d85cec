"""Translates a GGUF file's tokenizer to tokenizer.json and tokenizer_config.json. Any thread.

Source: llama.cpp, src/llama-vocab.cpp (names of pre-tokenizers, defaults); the tokenizers that models came with.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress, repeat
from typing import Any, TypeGuard, TypeVar

from core.errors import BadCheckpoint, UnsupportedModel
from core.tokenizer import METASPACE

Item = TypeVar("Item")

# Token types: gguf.md, tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_ADDED = {CONTROL, USER_DEFINED, UNKNOWN}
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos", "eot", "eom")
# Control tokens that always end a turn: llama.cpp's special_eog_ids
_END_TOKENS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  (its own bars)
}
_HARMONY_ENDS = {"<|return|>", "<|call|>"}  # where both are, <|end|> ends a part of an answer (gpt-oss)

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"
# Mistral's: a word's capitals, then its small letters
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_SPLIT = _QWEN2_SPLIT.replace("]?\\p{L}+", "]?[\\p{L}\\p{M}]+").replace(
    "[^\\s\\p{L}\\p{N}]", "[^\\s\\p{L}\\p{M}\\p{N}]"
)
_SEED_SPLIT = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# DeepSeek V2's letters of scripts with capitals: code points, as its tokenizer.json lists them
_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _characters(spans: str) -> str:
    """A class of a pattern."""
    return f"[{''.join('-'.join(chr(int(one, 16)) for one in span.split('-')) for span in spans.split())}]"


_DEEPSEEK_LLM_SPLITS = (
    r"[\r\n]",
    rf"\s?{_characters(_CASED)}+",
    rf"\s?[!-/:-~{_characters('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')[1:]}+",
    r"\s+$",
    f"{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}+",
    r"\p{N}",
)
_DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    f"{_characters('4E00-9FA5 3040-309F 30A0-30FF')}+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# tokenizer.ggml.pre -> the patterns that split a text before BPE, in order
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT_SPLITS,
    "gpt-2": (_GPT2_SPLIT,),
    **dict.fromkeys(("llama-bpe", "dbrx", "smaug-bpe", "glm4"), (_LLAMA3_SPLIT,)),
    "qwen2": (_QWEN2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "tekken": (_TEKKEN_SPLIT,),
    "qwen35": (_QWEN35_SPLIT,),
    "deepseek-llm": _DEEPSEEK_LLM_SPLITS,
    "deepseek-v3": _DEEPSEEK3_SPLITS,
    "seed-coder": (_SEED_SPLIT,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O_SPLIT,)),
}
_KEEPS_WHOLE = ("llama-bpe", "tekken")  # what is a token as it is needs no merges; and a text begins with BOS
_NORMALIZES = ("qwen2", "qwen35")
# Names of llama.cpp's for a model each, whose texts are split as another's
_ALIASES = {
    "chatglm-bpe": "glm4",
    **dict.fromkeys(["llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"], "llama-bpe"),
    **dict.fromkeys(["deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"], "qwen2"),
    **dict.fromkeys(["olmo", "granite-docling", "gigachat", "a.x-4.0", "mellum", "trillion"], "gpt-2"),
    **dict.fromkeys(["refact", "minerva-7b"], "smollm"),
    "joyai-llm": "deepseek-v3",
    "kanana2": "gpt-4o",
}


def tokenizer_files(metadata: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What tokenizer.json and tokenizer_config.json would decode to.

    Args:
        vocab_size: rows of the embedding, which limit the tokens.

    Raises:
        UnsupportedModel: the tokenizer or its pre-tokenizer is not supported.
        BadCheckpoint: its parts are missing or contradict each other.
    """
    ids, types = _vocabulary(metadata, vocab_size)
    tokens = list(ids)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            pre = _pre_tokenizer(metadata)
            content = _byte_level(metadata, ids, types, pre)
            add_bos = pre in _KEEPS_WHOLE
        case "llama" | "gemma4":
            content = _sentencepiece(metadata, tokens, types)
            add_bos = True
        case other:
            raise UnsupportedModel(
                f"GGUF tokenizer {other!r} is not supported.",
                "use a model with one of: gpt2 (BPE), llama (SentencePiece), gemma4.",
            )
    config = _tokenizer_config(metadata, tokens)
    config["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    config["add_eos_token"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    return content, config


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: those that the metadata names, and control tokens that can mean nothing else.

    Raises:
        BadCheckpoint: it names a token that does not exist.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    named = [_named_id(metadata, key, len(tokens)) for key in _END_KEYS]
    ends = _END_TOKENS.intersection(tokens)
    if ends >= _HARMONY_ENDS:
        ends -= {"<|end|>"}
    by_name = [token_id for token_id in sorted(map(tokens.index, ends)) if types[token_id : token_id + 1] == [CONTROL]]
    return list(dict.fromkeys([*(token_id for token_id in named if token_id is not None), *by_name]))


def _named_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """The id that the metadata gives a named token."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is not None and (not isinstance(token_id, int) or not 0 <= token_id < num_tokens):
        raise _bad_tokenizer(f"{key} is {token_id!r}, of {num_tokens} tokens")
    return token_id


def _vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, int], list[int]]:
    """The tokens with their ids, in order, and each one's type."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _is_list_of(tokens, str) or not tokens:
        raise _bad_tokenizer("tokenizer.ggml.tokens is not a list of texts")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not _is_list_of(types, int) or len(types) != len(tokens):
        raise _bad_tokenizer("tokenizer.ggml.token_type does not give each token's")
    if len(tokens) > vocab_size:
        raise _bad_tokenizer(f"it has {len(tokens)} tokens, the embedding {vocab_size} rows")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(token for token, number in Counter(tokens).items() if number > 1)
        raise _bad_tokenizer(f"the token {twice!r} is there twice")
    return ids, types


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    known = _ALIASES.get(name, name) if isinstance(name, str) else None
    if known not in PRE_TOKENIZERS:
        supported = ", ".join([*PRE_TOKENIZERS, *_ALIASES])
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {name!r} is not supported.",
            f"use a file with one of: {supported}; or the model's Hugging Face directory.",
        )
    return str(known)


def _byte_level(metadata: Mapping[str, Any], ids: dict[str, int], types: Sequence[int], pre: str) -> dict[str, Any]:
    """A byte-level BPE, as GPT-2's. Unused tokens (padding of the vocabulary) are left out."""
    vocab = ids
    if UNUSED in types:
        vocab = {token: token_id for token, token_id in ids.items() if types[token_id] != UNUSED}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PRE_TOKENIZERS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens([*ids], types),
        "normalizer": {"type": "NFC"} if pre in _NORMALIZES else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _stored_merges(metadata),
            "ignore_merges": pre in _KEEPS_WHOLE,
        },
    }


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The library refuses those that are not of two tokens to a third."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not _is_list_of(merges, str):
        raise _bad_tokenizer("tokenizer.ggml.merges is not a list of texts")
    text = "\n".join(merges)
    parts = text.replace(" ", "\n").split("\n")
    pairs = [*zip(parts[::2], parts[1::2], strict=False)]
    num_spaces, have_space = text.count(" "), map(str.__contains__, merges, repeat(" "))
    if len(parts) != 2 * len(merges) or num_spaces != len(merges) or not all(have_space):  # in tokens, or line breaks
        spaces = [merge.find(" ", 1) for merge in merges]
        pairs = [(merge[:space], merge[space + 1 :]) for merge, space in zip(merges, spaces, strict=True)]
        if -1 in spaces:
            raise _bad_tokenizer(f"the merge {merges[spaces.index(-1)]!r} is not of two tokens")
    return pairs


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """A SentencePiece BPE, as Llama 2's; its scores become merges as in transformers. Gemma 4's has merges."""
    pieces = [  # added tokens are searched for in the text itself, which has spaces
        token.replace(METASPACE, " ") if kind == USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    unknown = _named_id(metadata, "unknown", len(tokens)) or 0
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    unspaces = {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}
    prefix = [{"type": "Prepend", "prepend": METASPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(pieces, types),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [unspaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _merges_of(metadata, vocab, types),
            "unk_token": pieces[unknown],
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
        },
    }


def _merges_of(metadata: Mapping[str, Any], vocab: Mapping[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
    if metadata.get("tokenizer.ggml.model") == "gemma4":
        return _stored_merges(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if not _is_list_of(scores, float) or len(scores) != len(vocab):
        raise _bad_tokenizer("tokenizer.ggml.scores does not give each token's")
    mergeable = {piece: scores[token_id] for piece, token_id in vocab.items() if types[token_id] in (NORMAL, UNUSED)}
    return _merges_by_score(vocab, mergeable)


def _merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to compose a piece of two others, the best pieces first.

    Source: transformers, convert_slow_tokenizer.py, generate_merges.
    """
    found = []
    for piece, score in scores.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        ways = [(left, right) for left, right in splits if left in scores and right in scores]
        found += [(score, *way) for way in sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are searched for in the text before it is split."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": tokens[token_id], **plain, "special": kind != USER_DEFINED}
        for token_id, kind in compress(enumerate(types), map(_ADDED.__contains__, types))
    ]


def _tokenizer_config(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, key in _NAMED_TOKENS.items():
        if (token_id := _named_id(metadata, key, len(tokens))) is not None:
            config[name] = tokens[token_id]
    named = [key for key in metadata if key.startswith("tokenizer.chat_template.")]
    default = metadata.get("tokenizer.chat_template")
    if named:
        sources = {key.removeprefix("tokenizer.chat_template."): metadata[key] for key in named}
        sources |= {} if default is None else {"default": default}
        config["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
    elif default is not None:
        config["chat_template"] = default
    return config


def _is_list_of(value: Any, kind: type[Item]) -> TypeGuard[list[Item]]:
    return isinstance(value, list) and set(map(type, value)) <= {kind}


def _bad_tokenizer(cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"The GGUF file's tokenizer is broken: {cause}.", "download it again, or name another.")
