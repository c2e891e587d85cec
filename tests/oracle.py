"""The reference: transformers' models, slow and unpaged, and small random ones of every family to compare with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

_SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "initializer_range": 0.1,  # far from uniform logits: the greedy choice has no near ties
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}


_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
_FALCON_FACTORS = {
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.6,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
    "mlp_multipliers": [0.9, 1.4],
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.25,
}


def _tower(vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    """A model of texts and images, which is asked for texts."""
    return {"vision_config": vision, "text_config": {**_SMALL, **_HEADS, **text}}


# name -> (model class, config class, what it has beside _SMALL); group sizes 1, 3, 2, 7, 5
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama2": ("LlamaForCausalLM", "LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama_linear": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": _LINEAR_ROPE,
        },
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "tie_word_embeddings": True},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 3},
    ),
    "llama_biased_yarn": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _YARN_ROPE,
        },
    ),
    "qwen2_late_window_dynamic": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 27},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "pad_token_id": 0,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "attention_multiplier": 0.15,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "sliding_window": 40,
            "pad_token_id": 0,
        },
    ),
    "phi4_longrope": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 160,
            "tie_word_embeddings": True,
            "rope_parameters": _LONG_ROPE,
            "pad_token_id": 0,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 25,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 40,
            "sliding_window": 25,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {
            **_HEADS,
            "head_dim": 24,
            "rope_parameters": {
                **_YARN_ROPE,
                "original_max_position_embeddings": 24,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_HEADS, "head_dim": 24}),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": _YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", {**_HEADS, "intermediate_size": 208, "mlp_bias": True}),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", {**_HEADS, "head_dim": 24}),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_HEADS, "head_dim": 24, "use_bias": True}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_HEADS, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**_HEADS, "head_dim": 24, "pad_token_id": 0}),
    "gemma3_vision": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        _tower({**_VISION, "image_size": 28, "patch_size": 14}, head_dim=16, sliding_window=25, num_hidden_layers=3)
        | {"mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        _tower({**_VISION, "head_dim": 8}, model_type="mistral", head_dim=24, sliding_window=None)
        | {"tie_word_embeddings": False},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        _tower({**_QWEN_VISION, "fullatt_block_indexes": [0]}, rope_parameters=_MROPE),
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        _tower(
            {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            head_dim=16,
            rope_parameters={**_MROPE, "mrope_interleaved": True},
        )
        | {"tie_word_embeddings": True},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "num_local_experts": 5},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        _tower(
            {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=6,
            num_experts_per_tok=2,
            rope_parameters={**_MROPE, "mrope_interleaved": True},
        ),
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_HEADS,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **_HEADS,
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "pad_token_id": 0,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**_HEADS, "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2, "num_hidden_layers": 3},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_LATENT,
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {**_LATENT, "q_lora_rank": 32, "n_routed_experts": 6, "pad_token_id": 0},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_HEADS, "num_hidden_layers": 5, "full_attn_idxs": [1, 4], "block_multiple_of": 32, "pad_token_id": 0},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        _tower(
            {**_QWEN_VISION, "num_position_embeddings": 16},
            head_dim=32,
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            **_DELTA,
            rope_parameters={**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            **_HEADS,
            **_DELTA,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 12,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_HEADS,
            **_DELTA,
            "head_dim": 24,
            "partial_rotary_factor": 0.5,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_HEADS,
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.15,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
        },
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_HEADS,
            **_MAMBA,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 80,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {**_HEADS, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_conv_bias": False},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_HEADS,
            **_MAMBA,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            **_FALCON_FACTORS,
        },
    ),
    "falcon_h1_normed": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**_HEADS, **_MAMBA, "mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_rms_norm": True},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_HEADS,
            "head_dim": 24,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 3,
            "ssm_state_size": 12,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "llama4_chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_HEADS,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "interleave_moe_layer_step": 3,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 32,
            "use_qk_norm": False,
            "floor_scale": 24,
            "attn_scale": 0.3,
            "rope_parameters": {**_LLAMA3_ROPE, "high_freq_factor": 1.0},
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_HEADS,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 256,
            "floor_scale": 16,
            "attn_scale": 0.3,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **_HEADS,
            "head_dim": 24,
            "num_hidden_layers": 6,
            "intermediate_size": [112, 80, 112, 112, 48, 112],
            "sliding_window": 25,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.8, 0.0],
            "vocab_size_per_layer_input": 250,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 3,
            "laurel_rank": 12,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_HEADS,
            "head_dim": 24,
            "global_head_dim": 40,
            "num_hidden_layers": 6,
            "sliding_window": 25,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_HEADS,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 3,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 21,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}

# Of each kind of rotation, norm, head, window, sink, activation and expert one: for what is the steps', not a family's
KINDS = ("llama3", "qwen2", "qwen2_late_window_dynamic", "qwen3", "olmo2", "smollm3", "granite", "phi4_longrope")
KINDS += ("gemma2", "gemma3", "gemma3n", "gemma4", "qwen3_moe", "glm4_moe", "gpt_oss", "llama4_chunks", "lfm2")


def save_random_model(family: str, directory: Path, max_shard_size: str = "5GB", **sizes: int) -> Path:
    """Save a random float32 model of a family, of these sizes beside its own, its biases and norms random too."""
    logging.disable_progress_bar()
    model_class, config_class, differences = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    config = getattr(transformers, config_class)(**{**_SMALL, **differences, **sizes})
    model = getattr(transformers, model_class)(config)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "sinks", "A_log", ".D", "correct_output_scale")):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if family == "qwen3_vl_moe":  # the hub's files have their experts as [in, out], which transformers reads only
        tensors = load_file(directory / "model.safetensors")
        turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
        save_file(turned, directory / "model.safetensors", {"format": "pt"})
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


class Oracle:
    """A model as transformers computes it: whole sequences, nothing cached."""

    def __init__(self, directory: Path) -> None:
        config = json.dumps(read_config(directory))
        # A token's rotation then depends on how many come after it
        self._sees_length = any(f'"{kind}"' in config for kind in ("dynamic", "longrope"))
        model_class = getattr(transformers, read_config(directory)["architectures"][0])
        self._model = model_class.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab], float32."""
        result: torch.Tensor = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return result

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """The last hidden states, after the norm: [tokens, hidden], float32."""
        result: torch.Tensor = self._model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return result

    @torch.inference_mode()
    def generate(self, prompt_ids: list[int], **config: Any) -> list[list[int]]:
        """The answers of transformers' generate()."""
        config_of = transformers.GenerationConfig(**config)
        found = self._model.generate(torch.tensor([prompt_ids]), generation_config=config_of)[:, len(prompt_ids) :]
        answers: list[list[int]] = found.tolist()
        return answers

    def greedy(self, prompt_ids: list[int], num_tokens: int, guess: Sequence[int] = ()) -> list[int]:
        """The likeliest token, num_tokens times; ends of sequences mean nothing.

        Args:
            guess: an answer. As far as it is right one computation confirms it; from there on each token has its own.
        """
        token_ids, guessed = list(prompt_ids), list(guess[:num_tokens])
        if guessed and not self._sees_length:
            likeliest = self.logits(token_ids + guessed[:-1])[len(prompt_ids) - 1 :].argmax(-1).tolist()
            is_right = [one == other for one, other in zip(likeliest, guessed, strict=True)]
            token_ids += likeliest[: [*is_right, False].index(False) + 1]
        while len(token_ids) < len(prompt_ids) + num_tokens:
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt_ids) :]
