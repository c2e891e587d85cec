"""config.json is understood completely, in both spellings, or refused by name."""

from typing import Any

import pytest

from core.config import RopeConfig, parse_model_config
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
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tie_embeddings) == (True, False, True)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_defaults_of_old_configurations() -> None:
    old = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "architectures")}
    config = parse_model_config({**old, "model_type": "llama", "torch_dtype": "float16", "eos_token_id": [2, 3]})
    assert (config.num_kv_heads, config.dtype, config.eos_token_ids) == (32, "float16", (2, 3))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    ],
)
def test_what_would_be_served_wrong_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        parse_model_config(llama(**changes))
    assert "use a model" in caught.value.fix


def test_unused_sliding_windows_are_no_obstacle() -> None:
    """As Qwen2.5 writes them."""
    fields = {"use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 21}
    parse_model_config(llama(architectures=["Qwen2ForCausalLM"], **fields))


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
        {"rope_parameters": []} | {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}},
    ],
    ids=str,
)
def test_malformed_fields_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json: "):
        parse_model_config(llama(**changes))
