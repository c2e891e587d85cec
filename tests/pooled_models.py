"""Small random models that embed or score, as the hub's directories are, and what transformers computes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils import logging

from tests.core.small_tokenizers import byte_level

Float64Array = npt.NDArray[np.float64]
DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def write_model(
    directory: Path,
    kind: str,
    tokenizer: Tokenizer,
    config: transformers.PretrainedConfig,
    pooling: str | None = None,
    **files: Any,
) -> Path:
    """
    Args:
        kind: transformers' class of the model.
        pooling: sentence-transformers' mode; None: the directory has none of its files.
        files: further JSON files, by their names without the end.
    """
    logging.disable_progress_bar()
    directory.mkdir(parents=True)
    torch.manual_seed(len(kind))
    config.vocab_size = tokenizer.get_vocab_size()
    model = getattr(transformers, kind)(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name.lower():
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = next((name for name in ("[PAD]", "<pad>", "<|end|>") if tokenizer.token_to_id(name) is not None), None)
    special = {} if named is None else {"pad_token": named}
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **special}} | files
    if pooling is not None:
        modules = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")]
        (directory / "1_Pooling").mkdir()
        switches = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
        shape = {"word_embedding_dimension": config.hidden_size, **switches, "include_prompt": True}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(shape))
        files["modules"] = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ]
        files["sentence_bert_config"] = {"max_seq_length": 128, "do_lower_case": False}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def qwen3_tokenizer() -> Tokenizer:
    """As Qwen3-Embedding's: it puts its end behind a text."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["yes", "no"])
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A $B:1 <|end|>:1", special_tokens=[("<|end|>", end)]
    )
    return tokenizer


def write_qwen3(directory: Path, kind: str, pooling: str | None = None, **files: Any) -> Path:
    config = transformers.Qwen3Config(**DECODER, num_labels=1)
    return write_model(directory, kind, qwen3_tokenizer(), config, pooling, **files)


def states_of(directory: Path, ids: Sequence[int]) -> Float64Array:
    """Last hidden states, in float64: [tokens, hidden]."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float64).eval()
    with torch.inference_mode():
        states = model(torch.tensor([list(ids)])).last_hidden_state[0]
    found: Float64Array = states.numpy()
    return found


def pooled(states: Float64Array, pooling: str) -> Float64Array:
    """Normalised."""
    vector = {"lasttoken": states[-1], "cls_token": states[0], "mean_tokens": states.mean(0)}[pooling]
    return vector / np.linalg.norm(vector)


ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
}
CORPUS = ["hello there you are", "the queue's head waits for blocks, and then it does not", "what is said, is said?"]


def word_pieces() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(16)  # as all-MiniLM's file has it
    tokenizer.enable_padding()
    return tokenizer


def unigrams() -> Tokenizer:
    """As XLM-R's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    return tokenizer


def modern_tokenizer() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def write_encoder(directory: Path, kind: str, pooling: str | None = None, **fields: Any) -> Path:
    """kind: transformers' class."""
    if kind.startswith("ModernBert"):
        config = transformers.ModernBertConfig(
            **ENCODER | {"max_position_embeddings": 300, "local_attention": 24}, pad_token_id=0, num_labels=1, **fields
        )
        return write_model(directory, kind, modern_tokenizer(), config, pooling)
    if kind.startswith("XLMRoberta"):
        config = transformers.XLMRobertaConfig(**ENCODER, type_vocab_size=1, pad_token_id=1, num_labels=1, **fields)
        return write_model(directory, kind, unigrams(), config, pooling)
    return write_model(
        directory, kind, word_pieces(), transformers.BertConfig(**ENCODER, num_labels=1, **fields), pooling
    )
