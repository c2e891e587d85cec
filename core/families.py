"""The families of models that are computed here, as data: what each differs in, and its defaults. Any thread.

`defaults` are fields of config.json that a file may leave out: as transformers' configuration classes fill them in.
The second table says what each is called, and how it is stored, in a GGUF file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What the architectures differ in, beyond the fields that all of them read.

    Args:
        has_qkv_bias: always; has_attention_bias, has_mlp_bias: as the field attention_bias or mlp_bias says (of
            q, k, v and the output; of gate, up and down).
        qk_norm: RMSNorm of q and k before RoPE: "none", over each "head", or over "all" heads at once.
        has_pre_norm, has_post_norm: RMSNorm before attention and MLP; after each, before the residual sum.
        has_norm_offset: a norm multiplies by 1 + weight.
        is_fused: the checkpoint holds q, k, v as one matrix, and gate and up as one.
        has_partial_rotary: partial_rotary_factor is read.
        has_local_rope: layers with a window have a rope of their own.
        windows: which layers have a sliding window where layer_types does not say: "none"; "all", if sliding_window
            is set; with use_sliding_window "switched" (all), "late" (from max_window_layers) or "unrotated" (those
            without RoPE); "pattern" (all but every n-th: sliding_window_pattern).
        has_sinks: each head has a score of its own that takes a share of the softmax and brings no value.
        expert_width: the name of the field with an expert's width; None: no experts.
        activation_field: which names the activation; `activation`: where no field does.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_qkv_bias: bool = False
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: str = "none"
    has_pre_norm: bool = True
    has_post_norm: bool = False
    has_norm_offset: bool = False
    is_fused: bool = False
    has_partial_rotary: bool = False
    has_local_rope: bool = False
    windows: str = "none"
    has_sinks: bool = False
    expert_width: str | None = None
    activation_field: str = "hidden_act"
    activation: str | None = None


_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES = (
    Family("LlamaForCausalLM", "llama", has_attention_bias=True, has_mlp_bias=True),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
        has_qkv_bias=True,
        windows="late",
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {"head_dim": 128, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
        has_attention_bias=True,
        qk_norm="head",
        windows="late",
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        windows="all",
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        has_attention_bias=True,
        has_mlp_bias=True,
        windows="unrotated",
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        {"attention_multiplier": 1.0},
        has_attention_bias=True,
        has_mlp_bias=True,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        {"rms_norm_eps": 1e-5},
        has_attention_bias=True,
        qk_norm="all",
        has_pre_norm=False,
        has_post_norm=True,
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        is_fused=True,
        has_partial_rotary=True,
        windows="all",
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        has_attention_bias=True,
        has_post_norm=True,
        has_norm_offset=True,
        windows="pattern",
        activation_field="hidden_activation",
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        has_attention_bias=True,
        qk_norm="head",
        has_post_norm=True,
        has_norm_offset=True,
        has_local_rope=True,
        windows="pattern",
        activation_field="hidden_activation",
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all",
        expert_width="intermediate_size",
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        has_attention_bias=True,
        qk_norm="head",
        windows="switched",
        expert_width="moe_intermediate_size",
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        has_attention_bias=True,
        has_sinks=True,
        windows="pattern",
        expert_width="intermediate_size",
        activation="clamped_swiglu",
    ),
)

# The architectures of GGUF files, as llama.cpp's converter stores them. Source: llama.cpp, conversion/*.py (what is
# written) and src/models/*.cpp (what is computed where a file is silent).
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
        model_type: whose model it is, in FAMILIES.
        layer_names: what its tensors are called in a layer -> there.
        expert_names: of those that hold all experts one after the other -> each one's, with {} for its number.
        are_heads_turned: rows of q and k lie as pairs side by side.
        fields: config.json's -> the metadata's, where the architecture's computation depends on them.
        constants: config.json's that no metadata says.
        whole_width_layers: as many layers has the one model whose scores are scaled by hidden size / heads.
    """

    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    expert_names: Mapping[str, str] = field(default_factory=dict)
    are_heads_turned: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    whole_width_layers: int | None = None

    @property
    def family(self) -> Family:
        return next(family for family in FAMILIES if family.model_type == self.model_type)


GGUF_FAMILIES = {
    "llama": GgufFamily("llama", are_heads_turned=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3moe": GgufFamily(
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
    "smollm3": GgufFamily("smollm3", are_heads_turned=True),
    "granite": GgufFamily(
        "granite",
        are_heads_turned=True,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "olmo2": GgufFamily("olmo2", {**_ATTENTION, **_MLP, **_POST_NORMS}),
    "phi3": GgufFamily(
        "phi3",
        {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
    ),
    "gemma2": GgufFamily(
        "gemma2",
        _GEMMA,
        fields=_GEMMA_FIELDS,
        whole_width_layers=46,
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        _GEMMA,
        fields={**_GEMMA_FIELDS, "rope_local_base_freq": "rope.freq_base_swa"},
        whole_width_layers=62,
    ),
}
# Mixtral's files say llama, and have experts.
MIXTRAL = GgufFamily(
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
