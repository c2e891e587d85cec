"""The architectures of GGUF files that are read, as data: whose model each is, and how llama.cpp's converter stores it.

Source: llama.cpp, conversion/*.py (what is written) and src/models/*.cpp (what is computed where a file is silent).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_ATTENTION, **_MLP, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_GEMMA_FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture.

    Args:
        architecture, model_type: of Hugging Face's config.json.
        layer_names: what its tensors are called in a layer -> there.
        expert_names: of those that hold all experts one after the other -> each one's, with {} for its number.
        are_heads_turned: rows of q and k lie as pairs side by side.
        has_norm_offset: norms are stored plus 1.
        fields: config.json's -> the metadata's, where the architecture's computation depends on them.
        constants: config.json's that no metadata says.
        whole_width_layers: as many layers has the one model whose scores are scaled by hidden size / heads.
    """

    architecture: str
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    expert_names: Mapping[str, str] = field(default_factory=dict)
    are_heads_turned: bool = False
    has_norm_offset: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    whole_width_layers: int | None = None


GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", are_heads_turned=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_LLAMA, "ffn_gate_inp": "mlp.gate"},
        {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
        fields={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        constants={"norm_topk_prob": True},
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", are_heads_turned=True),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        "granite",
        are_heads_turned=True,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", {**_ATTENTION, **_MLP, **_POST_NORMS}),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        "phi3",
        {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
    ),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA,
        has_norm_offset=True,
        fields=_GEMMA_FIELDS,
        whole_width_layers=46,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA,
        has_norm_offset=True,
        fields={**_GEMMA_FIELDS, "rope_local_base_freq": "rope.freq_base_swa"},
        whole_width_layers=62,
    ),
}
# Mixtral's files say llama, and have experts.
MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    "mixtral",
    {**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
    {
        f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{short}"
        for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    are_heads_turned=True,
    fields={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)


def find_family(metadata: Mapping[str, Any]) -> GgufFamily | None:
    """None: not one that is read."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return GGUF_FAMILIES.get(name) if isinstance(name, str) else None
