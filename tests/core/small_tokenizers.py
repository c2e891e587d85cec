"""Small tokenizers of the kinds that models bring, trained on a few lines."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The engine thread computes one step at a time. Every step is planned, computed and applied.",
    "A block holds sixteen tokens; a full block may be shared by many sequences.",
    "Ein Zug fährt über die Brücke, 2024 Meter lang — 你好, 世界! 😀",
    "def plan(now):\n    return    now + 1\n\n\n",
] * 4
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it; one of its added tokens is an ordinary one, with a space in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: metaspaces, bytes for unknown characters, a leading space of its own, nothing pre-split."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)  # to train words
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special + byte_tokens, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    plain = Tokenizer(tokenizer.model)
    plain.add_special_tokens(special)
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return plain


# What the templates of chat_templates.py write: those of SPECIAL_TOKENS are special, as their models have them
CHAT_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|file|>"]
CHAT_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "[INST]"]
ORDINARY = ["\n\n", "<h1>"]  # as Gemma's: added to the vocabulary, and nobody's control token


def for_chats(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the tokens of chats, of all sorts: two that take white space, one that is normalized."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHAT_SPECIAL])
    tokenizer.add_special_tokens([AddedToken("<|strip|>", special=True, normalized=False, lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CHAT_TAGS + ORDINARY])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """As newer conversions of Llama 2 and Mistral have it: a space before the text, and none after control tokens."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def lowercase() -> Tokenizer:
    """Other characters may become a token's: it is normalized, and its normalizer folds case."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens([AddedToken("<|fold|>", special=True, normalized=True)])
    return tokenizer


def unigram() -> Tokenizer:
    """Its model's own pieces have the control tokens' names, so that plain text may come to their ids."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<|im_start|>", 0.0), ("<|im_end|>", 0.0)]
    characters = sorted({c for c in "".join(TEXT) + "<|>_/[]{}\"':,\n%" if c != " "} | {"▁"})
    made = Tokenizer(models.Unigram([*pieces, *((c, -5.0) for c in characters)], unk_id=0, byte_fallback=False))
    made.add_special_tokens([name for name, _ in pieces])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()])
    return made
