"""A random model in the embedded one's shape, with a tokenizer, a ChatML template and everything a directory has."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_ID = 2
CONTEXT_TOKENS = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "A KV cache keeps the keys and values of every token computed, so that a decode step computes one token alone.",
    "Continuous batching lets a request join the running batch at any step, and leave it at any other.",
    "Größe, café, naïve, 日本語のテキスト, Ελληνικά, русский текст, and 🙂🎉 beside plain words.",
    "def step(plan):\n    return [sample(row) for row in forward(plan)]\n",
]


def save_small_model(directory: Path) -> Path:
    """Write a float32 Llama of 5 million parameters whose greedy choices have no near ties."""
    logging.disable_progress_bar()
    directory.mkdir()
    num_tokens = _save_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _save_tokenizer(directory: Path) -> int:
    """The number of its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()
