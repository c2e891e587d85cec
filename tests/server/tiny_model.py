"""A complete Hugging Face directory of a small Llama with random weights: what can be served in a test."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.core.small_tokenizers import byte_level

NUM_LAYERS, HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, CONTEXT = 2, 64, 128, 4, 2, 256
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_tiny_model(path: Path) -> None:
    """Make the directory and fill it."""
    path.mkdir()
    tokenizer = byte_level()
    vocab_size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    save_file(_weights(vocab_size), path / "model.safetensors")


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    kv_size = HIDDEN // NUM_HEADS * NUM_KV_HEADS
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (kv_size, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (kv_size, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {name: random.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
