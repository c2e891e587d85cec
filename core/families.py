"""The supported model families, as data: how their config.json and their GGUF files are read. Any thread.

Defaults are those of transformers' configuration classes. The second table is about GGUF files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What all models of a family have in common.

    Args:
        qk_norm: RMSNorm of q and k before RoPE: "none", over each "head", over "all" heads at once, or "plain": over
            each head without weights, of layers with RoPE.
        norms: the checkpoint's names of a layer's RMSNorms: before attention, after it (before the residual sum),
            before the MLP, after it; "": there is none.
        has_norm_offset: a norm multiplies by 1 + weight.
        has_sinks: each head has a score of its own that takes a share of the softmax and brings no value.
        has_gate: the MLP multiplies its activated half by the other; False: it activates all of one matrix.
        has_fused_qkv, has_fused_gate_up: the checkpoint stores these as one matrix.
        are_pairs_adjacent: RoPE rotates neighbouring numbers of a head; False: those half its rotated part apart.
        has_output_gate: what a head has attended to is multiplied by a sigmoid of its own, which comes with the query.
        renamed: parts of tensors' names that the checkpoint has instead of the usual ones, usual name first.
    """

    qk_norm: str = "none"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    has_norm_offset: bool = False
    has_sinks: bool = False
    has_gate: bool = True
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False
    are_pairs_adjacent: bool = False
    has_output_gate: bool = False
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """How a family routes tokens to experts, and which fields of config.json say it.

    Args:
        count: the first of these fields that is set.
        active, width: of the experts that a token goes through; of one expert.
        shared_width: of the expert that all tokens go through; "": none, or shared_count of `width`.
        has_shared_gate: its output is scaled by a sigmoid of its own.
        normalized: whether the shares of a token sum to 1; "": they always do.
        scale: a factor of the shares; "": none.
        scoring, has_choice_bias, is_router_float: see core.config.ExpertsConfig.
        has_groups: experts are chosen within the best topk_group of n_group.
        is_optional: the count may be 0: then all layers have a plain MLP of shared_width.
        dense: which layers have a plain MLP: "none"; "first" (first_k_dense_replace, or mlp_layer_types); "steps" (all
            but every decoder_sparse_step-th, and mlp_only_layers); "ernie" (moe_layer_start_index, _end_index,
            _interval); "blocks" (what layer_types does not call "moe"); "interleaved" (all but moe_layers, or every
            interleave_moe_layer_step-th).
        scales_inputs: see core.config.ExpertsConfig.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    active: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared_width: str = ""
    shared_count: str = ""
    has_shared_gate: bool = False
    normalized: str = ""
    scale: str = ""
    scoring: str = "softmax"
    has_choice_bias: bool = False
    is_router_float: bool = False
    has_groups: bool = False
    is_optional: bool = False
    dense: str = "none"
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Traits):
    """How an architecture's config.json is read, beyond the fields that all architectures have.

    Args:
        defaults: of fields that a config.json may leave out.
        biases: optional fields, and what has biases where they are true: "qkv", "output", "mlp", "recurrence"; "":
            always.
        neutral: further fields that change the output, and the values under which they do not.
        has_partial_rope: partial_rotary_factor is computed.
        has_latent: attention's keys and values come from one vector per token: see core.config.LatentConfig.
        has_query_scale: queries grow with their position: llama_4_scaling_beta of the rope.
        has_mrope: rope_type may be "mrope", whose three positions are one where all is text.
        has_local_rope: layers with a window have a rope of their own: rope_local_base_freq, or rope_theta unscaled.
        has_scaled_embedding: by the square root of its width.
        windows: which layers have a sliding window where layer_types does not say: "none"; "all", if sliding_window
            is set; with use_sliding_window "switched" (all), "late" (from max_window_layers) or "unrotated" (those
            without RoPE); "pattern" (all except every n-th: sliding_window_pattern).
        experts: None: no experts.
        qk_norm_field: whether q and k are normed as qk_norm says; "": always.
        activation_field: which field names the activation; `activation`: where no field does.
        aliases: this family's own names of fields, which go before the usual ones, and those.
        recurrence: what recurrent layers compute: see core.config.RecurrentConfig.kind; "": all attend.
        has_parallel_mixers: all layers attend and are recurrent.
        is_of_blocks: a layer is one of attention, recurrence, MLP and experts, as layer_types says.
        has_factors: the checkpoint's matrices are multiplied by factors: Falcon-H1's *_multiplier.
        rotates: which layers that attend have RoPE: "all", "none", "if asked" (position_embedding_type), "listed"
            (no_rope_layers); see windows.
        has_chunks: layers with RoPE see the tokens of their attention_chunk_size alone; as much context is served.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    has_partial_rope: bool = False
    has_latent: bool = False
    has_query_scale: bool = False
    has_mrope: bool = False
    has_local_rope: bool = False
    has_scaled_embedding: bool = False
    windows: str = "none"
    experts: ExpertFields | None = None
    qk_norm_field: str = ""
    activation_field: str = "hidden_act"
    activation: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    recurrence: str = ""
    has_parallel_mixers: bool = False
    is_of_blocks: bool = False
    has_factors: bool = False
    rotates: str = "all"
    has_chunks: bool = False


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
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
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
_DEEPSEEK_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LATENT: dict[str, Any] = {"has_latent": True, "are_pairs_adjacent": True}
_ERNIE_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
_LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
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
_DELTA_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
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
_MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
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
    defaults={
        **_MAMBA_DEFAULTS,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
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
        architecture="Qwen2_5_VLTextModel",
        model_type="qwen2_5_vl_text",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": 4096,
            "max_window_layers": 80,
        },
        biases={"": ("qkv",)},
        has_mrope=True,
        windows="late",
    ),
    Family(
        architecture="Qwen3VLTextModel",
        model_type="qwen3_vl_text",
        defaults={"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0},
        has_mrope=True,
        **_QWEN3,
    ),
    Family(
        architecture="Qwen3VLMoeTextModel",
        model_type="qwen3_vl_moe_text",
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "decoder_sparse_step": 1,
        },
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
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        has_query_scale=True,
        windows="all",
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
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
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524_288,
            "attention_bias": True,
        },
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
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norms=_NORMS_AROUND,
        windows="pattern",
        activation_field="hidden_activation",
        **_GEMMAS,
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        qk_norm="head",
        norms=_NORMS_AROUND,
        neutral={"attn_logit_softcapping": (None,)},  # transformers reads it and does not apply it
        has_local_rope=True,
        windows="pattern",
        activation_field="hidden_activation",
        **_GEMMAS,
    ),
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all",
        experts=ExpertFields(width="intermediate_size"),
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        windows="switched",
        experts=ExpertFields(normalized="norm_topk_prob", dense="steps"),
        **_QWEN3,
    ),
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32_768,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
        },
        biases={"qkv_bias": ("qkv",)},
        experts=replace(_GATED_EXPERTS, normalized="norm_topk_prob", dense="steps"),
    ),
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        biases={"attention_bias": ("qkv",)},
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        has_partial_rope=True,
        experts=_DEEPSEEK_EXPERTS,
    ),
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "norm_topk_prob": False,
        },
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
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "q_lora_rank": 1536,
            "max_position_embeddings": 4096,
            "n_group": 8,
            "topk_group": 4,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
        },
        neutral=_DEEPSEEK_NEUTRAL,
        experts=_DEEPSEEK_EXPERTS,
        **_LATENT,
    ),
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202_752,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        neutral=_DEEPSEEK_NEUTRAL,
        experts=_DEEPSEEK_EXPERTS,
        **_LATENT,
    ),
    Family(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        defaults={
            **_ERNIE_DEFAULTS,
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
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
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "intermediate_size_mlp": 16_384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
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
        defaults={
            **_LFM2_DEFAULTS,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        **_LFM2,
    ),
    Family(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        defaults={
            **_LFM2_DEFAULTS,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
        },
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
        defaults={
            **_DELTA_DEFAULTS,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
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
        defaults={
            **_DELTA_DEFAULTS,
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        experts=_GATED_EXPERTS,
        **_DELTA,
    ),
    _GRANITE4,
    replace(_GRANITE4, architecture="granitehybrid", model_type="granitehybrid", has_fused_gate_up=False, renamed=()),
    Family(
        architecture="BambaForCausalLM",
        model_type="bamba",
        defaults={
            **_MAMBA_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
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
        defaults={
            **_MAMBA_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
        },
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
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21_504,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
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
        defaults={
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
    "Mistral3ForConditionalGeneration": TextTower("mistral3", ("mistral", "ministral3"), True),
    "Llama4ForConditionalGeneration": TextTower("llama4", ("llama4_text",), False),
    "Qwen2_5_VLForConditionalGeneration": TextTower("qwen2_5_vl", ("qwen2_5_vl_text",), False),
    "Qwen3VLForConditionalGeneration": TextTower("qwen3_vl", ("qwen3_vl_text",), False),
    "Qwen3_5ForConditionalGeneration": TextTower("qwen3_5", ("qwen3_5_text",), False),
    "Qwen3_5MoeForConditionalGeneration": TextTower("qwen3_5_moe", ("qwen3_5_moe_text",), False),
    "Qwen3VLMoeForConditionalGeneration": TextTower("qwen3_vl_moe", ("qwen3_vl_moe_text",), False),
}

# The architectures of GGUF files, as llama.cpp's converter writes them (conversion/*.py); where a file is silent, as
# llama.cpp computes them (src/models/*.cpp).
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
_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_SPACE_WHOLE = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_SPACE_FIELDS = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
}
_SHARED_EXPERT = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_GEMMA_FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture of GGUF files.

    Args:
        model_type: of its Family.
        layer_names: a layer's tensors, GGUF name -> Hugging Face name.
        whole_names: the same for tensors of which either name does not end in weight or bias, with all that it has.
        expert_names: the same for tensors that hold all experts one after the other, with {} for the expert's number.
        are_heads_turned: rows of q and k are stored with each rotary pair side by side.
        fields: config.json field -> metadata key, where the computation depends on it.
        constants: config.json fields that the metadata leaves out.
        whole_width_layers: number of layers of the one model whose scores are scaled by hidden size / heads.
    """

    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    whole_names: Mapping[str, str] = field(default_factory=dict)
    expert_names: Mapping[str, str] = field(default_factory=dict)
    are_heads_turned: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    whole_width_layers: int | None = None

    @property
    def family(self) -> Family:
        return next(family for family in FAMILIES if family.model_type == self.model_type)


_EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_EXPERT_FIELDS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

_ROUTED_FIELDS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_GRANITE_FIELDS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _own(names: Mapping[str, str], *renamed: tuple[str, str]) -> dict[str, str]:
    """With other parts of Hugging Face's names, the usual part first."""
    found = dict(names)
    for usual, own in renamed:
        found = {name: other.replace(usual, own) for name, other in found.items()}
    return found


_IN_MIXERS = (("self_attn.", "mixer."), ("mlp.", "mixer."), ("mamba.", "mixer."), ("input_layernorm", "norm"))
_NEMOTRON = GgufFamily(
    "nemotron_h",
    _own({**_ATTENTION, **_MLP, **_SPACE, **_SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"}, *_IN_MIXERS),
    _own({**_SPACE_WHOLE, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}, *_IN_MIXERS),
    _own(_EXPERTS, *_IN_MIXERS),
    are_heads_turned=True,
    fields={
        **_SPACE_FIELDS,
        **_ROUTED_FIELDS,
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
)

GGUF_FAMILIES = {
    "llama": GgufFamily("llama", are_heads_turned=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen2vl": GgufFamily("qwen2_5_vl_text"),
    "qwen3vl": GgufFamily("qwen3_vl_text"),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        {**_LLAMA, "ffn_gate_inp": "mlp.gate"},
        expert_names=_EXPERTS,
        fields=_EXPERT_FIELDS,
        constants={"norm_topk_prob": True},
    ),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        {
            **_LLAMA,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        },
        expert_names=_EXPERTS,
        fields={**_EXPERT_FIELDS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "seed_oss": GgufFamily("seed_oss", {**_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm"}),
    "ernie4_5": GgufFamily("ernie4_5"),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            **_ATTENTION,
            **_MLP,
            **_SHARED_EXPERT,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
        },
        {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        _EXPERTS,
        fields={**_ROUTED_FIELDS, "first_k_dense_replace": "leading_dense_block_count"},
    ),
    "glm4": GgufFamily(
        "glm4",
        {
            **_LLAMA,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gemma": GgufFamily("gemma"),
    "smollm3": GgufFamily("smollm3", are_heads_turned=True),
    "granite": GgufFamily("granite", are_heads_turned=True, fields=_GRANITE_FIELDS),
    "granitehybrid": GgufFamily(
        "granitehybrid",
        {**_LLAMA, **_SPACE, **_SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"},
        _SPACE_WHOLE,
        _EXPERTS,
        are_heads_turned=True,
        fields={
            **_GRANITE_FIELDS,
            **_SPACE_FIELDS,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "falcon-h1": GgufFamily(
        "falcon_h1",
        _own({**_LLAMA, **_SPACE}, ("mlp.", "feed_forward."), ("post_attention_layernorm", "pre_ff_layernorm")),
        {**_SPACE_WHOLE, "ffn_norm": "pre_ff_layernorm.weight"},
        fields=_SPACE_FIELDS,
        constants={"mamba_norm_before_gate": False},  # its multipliers are in its matrices
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "olmo2": GgufFamily("olmo2", {**_ATTENTION, **_MLP, **_POST_NORMS}),
    "phi3": GgufFamily(
        "phi3",
        {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
    ),
    "gemma2": GgufFamily("gemma2", _GEMMA, fields=_GEMMA_FIELDS, whole_width_layers=46),
    "gemma3": GgufFamily(
        "gemma3_text",
        _GEMMA,
        fields={**_GEMMA_FIELDS, "rope_local_base_freq": "rope.freq_base_swa"},
        whole_width_layers=62,
    ),
}
# Mixtral's files say llama, and have experts
MIXTRAL = GgufFamily(
    "mixtral",
    {**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
    expert_names={
        f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{short}"
        for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    are_heads_turned=True,
    fields={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)


def find_family(metadata: Mapping[str, Any]) -> GgufFamily | None:
    """None: an unsupported architecture."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return GGUF_FAMILIES.get(name) if isinstance(name, str) else None
