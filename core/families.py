"""The supported model families: how an architecture's config.json is read, as data (core/config_fields.py). Any thread.

Defaults are those of transformers' configuration classes. GGUF's names for the same are in core/gguf_model.py.
"""

from dataclasses import dataclass, replace
from typing import Any

from core.config_fields import ExpertFields, Family

# Other names of model types and architectures that are computed alike: Kimi K2's, and an older one
SYNONYMS = {"kimi_k2": "deepseek_v3", "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}


def _fields(num_key_value_heads: int | None, max_position_embeddings: int | None, **others: Any) -> dict[str, Any]:
    """Defaults by their names; None: config.json must say, or the usual default holds."""
    usual = {"num_key_value_heads": num_key_value_heads, "max_position_embeddings": max_position_embeddings}
    return {**{name: value for name, value in usual.items() if value is not None}, **others}


_ATTENTION_BIAS = {"attention_bias": ("qkv", "output")}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": ("mlp",)}
_NORMS_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_POST_NORMS_ALONE = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_OLMO: dict[str, Any] = {"biases": _ATTENTION_BIAS, "qk_norm": "all", "norms": _POST_NORMS_ALONE}
_QWEN3: dict[str, Any] = {"biases": _ATTENTION_BIAS, "qk_norm": "head"}
_GEMMAS: dict[str, Any] = {"biases": _ATTENTION_BIAS, "has_norm_offset": True, "has_scaled_embedding": True}
_GELU_TANH = ("gelu", "gelu_pytorch_tanh", None)  # Gemma's first files say gelu and mean its approximation
_GEMMA_DEFAULTS = _fields(
    4,
    None,
    head_dim=256,
    tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
)
_GEMMA_INPUTS: dict[str, Any] = {
    "biases": _ATTENTION_BIAS,
    "qk_norm": "head",
    "norms": _NORMS_AROUND,
    "has_value_norm": True,
    "has_scaled_embedding": True,
    "has_local_rope": True,
    "has_layer_inputs": True,
    "windows": "pattern",
    "activation_field": "hidden_activation",
}
_GLM: dict[str, Any] = {
    "defaults": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "biases": {"attention_bias": ("qkv",)},
    "has_partial_rope": True,
    "has_fused_gate_up": True,
    "are_pairs_adjacent": True,
}
_DEEPSEEK_EXPERTS = ExpertFields(
    count=("n_routed_experts", "num_local_experts"),
    shared_count="n_shared_experts",
    normalized="norm_topk_prob",
    scale="routed_scaling_factor",
    scoring="sigmoid",
    has_choice_bias=True,
    is_router_float=True,
    has_groups=True,
    dense="first",
)
_DEEPSEEK_DEFAULTS = _fields(
    None,
    None,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
_LATENT: dict[str, Any] = {"has_latent": True, "are_pairs_adjacent": True}
_ERNIE_DEFAULTS = _fields(None, 131_072, rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True)
_LFM2_DEFAULTS = _fields(8, 128_000, norm_eps=1e-5, rope_theta=1_000_000.0, tie_word_embeddings=True, conv_L_cache=3)
_LFM2: dict[str, Any] = {
    "biases": {"conv_bias": ("recurrence",)},
    "qk_norm": "head",
    "norms": ("operator_norm", "", "ffn_norm", ""),
    "renamed": (
        ("model.norm.", "model.embedding_norm."),
        ("self_attn.q_norm.", "self_attn.q_layernorm."),
        ("self_attn.k_norm.", "self_attn.k_layernorm."),
        ("self_attn.o_proj.", "self_attn.out_proj."),
        ("mlp.gate_proj.", "feed_forward.w1."),
        ("mlp.up_proj.", "feed_forward.w3."),
        ("mlp.down_proj.", "feed_forward.w2."),
    ),
    "aliases": {
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    },
    "activation": "silu",
    "recurrence": "conv",
}
_DELTA_DEFAULTS = _fields(
    None,
    32_768,
    head_dim=256,
    partial_rotary_factor=0.25,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
_DELTA: dict[str, Any] = {
    "biases": {"attention_bias": ()},
    "neutral": {"attention_bias": (False, None), "attn_output_gate": (True, None)},
    "qk_norm": "head",
    "has_norm_offset": True,
    "has_output_gate": True,
    "has_partial_rope": True,
    "has_mrope": True,
    "recurrence": "linear_attention",
}
_GATED_EXPERTS = ExpertFields(shared_width="shared_expert_intermediate_size", has_shared_gate=True)
_NO_LIMIT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)  # the second as transformers 5 writes it
_MAMBA_DEFAULTS = _fields(
    None, None, mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2
)
_MAMBA_NEUTRAL = {"hidden_act": ("silu", None), "time_step_limit": _NO_LIMIT}
_FEED_FORWARD = (("mlp.", "feed_forward."),)
_DEEPSEEK_NEUTRAL = {
    "rope_interleave": (True, None),
    "moe_layer_freq": (1, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}

_GRANITE4 = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    defaults=_MAMBA_DEFAULTS
    | _fields(
        None, None, attention_multiplier=1.0, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024
    ),
    biases=_ATTENTION_BIAS,
    neutral=_MAMBA_NEUTRAL,
    has_fused_gate_up=True,
    renamed=(("mlp.gate_up_proj.", "shared_mlp.input_linear."), ("mlp.down_proj.", "shared_mlp.output_linear.")),
    experts=ExpertFields(
        count=("num_local_experts",),
        width="intermediate_size",
        shared_width="shared_intermediate_size",
        is_optional=True,
    ),
    aliases={"layers_block_type": "layer_types"},
    recurrence="mamba",
    rotates="if asked",
)

FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama", biases=_BIASES),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults={"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
        biases={"": ("qkv",)},
        windows="late",
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        defaults={"head_dim": 128, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
        windows="late",
        **_QWEN3,
    ),
    Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl_text",
        defaults=_fields(
            8, 32_768, rms_norm_eps=1e-5, rope_theta=1_000_000.0, sliding_window=4096, max_window_layers=80
        ),
        biases={"": ("qkv",)},
        has_mrope=True,
        windows="late",
    ),
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl_text",
        defaults={"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0},
        has_mrope=True,
        **_QWEN3,
    ),
    Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe_text",
        defaults=_fields(
            16,
            128_000,
            rope_theta=500_000.0,
            num_local_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            decoder_sparse_step=1,
        ),
        has_mrope=True,
        experts=ExpertFields(dense="steps"),
        **_QWEN3,
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        windows="all",
    ),
    Family(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        defaults=_fields(
            8,
            262_144,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        has_query_scale=True,
        windows="all",
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        defaults=_fields(4, 32_768, rope_theta=2_000_000.0, tie_word_embeddings=True, no_rope_layer_interval=4),
        biases=_BIASES,
        windows="unrotated",
    ),
    Family(
        architecture="GraniteForCausalLM", model_type="granite", defaults={"attention_multiplier": 1.0}, biases=_BIASES
    ),
    Family(architecture="Olmo2ForCausalLM", model_type="olmo2", defaults={"rms_norm_eps": 1e-5}, **_OLMO),
    Family(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        has_local_rope=True,
        windows="pattern",
        **_OLMO,
    ),
    Family(
        architecture="ArceeForCausalLM",
        model_type="arcee",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        biases=_BIASES,
        neutral={"hidden_act": ("relu2", None)},
        has_gate=False,
        activation="relu2",
    ),
    Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        defaults=_fields(8, 524_288, head_dim=128, attention_bias=True),
        biases={"attention_bias": ("qkv",), "attention_out_bias": ("output",), "mlp_bias": ("mlp",)},
    ),
    Family(
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        defaults={**_ERNIE_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
        biases={"use_bias": ("qkv", "output", "mlp")},
        are_pairs_adjacent=True,
    ),
    Family(architecture="GlmForCausalLM", model_type="glm", **_GLM),
    Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        **_GLM,
    ),
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        has_fused_qkv=True,
        has_fused_gate_up=True,
        has_partial_rope=True,
        windows="all",
    ),
    Family(
        architecture="GemmaForCausalLM",
        model_type="gemma",
        defaults={"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
        neutral={"hidden_act": _GELU_TANH, "hidden_activation": _GELU_TANH},
        activation="gelu_pytorch_tanh",
        **_GEMMAS,
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        defaults=_GEMMA_DEFAULTS
        | _fields(None, 8192, sliding_window_pattern=2, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        norms=_NORMS_AROUND,
        windows="pattern",
        activation_field="hidden_activation",
        **_GEMMAS,
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        defaults=_GEMMA_DEFAULTS
        | _fields(
            None,
            131_072,
            vocab_size=262_208,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            sliding_window_pattern=6,
            rope_theta=1_000_000.0,
            rope_local_base_freq=10_000.0,
        ),
        qk_norm="head",
        norms=_NORMS_AROUND,
        neutral={"attn_logit_softcapping": (None,)},  # transformers reads it and does not apply it
        has_local_rope=True,
        windows="pattern",
        activation_field="hidden_activation",
        **_GEMMAS,
    ),
    Family(
        architecture="Gemma3nForCausalLM",
        model_type="gemma3n_text",
        defaults=_fields(
            2,
            32_768,
            vocab_size=262_400,
            hidden_size=2048,
            intermediate_size=16_384,
            num_hidden_layers=35,
            num_attention_heads=8,
            head_dim=256,
            tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=512,
            sliding_window_pattern=5,
            rope_theta=1_000_000.0,
            rope_local_base_freq=10_000.0,
            final_logit_softcapping=30.0,
            num_kv_shared_layers=15,
            vocab_size_per_layer_input=262_144,
            hidden_size_per_layer_input=256,
            altup_num_inputs=4,
            laurel_rank=64,
        ),
        has_streams=True,
        **_GEMMA_INPUTS,
    ),
    Family(
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        defaults=_fields(
            4,
            131_072,
            vocab_size=262_144,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=30,
            num_attention_heads=8,
            head_dim=256,
            global_head_dim=512,
            tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=512,
            sliding_window_pattern=6,
            rope_parameters={
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1_000_000.0,
                    "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            vocab_size_per_layer_input=262_144,
            hidden_size_per_layer_input=256,
        ),
        neutral={"use_bidirectional_attention": (False, None, "vision")},
        has_layer_scale=True,
        experts=ExpertFields(
            count=("num_experts",),
            active="top_k_experts",
            shared_width="intermediate_size",
            is_router_float=True,
            are_beside=True,
            switch="enable_moe_block",
        ),
        **_GEMMA_INPUTS,
    ),
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        defaults=_fields(
            8, 131_072, rms_norm_eps=1e-5, rope_theta=1_000_000.0, num_local_experts=8, num_experts_per_tok=2
        ),
        windows="all",
        experts=ExpertFields(width="intermediate_size"),
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        defaults=_fields(
            4, 32_768, sliding_window=4096, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1
        ),
        windows="switched",
        experts=ExpertFields(normalized="norm_topk_prob", dense="steps"),
        **_QWEN3,
    ),
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        defaults=_fields(
            16,
            32_768,
            qkv_bias=True,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
        biases={"qkv_bias": ("qkv",)},
        experts=replace(_GATED_EXPERTS, normalized="norm_topk_prob", dense="steps"),
    ),
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        defaults=_fields(
            8,
            131_072,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        ),
        biases={"attention_bias": ("qkv",)},
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        has_partial_rope=True,
        experts=_DEEPSEEK_EXPERTS,
    ),
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults=_DEEPSEEK_DEFAULTS
        | _fields(
            None,
            None,
            q_lora_rank=1536,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            norm_topk_prob=False,
        ),
        neutral={
            **_DEEPSEEK_NEUTRAL,
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax", None),
            "topk_method": ("greedy", "group_limited_greedy", None),
        },
        experts=replace(_DEEPSEEK_EXPERTS, scoring="softmax", has_choice_bias=False),
        **_LATENT,
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        defaults=_DEEPSEEK_DEFAULTS
        | _fields(
            None,
            4096,
            q_lora_rank=1536,
            n_group=8,
            topk_group=4,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            routed_scaling_factor=2.5,
            first_k_dense_replace=3,
        ),
        neutral=_DEEPSEEK_NEUTRAL,
        experts=_DEEPSEEK_EXPERTS,
        **_LATENT,
    ),
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults=_DEEPSEEK_DEFAULTS
        | _fields(
            None,
            202_752,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            rms_norm_eps=1e-5,
            n_routed_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            routed_scaling_factor=1.8,
            first_k_dense_replace=1,
        ),
        neutral=_DEEPSEEK_NEUTRAL,
        experts=_DEEPSEEK_EXPERTS,
        **_LATENT,
    ),
    Family(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        defaults=_ERNIE_DEFAULTS
        | _fields(
            4,
            None,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_k=6,
            moe_intermediate_size=1536,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
        ),
        biases={"use_bias": ("qkv", "output", "mlp")},
        are_pairs_adjacent=True,
        experts=ExpertFields(
            count=("moe_num_experts", "num_experts"),
            active="moe_k",
            shared_count="moe_num_shared_experts",
            has_choice_bias=True,
            is_router_float=True,
            dense="ernie",
        ),
    ),
    Family(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        defaults=_fields(
            8,
            131_072,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
            intermediate_size_mlp=16_384,
            num_local_experts=16,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            no_rope_layer_interval=4,
            attention_chunk_size=8192,
            use_qk_norm=True,
            attn_temperature_tuning=True,
            floor_scale=8192,
            attn_scale=0.1,
        ),
        biases=_ATTENTION_BIAS,
        qk_norm="plain",
        qk_norm_field="use_qk_norm",
        are_pairs_adjacent=True,
        renamed=(("mlp.gate.", "feed_forward.router."), *_FEED_FORWARD),
        experts=ExpertFields(
            count=("num_local_experts",),
            width="intermediate_size",
            shared_width="intermediate_size",
            scoring="sigmoid",
            normalized="norm_topk_prob",
            dense="interleaved",
            scales_inputs=True,
        ),
        rotates="listed",
        has_chunks=True,
    ),
    Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        defaults=_LFM2_DEFAULTS
        | _fields(None, None, block_auto_adjust_ff_dim=True, block_multiple_of=256, block_ffn_dim_multiplier=1.0),
        **_LFM2,
    ),
    Family(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        defaults=_LFM2_DEFAULTS
        | _fields(
            None,
            None,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=1792,
            norm_topk_prob=True,
            num_dense_layers=2,
        ),
        neutral={"use_expert_bias": (True, None)},
        experts=ExpertFields(
            normalized="norm_topk_prob",
            scale="routed_scaling_factor",
            scoring="sigmoid",
            has_choice_bias=True,
            dense="first",
        ),
        **{**_LFM2, "aliases": {**_LFM2["aliases"], "num_dense_layers": "first_k_dense_replace"}},
    ),
    Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        defaults=_DELTA_DEFAULTS
        | _fields(
            2,
            None,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=512,
            num_experts_per_tok=10,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        ),
        experts=replace(_GATED_EXPERTS, normalized="norm_topk_prob", dense="steps"),
        **_DELTA,
    ),
    Family(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        defaults={**_DELTA_DEFAULTS, "num_key_value_heads": 4},
        **_DELTA,
    ),
    Family(
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        defaults=_DELTA_DEFAULTS
        | _fields(
            2,
            None,
            intermediate_size=512,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=256,
            num_experts_per_tok=8,
        ),
        experts=_GATED_EXPERTS,
        **_DELTA,
    ),
    _GRANITE4,
    replace(_GRANITE4, architecture="granitehybrid", model_type="granitehybrid", has_fused_gate_up=False, renamed=()),
    Family(
        architecture="BambaForCausalLM",
        model_type="bamba",
        defaults=_MAMBA_DEFAULTS | _fields(8, 262_144, rms_norm_eps=1e-5, partial_rotary_factor=0.5),
        biases=_BIASES,
        neutral=_MAMBA_NEUTRAL,
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        has_partial_rope=True,
        renamed=(("model.norm.", "model.final_layernorm."), *_FEED_FORWARD),
        aliases={"attn_layer_indices": "full_attn_idxs"},
        recurrence="mamba",
    ),
    Family(
        architecture="FalconH1ForCausalLM",
        model_type="falcon_h1",
        defaults=_MAMBA_DEFAULTS
        | _fields(8, 8192, rms_norm_eps=1e-5, mamba_d_ssm=1024, mamba_rms_norm=False, mamba_norm_before_gate=True),
        neutral={**_MAMBA_NEUTRAL, "projectors_bias": (False, None), "mamba_proj_bias": (False, None)},
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        renamed=(("model.norm.", "model.final_layernorm."), *_FEED_FORWARD),
        recurrence="mamba",
        has_parallel_mixers=True,
        has_factors=True,
    ),
    Family(
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        defaults=_fields(
            8,
            4096,
            head_dim=128,
            intermediate_size=21_504,
            rms_norm_eps=1e-5,
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_n_groups=8,
            mamba_d_state=128,
            mamba_d_conv=4,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            norm_topk_prob=True,
        ),
        neutral={
            "mlp_hidden_act": ("relu2", None),
            "mamba_hidden_act": ("silu", None),
            "time_step_limit": _NO_LIMIT,
            "moe_latent_size": (None,),
            "residual_in_fp32": (False, None),
        },
        norms=("norm", "", "norm", ""),
        has_gate=False,
        renamed=(("self_attn.", "mixer."), ("mlp.", "mixer."), ("mamba.", "mixer.")),
        experts=replace(_DEEPSEEK_EXPERTS, shared_width="moe_shared_expert_intermediate_size", dense="blocks"),
        activation="relu2",
        aliases={
            "layers_block_type": "layer_types",
            "layer_norm_epsilon": "rms_norm_eps",
            "attention_head_dim": "head_dim",
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
            "ssm_state_size": "mamba_d_state",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "use_bias": "mamba_proj_bias",
            "mamba_dt_limit": "time_step_limit",
        },
        recurrence="mamba",
        is_of_blocks=True,
        rotates="none",
    ),
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        defaults=_fields(
            8,
            131_072,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=150_000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            sliding_window=128,
            sliding_window_pattern=2,
            attention_bias=True,
            num_local_experts=128,
            num_experts_per_tok=4,
        ),
        biases=_ATTENTION_BIAS,
        neutral={"swiglu_alpha": (1.702, None), "swiglu_limit": (7, 7.0, None)},
        has_sinks=True,
        windows="pattern",
        experts=ExpertFields(width="intermediate_size"),
        activation="clamped_swiglu",
    ),
)


@dataclass(frozen=True, slots=True)
class TextTower:
    """A model of texts and images, of which texts are served: its language model is one of FAMILIES.

    Args:
        model_type: of the whole.
        texts: model_types that text_config may have; the first, where config.json has the fields of the language model
            beside vision_config.
        ties_embeddings: where config.json does not say.
    """

    model_type: str
    texts: tuple[str, ...]
    ties_embeddings: bool


TEXT_TOWERS = {
    "Gemma3ForConditionalGeneration": TextTower("gemma3", ("gemma3_text",), True),
    "Gemma3nForConditionalGeneration": TextTower("gemma3n", ("gemma3n_text",), True),
    "Gemma4ForConditionalGeneration": TextTower("gemma4", ("gemma4_text",), True),
    "Mistral3ForConditionalGeneration": TextTower("mistral3", ("mistral", "ministral3"), True),
    "Llama4ForConditionalGeneration": TextTower("llama4", ("llama4_text",), False),
    "Qwen2_5_VLForConditionalGeneration": TextTower("qwen2_5_vl", ("qwen2_5_vl_text",), False),
    "Qwen3VLForConditionalGeneration": TextTower("qwen3_vl", ("qwen3_vl_text",), False),
    "Qwen3_5ForConditionalGeneration": TextTower("qwen3_5", ("qwen3_5_text",), False),
    "Qwen3_5MoeForConditionalGeneration": TextTower("qwen3_5_moe", ("qwen3_5_moe_text",), False),
    "Qwen3VLMoeForConditionalGeneration": TextTower("qwen3_vl_moe", ("qwen3_vl_moe_text",), False),
}
