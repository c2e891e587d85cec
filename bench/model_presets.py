"""Shapes of models to measure with: a config.json, and the tensors that a checkpoint of it has.

Names and shapes are transformers' own, so that every server reads the same files. Vocabularies of the small presets
are smaller than the originals': what is measured is the body.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "use_cache": True,
}

QWEN2_05B: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
QWEN3_06B: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
}
# 1.03G parameters, of which a token uses 0.24G: 4 of 32 experts in each layer.
MOE_1B: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
}
LLAMA_8B: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN2_05B,
    "qwen3-0.6b": QWEN3_06B,
    "moe-1b": MOE_1B,
    "llama-8b": LLAMA_8B,
}

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of a checkpoint of this configuration, in the order of the model: (name, shape)."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{index}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def num_parameters(config: Mapping[str, Any]) -> int:
    """All of them, those that a token does not use too."""
    return sum(math.prod(shape) for _, shape in tensor_shapes(config))


def _layer_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    widths = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    yield "input_layernorm.weight", (hidden,)
    for letter, width in widths.items():
        yield f"self_attn.{letter}_proj.weight", (width, hidden)
        if config["model_type"] == "qwen2":
            yield f"self_attn.{letter}_proj.bias", (width,)
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    yield "self_attn.o_proj.weight", (hidden, widths["q"])
    yield "post_attention_layernorm.weight", (hidden,)
    if "num_experts" not in config:
        yield from _mlp_shapes("mlp", hidden, config["intermediate_size"])
        return
    yield "mlp.gate.weight", (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from _mlp_shapes(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)
