"""config.json is understood completely, in both spellings, or refused by name."""

import math
from typing import Any

import pytest

from core.config import LayerConfig, RopeConfig, Sight
from core.config_json import parse_model_config, stated_context
from core.errors import BadCheckpoint, UnsupportedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA3_ROPE = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def llama(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


def test_a_known_model_has_its_known_size() -> None:
    config = parse_model_config(LLAMA)
    assert (config.head_dim, config.query_size, config.kv_size) == (128, 4096, 1024)
    assert config.num_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("spelling", "rope"),
    [
        ({"rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING}, LLAMA3_ROPE),
        ({"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500_000.0}}, LLAMA3_ROPE),
        ({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(10_000.0, "linear", 4.0)),
        ({}, RopeConfig(10_000.0)),
    ],
)
def test_rope_is_read_in_both_spellings(spelling: dict[str, Any], rope: RopeConfig) -> None:
    assert parse_model_config(llama(**spelling)).rope == rope


def test_families_differ_as_their_data_says() -> None:
    qwen2 = parse_model_config(llama(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True))
    qwen3 = parse_model_config(llama(architectures=["Qwen3ForCausalLM"], hidden_size=1024))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tie_embeddings) == (True, "none", True)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, "head", 128)


def test_defaults_of_old_configurations() -> None:
    old = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "architectures")}
    config = parse_model_config({**old, "model_type": "llama", "torch_dtype": "float16", "eos_token_id": [2, 3]})
    assert (config.num_kv_heads, config.dtype, config.eos_token_ids) == (32, "float16", (2, 3))


_NEMOTRON: dict[str, Any] = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias=True"),
        ({"architectures": ["Qwen2ForCausalLM"], "mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"is_causal": False}, "is_causal=False"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"layer_types": [["full_attention"]] * 32}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 32}, "full_attention"),
        ({"quantization_config": {"quant_method": "mxfp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 9.0}, r"swiglu_limit=9\.0"),
        ({"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "x"}}, "quantization_config"),
        ({"architectures": ["MixtralForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_type='su'"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": False}, "rope_interleave=False"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob=True"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["x"]}, "mlp_layer_types"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type='mrope'"),
        ({"architectures": ["ArceeForCausalLM"]}, "hidden_act='silu'"),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "x"}}, "text_config"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"architectures": ["BambaForCausalLM"]}, "layer_types"),
        ({"architectures": ["FalconH1ForCausalLM"], "time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"architectures": ["FalconH1ForCausalLM"], "projectors_bias": True}, "projectors_bias"),
        ({"architectures": ["GraniteMoeHybridForCausalLM"], "position_embedding_type": "alibi"}, "position_embedding"),
        ({**_NEMOTRON, "layers_block_type": ["mlp"]}, "layer_types"),
        ({"architectures": ["Llama4ForCausalLM"], "layer_types": ["full_attention"] * 32}, "layer_types"),
        ({**_NEMOTRON, "moe_latent_size": 64}, "moe_latent_size=64"),
        ({**_NEMOTRON, "layers_block_type": ["full_attention", "conv"]}, "conv"),
    ],
)
def test_what_would_be_served_wrong_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        parse_model_config(llama(**changes))
    assert "use a model" in caught.value.fix


def test_other_names_of_a_family_are_its_own() -> None:
    kimi = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "q_lora_rank": 64, "head_dim": None}
    fields = {**kimi, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    fields |= {"num_hidden_layers": 4, "num_key_value_heads": 32}
    assert parse_model_config(llama(**fields)) == parse_model_config(llama(**fields | {"model_type": "deepseek_v3"}))
    older = parse_model_config(llama(architectures=["Ernie4_5_ForCausalLM"], model_type="ernie4_5"))
    assert older == parse_model_config(llama(architectures=["Ernie4_5ForCausalLM"], model_type="ernie4_5"))


def test_a_long_value_is_quoted_by_its_ends() -> None:
    with pytest.raises(BadCheckpoint) as caught:
        parse_model_config(llama(eos_token_id=["x"] * 5000))
    cause = caught.value.cause
    assert len(cause) < 700
    assert cause.startswith("config.json: eos_token_id=['x', 'x',")
    assert cause.endswith("'x'] is not a token id, or a list of them.")


def test_unused_sliding_windows_are_no_obstacle() -> None:
    """As Qwen2.5 writes them."""
    fields = {"use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 21}
    parsed = parse_model_config(llama(architectures=["Qwen2ForCausalLM"], **fields))
    assert parsed == parse_model_config(llama(architectures=["Qwen2ForCausalLM"]))
    assert parsed.sights == (Sight(),)


def test_a_missing_sliding_window_is_mistrals_default_and_null_is_none() -> None:
    mistral = llama(architectures=["MistralForCausalLM"])
    assert parse_model_config(mistral).sights == (Sight(4096),)
    assert parse_model_config({**mistral, "sliding_window": None}).sights == (Sight(),)


def gemma3(**changes: Any) -> dict[str, Any]:
    return llama(architectures=["Gemma3ForCausalLM"], hidden_act=None, **changes)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 6},
    ],
)
def test_gemma3s_layers_with_a_window_have_their_own_rope(spelling: dict[str, Any]) -> None:
    config = parse_model_config(gemma3(**spelling))
    local, full = LayerConfig(RopeConfig(1e4), 4096), LayerConfig(RopeConfig(1e6, "linear", 8.0))
    assert config.layers[:12] == ((local,) * 5 + (full,)) * 2
    assert (config.activation, config.tie_embeddings, config.head_dim) == ("gelu_pytorch_tanh", True, 256)


def test_gemma2_caps_by_default_and_alternates() -> None:
    config = parse_model_config(llama(architectures=["Gemma2ForCausalLM"]))
    assert (config.attention_cap, config.logits_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert [layer.window for layer in config.layers[:4]] == [4096, None, 4096, None]
    assert (
        parse_model_config(llama(architectures=["Gemma2ForCausalLM"], final_logit_softcapping=None)).logits_cap is None
    )


def test_mixtures_of_experts_have_their_known_sizes() -> None:
    """Mixtral-8x7B-v0.1, Qwen3-30B-A3B and gpt-oss-20b."""
    mixtral = llama(architectures=["MixtralForCausalLM"], vocab_size=32_000)
    assert parse_model_config(mixtral).num_parameters == 46_702_792_704
    qwen = llama(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151_936,
        hidden_size=2048,
        head_dim=128,
        num_hidden_layers=48,
        num_key_value_heads=4,
        num_experts=128,
        norm_topk_prob=True,
    )
    assert parse_model_config(qwen).num_parameters == 30_532_122_624
    oss = parse_model_config(
        {
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    )
    assert oss.num_parameters == 20_914_757_184
    assert (oss.rope.kind, oss.rope.theta, oss.max_position) == ("yarn", 150_000.0, 131_072)
    assert [layer.window for layer in oss.layers[:2]] == [128, None]


@pytest.mark.parametrize(
    ("architecture", "changes", "num_parameters"),
    [
        (  # DeepSeek-V3, without its layer that predicts a second token
            "DeepseekV3ForCausalLM",
            {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61}
            | {"num_attention_heads": 128, "num_nextn_predict_layers": 1},
            671_026_419_200,
        ),
        (  # DeepSeek-V2-Lite
            "DeepseekV2ForCausalLM",
            {"vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944, "num_hidden_layers": 27}
            | {"num_attention_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408, "topk_method": "greedy"}
            | {"first_k_dense_replace": 1},
            15_706_484_224,
        ),
        (  # GLM-4.5-Air
            "Glm4MoeForCausalLM",
            {"vocab_size": 151_552, "intermediate_size": 10_944, "num_hidden_layers": 46, "num_attention_heads": 96}
            | {"head_dim": 128, "attention_bias": True},
            106_852_251_264,
        ),
        (  # Qwen1.5-MoE-A2.7B
            "Qwen2MoeForCausalLM",
            {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
            | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60},
            14_315_784_192,
        ),
        (  # Nemotron-3-Nano-30B-A3B
            "NemotronHForCausalLM",
            {"vocab_size": 131_072, "hidden_size": 2688, "num_key_value_heads": 2, "intermediate_size": 1856}
            | {"hybrid_override_pattern": f"MEMEM*E{'MEMEM*E' * 4}MEMEMEM*EMEMEMEME", "mamba_num_heads": 64}
            | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
            | {"moe_shared_expert_intermediate_size": 3712},
            31_577_940_288,
        ),
        (  # Falcon-H1-0.5B
            "FalconH1ForCausalLM",
            {"vocab_size": 32_784, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36}
            | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536}
            | {"mamba_n_heads": 24, "mamba_d_state": 128},
            521_411_104,
        ),
        (  # Bamba-9B
            "BambaForCausalLM",
            {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8, "mamba_d_state": 128}
            | {"attn_layer_indices": [9, 18, 27]},
            9_780_235_392,
        ),
    ],
)
def test_models_have_their_known_sizes(architecture: str, changes: dict[str, Any], num_parameters: int) -> None:
    config = parse_model_config(llama(architectures=[architecture], **changes))
    assert config.num_parameters == num_parameters


def test_latent_attention_caches_one_vector_and_scales_as_yarn_says() -> None:
    """DeepSeek-V3's: 512 numbers and a rotated key of 64; the factor is its modeling file's mscale, squared."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    fields = {"rope_scaling": {**yarn, "original_max_position_embeddings": 4096}, "max_position_embeddings": 163_840}
    config = parse_model_config(llama(architectures=["DeepseekV3ForCausalLM"], **fields))
    assert (config.num_cached, config.num_kv_heads, config.head_dim, config.max_position) == (1, 1, 576, 163_840)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_qwen3_moe_may_have_dense_layers() -> None:
    qwen = llama(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=6,
        num_experts=8,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    )
    config = parse_model_config(qwen)
    assert [layer.is_sparse for layer in config.layers] == [False, True, False, False, False, True]
    assert config.experts is not None
    assert not config.experts.is_normalized


def test_yarn_stretches_the_context_it_was_made_from() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert parse_model_config(llama(max_position_embeddings=32_768, rope_scaling=yarn)).max_position == 131_072
    del yarn["original_max_position_embeddings"]
    assert parse_model_config(llama(max_position_embeddings=32_768, rope_scaling=yarn)).max_position == 32_768


def test_yarn_of_a_huge_factor_stays_a_count() -> None:
    scaling = {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 131_072}
    assert parse_model_config(llama(rope_scaling=scaling)).max_position == 2**31 - 1


def test_context_is_stated_or_the_familys() -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert stated_context(LLAMA) == 131_072
    for architecture, context in (("LlamaForCausalLM", 2048), ("Qwen2ForCausalLM", 32_768)):
        assert stated_context({**silent, "architectures": [architecture]}) == context
        assert parse_model_config({**silent, "architectures": [architecture]}).max_position == context


@pytest.mark.parametrize(("context", "served", "factor"), [(None, 4096, 1.1), (4096, 4096, 1.1), (4097, 131_072, 2.0)])
def test_longrope_has_long_factors_where_more_than_the_original_context_is_asked_for(
    context: int | None, served: int, factor: float
) -> None:
    """Phi-3-mini-128k, in its first spelling."""
    factors = {"short_factor": [1.1] * 48, "long_factor": [2.0] * 48}
    fields = {"rope_scaling": {"type": "su", **factors}, "original_max_position_embeddings": 4096}
    phi = parse_model_config(llama(architectures=["Phi3ForCausalLM"], hidden_size=3072, **fields), context)
    assert (phi.max_position, phi.rope.factors) == (served, (factor,) * 48)
    assert phi.rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)


GEMMA_3_4B = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
QWEN_VL = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"hidden_size": 1280}}


def test_the_language_model_of_a_vision_model_is_read_in_each_spelling() -> None:
    """As gemma-3-4b-it writes it, which leaves out what transformers knows, and Qwen2.5-VL, which does not nest."""
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = parse_model_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {**GEMMA_3_4B, **scaling, "model_type": "gemma3_text"},
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (gemma.num_parameters, gemma.eos_token_ids, gemma.tie_embeddings) == (3_880_263_168, (1, 106), True)
    qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    for fields in (llama(**QWEN_VL) | qwen, qwen | {"text_config": llama(model_type="qwen2_5_vl_text", **QWEN_VL)}):
        config = parse_model_config(fields)
        assert (config.rope, config.qkv_bias, config.hidden_size) == (RopeConfig(1_000_000.0), True, 4096)


def test_llama_4_sees_chunks_where_it_rotates() -> None:
    scout = {"vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384}
    scout |= {"num_hidden_layers": 48, "num_attention_heads": 40, "max_position_embeddings": 10_485_760}
    scout |= {"no_rope_layers": [], "hidden_act": "silu"}
    config = parse_model_config({"architectures": ["Llama4ForConditionalGeneration"], "text_config": scout})
    kinds = [layer.rope is not None and layer.rope.kind for layer in config.layers[:4]]
    assert (config.num_parameters, config.max_position) == (107_769_861_120, 10_485_760)
    assert kinds == ["default", "default", "default", "none"]
    assert [layer.chunk for layer in config.layers[:4]] == [8192, 8192, 8192, None]


def test_dynamic_rope_is_the_plain_one_up_to_the_models_positions() -> None:
    dynamic = parse_model_config(llama(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert (dynamic.rope, dynamic.max_position) == (RopeConfig(10_000.0), 131_072)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": None},
        {"hidden_size": 0},
        {"hidden_size": "4096"},
        {"num_hidden_layers": True},
        {"num_key_value_heads": 5},
        {"head_dim": 127},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "yes"},
        {"eos_token_id": "2"},
        {"architectures": "LlamaForCausalLM"},
        {"model_type": "granite"},
        {"architectures": ["MistralForCausalLM"], "model_type": "llama"},
        {"hidden_size": 2**31},
        {"vocab_size": 10**30},
        {"head_dim": 2**22},
        {"num_hidden_layers": 100_000},
        {"max_position_embeddings": 10**30},
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 100_000},
        {"rope_parameters": []} | {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 0.5}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.01},
        {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": 3},
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 4112,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 7},
        {**_NEMOTRON, "hybrid_override_pattern": "M*X"},
        {**_NEMOTRON, "n_groups": 3},
        {**_NEMOTRON, "conv_kernel": 1},
        {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 100},
        {"architectures": ["FalconH1ForCausalLM"], "ssm_multipliers": [1.0]},
        {"architectures": ["DeepseekV3ForCausalLM"], "qk_rope_head_dim": 63},
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    ],
    ids=str,
)
def test_malformed_fields_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json: "):
        parse_model_config(llama(**changes))


def gemma4(**changes: Any) -> dict[str, Any]:
    fields = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return llama(architectures=["Gemma4ForCausalLM"], head_dim=24, **{**fields, **changes})


def test_gemma_4_has_larger_heads_where_there_is_no_window() -> None:
    published = gemma4(global_head_dim=40, num_global_key_value_heads=1, attention_k_eq_v=True)
    written = gemma4(attention_k_eq_v=True)
    written["per_layer_config"] = {str(index): {"head_dim": 40, "num_key_value_heads": 1} for index in (1, 3)}
    parsed = parse_model_config(published)
    assert parsed.layers == parse_model_config(written).layers
    assert parsed.cached_heads == ((2, 24), (1, 40)) * 2
    assert [layer.has_values for layer in parsed.layers] == [True, False] * 2


def test_layers_without_keys_attend_over_the_last_that_sees_as_far() -> None:
    parsed = parse_model_config(
        gemma4(num_hidden_layers=6, layer_types=None, sliding_window_pattern=2, num_kv_shared_layers=2)
    )
    assert [layer.source for layer in parsed.layers] == [None] * 4 + [2, 3]
    assert len(parsed.cached_heads) == 4


def llama4(**changes: Any) -> dict[str, Any]:
    fields = {"intermediate_size_mlp": 32, "num_local_experts": 2, "num_hidden_layers": 2, "no_rope_layers": [1, 1]}
    return llama(architectures=["Llama4ForCausalLM"], **{**fields, **changes})


def test_chunks_bound_what_a_token_depends_on_where_all_layers_have_them() -> None:
    assert parse_model_config(llama4(attention_chunk_size=64)).longest_window == 64
    assert parse_model_config(llama4(attention_chunk_size=64, no_rope_layers=[1, 0])).longest_window is None


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (gemma4(per_layer_config={"1": {"hidden_size": 8}}), "per_layer_config"),
        (llama(per_layer_config={"1": {"head_dim": 8}}), "per_layer_config"),
        (gemma4(num_kv_shared_layers=4), "num_kv_shared_layers=4"),
        (gemma4(use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (llama4(attention_chunk_size=24), "attention_chunk_size"),
    ],
)
def test_what_differs_by_layer_and_is_not_computed_is_refused_by_name(config: dict[str, Any], match: str) -> None:
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=match):
        parse_model_config(config)
