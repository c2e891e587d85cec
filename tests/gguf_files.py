"""GGUF files as llama.cpp's converter makes them, from Hugging Face directories and tokenizers."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from core.config_json import parse_model_config, text_config
from core.gguf import BLOCKS, GgufFile, parse_gguf
from gpu.checkpoint import OTHER_TOWERS, text_name

Q = gguf.GGMLQuantizationType
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
# config.json's model_type -> general.architecture, where they differ
ARCHITECTURES = {
    "mixtral": "llama",
    "glm": "chatglm",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "gemma3_text": "gemma3",
    "ernie4_5_moe": "ernie4_5-moe",
    "gpt_oss": "gpt-oss",
    "lfm2_moe": "lfm2moe",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "granitemoehybrid": "granitehybrid",
    "olmo3": "olmo2",
    "llama4_text": "llama4",
    "mistral": "mistral3",
    "ministral3": "mistral3",
    "falcon_h1": "falcon-h1",
    "glm4_moe": "glm4moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}
TURNED = (
    "llama",
    "arcee",
    "smollm3",
    "mistral3",
    "granite",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
)  # the architectures whose q and k lie as pairs side by side


def write_gguf(
    directory: Path,
    file: Path,
    quantisation: Q = Q.F32,
    metadata: Mapping[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
    is_old: bool = False,
    is_fused: bool = False,
) -> Path:
    """Convert a directory's config.json and safetensors.

    Args:
        quantisation: of the matrices whose rows come in its blocks; vectors stay F32, as in llama.cpp.
        metadata: fields beside the architecture's.
        is_old: as llama.cpp converted latent attention until April 2025, and Qwen3-Next until February 2026.
        is_fused: q, k and v are one tensor, as in checkpoints of ChatGLMModel.
    """
    config = dict(text_config(json.loads((directory / "config.json").read_text())))
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    if "layers_block_type" in config:  # Nemotron-H
        layers = {"num_hidden_layers": len(config["layers_block_type"]), "layer_types": config["layers_block_type"]}
        config |= {**layers, "rms_norm_eps": config["layer_norm_epsilon"]}
        architecture += "_moe" if "moe" in config["layer_types"] else ""
    writer = gguf.GGUFWriter(file, architecture)
    _write_config(writer, config, is_old)
    ends = {f"tokenizer.ggml.{key}": config.get(key) for key in ("bos_token_id", "eos_token_id")}
    for key, value in {**{key: end for key, end in ends.items() if end is not None}, **(metadata or {})}.items():
        _write_field(writer, key, value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], _num_blocks(config))
    stored = load_file(directory / "model.safetensors")
    tensors = {text_name(name): tensor for name, tensor in stored.items() if not name.startswith(OTHER_TOWERS)}
    if is_fused:
        tensors = _with_fused_heads(tensors)
    if "linear_num_key_heads" in config:
        tensors = _with_delta_nets(tensors, config, is_old)
    if "kv_lora_rank" in config and not is_old:
        tensors = with_split_keys(tensors, config)
    for name, rows in _stacked_experts(_with_split_experts(_with_state_spaces(tensors, config), config)).items():
        if architecture in TURNED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
            rows = _permute(rows, heads)
        if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            rows = rows + 1
        if name.endswith(("shared_expert_gate.weight", "conv.conv.weight")):
            rows = rows.squeeze()
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace(".expert_bias", ".expert_bias.bias").replace("self_attn.sinks", "self_attn.sinks.weight")
        name += ".weight" if name.endswith(("layer_scalar", "correct_output_scale", "experts.gate_up_proj")) else ""
        name += ".weight" if name.endswith("experts.down_proj") else ""
        name = re.sub(r"model.layers.(\d+).router.scale", r"blk.\1.ffn_gate_inp.scale", name)
        name = re.sub(r"model.layers.(\d+).router.per_expert_scale", r"blk.\1.ffn_down_exps.scale", name)
        if config["model_type"] == "lfm2_moe" and (".feed_forward.experts" in name or ".feed_forward.gate." in name):
            name = name.removeprefix("model.")
        own = name.replace("mixer.experts", "mlp.experts")
        own = own.replace("model.", "backbone.", 1) if config["model_type"] == "nemotron_h" and own == name else own
        found = names.get_name(own, try_suffixes=(".weight", ".bias")) or names.get_name(name, (".weight",)) or name
        _write_tensor(writer, found, rows, quantisation)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    for kind in ("short", "long"):  # conversion/phi.py
        own = (config.get("rope_parameters") or {}).get(f"{kind}_factor")
        if own is not None:
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(own, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def parsed(file: Path) -> GgufFile:
    return parse_gguf(memoryview(file.read_bytes()), file.name)


def byte_level_metadata(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """The tokenizer of GPT-2's kind as metadata."""
    model = json.loads(tokenizer.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        **_tokens(tokenizer),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_metadata(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The tokenizer of Llama 2's kind as metadata; the earlier a piece was made, the better its score."""
    found = _tokens(tokenizer)
    return {
        "tokenizer.ggml.model": "llama",
        **found,
        "tokenizer.ggml.scores": [-float(token_id) for token_id in range(tokenizer.get_vocab_size())],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def _tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    assert [token_id for _, token_id in by_id] == list(range(len(by_id)))
    added = tokenizer.get_added_tokens_decoder()
    types = [
        BYTE
        if token.startswith("<0x")
        else NORMAL
        if token_id not in added
        else CONTROL
        if added[token_id].special
        else USER_DEFINED
        for token, token_id in by_id
    ]
    return {"tokenizer.ggml.tokens": [token for token, _ in by_id], "tokenizer.ggml.token_type": types}


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], is_old: bool) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    family = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(_num_blocks(config))
    if config["model_type"] != "qwen3_5_moe_text":
        writer.add_feed_forward_length(_mlp_width(config))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.get("norm_eps", config.get("rms_norm_eps")))
    writer.add_vocab_size(config["vocab_size"])
    if family != "gemma2":
        writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if family not in ("phi3", "granitemoehybrid", "gemma4_text", "glm"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in (
        "llama",
        "mixtral",
        "granite",
        "smollm3",
        "mistral",
        "ministral3",
        "phi3",
        "glm",
        "glm4",
        "glm4_moe",
        "granitemoehybrid",
    ):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    _write_family(writer, family, config)
    if "linear_num_key_heads" in config:
        _write_delta_nets(writer, config, is_old)
    if "kv_lora_rank" in config:
        _write_latent(writer, config, is_old)


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], is_old: bool) -> None:
    """conversion/deepseek.py, DeepseekV2Model.set_gguf_parameters."""
    rank, turned, value = (config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    lengths = (config["qk_nope_head_dim"] + turned, value)
    writer.add_key_length(lengths[0] if is_old else rank + turned)
    writer.add_value_length(lengths[1] if is_old else rank)
    if not is_old:
        writer.add_head_count_kv(1)
        writer.add_key_length_mla(lengths[0])
        writer.add_value_length_mla(lengths[1])
    writer.add_rope_dimension_count(turned)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    first = config.get("first_k_dense_replace") or config["mlp_layer_types"].count("dense")
    writer.add_leading_dense_block_count(first)
    _write_routed_experts(writer, config)
    if config["model_type"] == "glm4_moe_lite":
        writer.add_vocab_size(154_880)  # by which llama.cpp knows how GLM's experts are scored
    kinds = {"deepseek_v2": gguf.ExpertGatingFuncType.SOFTMAX, "deepseek_v3": gguf.ExpertGatingFuncType.SIGMOID}
    if config["model_type"] in kinds:
        writer.add_expert_gating_func(kinds[config["model_type"]])
    growth = config["rope_parameters"].get("mscale_all_dim")
    if growth is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * growth)


def _write_delta_nets(writer: gguf.GGUFWriter, config: dict[str, Any], is_old: bool) -> None:
    """conversion/qwen.py, Qwen3NextModel.set_gguf_parameters, and its mixins."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if is_old:
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    else:
        own = [kind == "linear_attention" for kind in config["layer_types"]]
        own += [False] * (_num_blocks(config) - len(own))
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", own)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if config.get("num_nextn_predict_layers"):
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])


def _with_delta_nets(tensors: Mapping[str, torch.Tensor], config: dict[str, Any], is_old: bool) -> dict[str, Any]:
    """conversion/qwen.py: modify_tensors of Qwen3NextModel, _LinearAttentionVReorderBase and _Qwen35MtpMixin."""
    num_keys, per_key = (
        config["linear_num_key_heads"],
        config["linear_num_value_heads"] // config["linear_num_key_heads"],
    )
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    is_tiled = config["model_type"] != "qwen3_next"
    drafts = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }
    found: dict[str, torch.Tensor] = {}

    def tiled(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
        if not is_tiled:
            return rows
        return rows.reshape(num_keys, per_key, head_dim, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            _, first, *rest = name.split(".")
            number = config["num_hidden_layers"]
            own = (
                (f"model.layers.{number}", *rest[1:])
                if first == "layers"
                else (f"blk.{number}.nextn.{drafts[first]}", *rest)
            )
            name = ".".join(own)
        kind = name.partition("linear_attn.")[2].partition(".")[0]
        if kind in ("in_proj_qkv", "conv1d"):
            tensor = tensor.squeeze(1) if kind == "conv1d" else tensor
            split = 2 * num_keys * key_dim
            tensor = torch.cat([tensor[:split], tiled(tensor[split:], value_dim)])
        elif kind == "in_proj_z":
            tensor = tiled(tensor, value_dim)
        elif kind in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            tensor = tiled(tensor, 1)
        elif kind == "out_proj":
            tensor = tiled(tensor.T, value_dim).T.contiguous()
        elif kind == "in_proj_qkvz" and not is_old:
            sizes = [key_dim, key_dim, per_key * value_dim, per_key * value_dim]
            *qkv, gate = tensor.view(num_keys, sum(sizes), -1).split(sizes, 1)
            found[name.replace("qkvz", "qkv")] = torch.cat([part.flatten(0, 1) for part in qkv])
            name, tensor = name.replace("qkvz", "z"), gate.flatten(0, 1)
        if kind == "A_log":
            tensor = -tensor.exp()
        if name.endswith("norm.weight") and kind != "norm":
            tensor = tensor + 1
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = tensor.chunk(2, 1) if "gate_up" in name else [tensor]
            for part, rows in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                found[f"{name.rpartition('.')[0]}.{part}_proj.weight"] = rows.contiguous()
            continue
        found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def with_split_keys(tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """conversion/deepseek.py, DeepseekV2Model.modify_tensors."""
    found = dict(tensors)
    for name in [name for name in tensors if "kv_b_proj" in name]:
        by_head = found.pop(name).view(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
        found[name.replace("kv_b_proj", "v_b_proj")] = values
    return found


def _with_fused_heads(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [found.pop(name.replace(".q_proj.", f".{letter}_proj.")) for letter in "qkv"]
        found[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return found


def _num_blocks(config: dict[str, Any]) -> int:
    """Layers that predict later tokens included: conversion/glm.py."""
    total: int = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    return total


def _mlp_width(config: dict[str, Any]) -> Any:
    """conversion/lfm2.py, _add_feed_forward_length."""
    return (
        parse_model_config(config).intermediate_size if config["model_type"] == "lfm2" else config["intermediate_size"]
    )


def _with_split_experts(tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """conversion/gpt_oss.py, whose rows of gate and up alternate, and qwen3vl.py: modify_tensors."""
    found, alternates = dict(tensors), config["model_type"] == "gpt_oss"
    for name in tensors if alternates or config["model_type"] in ("qwen3_vl_moe_text", "llama4_text") else ():
        stem, _, kind = name.rpartition(".")
        if kind in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            rows = found.pop(name)
            rows, end = (rows, "bias") if kind.endswith("_bias") else (rows.transpose(1, 2), "weight")
            gate, up = (rows[:, ::2], rows[:, 1::2]) if alternates else rows.chunk(2, 1)
            parts = {"down": rows} if kind.startswith("down") else {"gate": gate, "up": up}
            found |= {f"{stem}.{part}_proj.{end}": one.contiguous() for part, one in parts.items()}
    return found


def _write_family(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    if family in ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    match family:
        case "olmo3":  # conversion/olmo.py
            writer.add_sliding_window(config["sliding_window"])
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        case "llama4_text":  # conversion/llama4.py
            writer.add_feed_forward_length(config["intermediate_size_mlp"])
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
            writer.add_expert_count(config["num_local_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        case "ministral3":  # conversion/mistral3.py
            writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
            writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
        case "phi3":
            original = config["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(original)
            if config.get("rope_parameters", {}).get("rope_type") == "longrope":
                scale = config["max_position_embeddings"] / original
                writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        case "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        case "granite" | "granitemoehybrid":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
        case "mixtral" | "qwen3_moe" | "qwen3_vl_moe_text" | "qwen2_moe" | "lfm2_moe" | "gpt_oss":
            writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
        case _:
            pass
    if family in ("gemma3n_text", "gemma4_text"):
        _write_layer_inputs(writer, config)
    if family in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        _write_state_space(writer, config)
    if family == "glm4_moe":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        _write_routed_experts(writer, config)
        if config.get("num_nextn_predict_layers") is not None:
            writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    experts = (
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "qwen2_moe",
        "lfm2_moe",
        "ernie4_5_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
    )
    if family in experts:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_head_count_kv([config["num_key_value_heads"] * (one != "conv") for one in config["layer_types"]])
    if family == "lfm2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if family == "ernie4_5_moe":
        writer.add_expert_count(config["moe_num_experts"])
        writer.add_expert_used_count(config["moe_k"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _write_layer_inputs(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """conversion/gemma.py: Gemma3NModel and Gemma4Model."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(windowed)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config.get("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "gemma3n_text":
        writer.add_altup_active_idx(config["altup_active_idx"])
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        sparse = torch.tensor(config["activation_sparsity_pattern"])
        writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(sparse).tolist())
        return
    own = config["per_layer_config"][str(windowed.index(False))]
    writer.add_key_length(own["head_dim"])
    writer.add_value_length(own["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(own["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if "num_key_value_heads" in own:
        writer.add_head_count_kv(
            [config["num_key_value_heads"] if one else own["num_key_value_heads"] for one in windowed]
        )
    first_shared, width = len(windowed) - config["num_kv_shared_layers"], config["intermediate_size"]
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([width * (1 + (index >= first_shared)) for index in range(len(windowed))])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_state_space(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """conversion/granite.py, falcon_h1.py and nemotron.py: set_gguf_parameters."""

    def get(*names: str) -> Any:
        return next(config[name] for name in names if config.get(name) is not None)

    heads = get("mamba_n_heads", "mamba_num_heads")
    writer.add_ssm_conv_kernel(get("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(get("mamba_d_state", "ssm_state_size"))
    writer.add_ssm_group_count(get("mamba_n_groups", "n_groups"))
    writer.add_ssm_inner_size(heads * get("mamba_d_head", "mamba_head_dim"))
    writer.add_ssm_time_step_rank(heads)
    kinds = config.get("layer_types") or []
    if kinds:
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        if config["num_local_experts"]:
            writer.add_expert_count(config["num_local_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "nemotron_h":
        has_experts = "moe" in kinds
        width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
        writer.add_feed_forward_length([width * (kind in ("moe", "mlp")) for kind in kinds])
        if has_experts:
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
            _write_routed_experts(writer, config)


def _write_routed_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _with_state_spaces(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors as those files have them: conversion/mamba.py, granite.py and falcon_h1.py, modify_tensors."""
    factors = {**dict(parse_model_config(config).factors), "embed_tokens.weight": config.get("embedding_multiplier", 1)}
    factors |= {"lm_head.weight": config.get("lm_head_multiplier", 1)}
    found: dict[str, torch.Tensor] = {}
    groups = config.get("mamba_n_groups") or config.get("n_groups")
    for name, tensor in tensors.items() if groups else ():
        if config["model_type"] == "falcon_h1":
            usual = name.replace("feed_forward.", "mlp.")
            tensor = tensor * next((by for end, by in factors.items() if usual.endswith(end)), 1)
            own = parse_model_config(config).recurrence
            if name.endswith("in_proj.weight") and own is not None and own.input_factors:
                keys = own.num_key_heads * own.key_dim
                sizes = torch.tensor([own.output_size, own.output_size, keys, keys, own.num_heads])
                tensor = tensor * torch.tensor(own.input_factors).repeat_interleave(sizes).unsqueeze(1)
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        if name.endswith((".A_log", ".D")):
            tensor = tensor.unsqueeze(1)
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            tensor = tensor.view(groups, -1)
        if name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        name = name.replace(".dt_bias", ".dt_proj.bias")
        halves = {"block_sparse_moe.input_linear": "mlp.experts", "shared_mlp.input_linear": "mlp.shared_experts"}
        part = next((part for part in halves if part in name), None)
        if part is not None:
            owner = halves[part] if config["num_local_experts"] else "mlp"
            for half, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2, -2), strict=True):
                found[name.replace(part, f"{owner}.{half}")] = rows.contiguous()
            continue
        if "shared_mlp.output_linear" in name and not config["num_local_experts"]:
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        found[name] = tensor
    return found or tensors


def _write_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _write_tensor(writer: gguf.GGUFWriter, name: str, rows: np.ndarray, quantisation: Q) -> None:
    block_elements = gguf.GGML_QUANT_SIZES[quantisation][0]
    if rows.ndim == 1 or rows.shape[-1] % block_elements:
        writer.add_tensor(name, rows)
    else:
        writer.add_tensor(name, gguf.quantize(rows, quantisation), raw_dtype=quantisation)


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py, LlamaModel.permute."""
    parted = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(parted.swapaxes(1, 2).reshape(rows.shape))


def _stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Each kind of a layer's experts as one tensor, in order."""
    found: dict[str, Any] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        merged, count = re.subn(r"(\.experts|projections)\.\d+\.", r"\1.", name)
        rows = tensors[name].float().numpy()
        found[merged] = [*found.get(merged, []), rows] if count else rows
    return {name: np.stack(rows) if isinstance(rows, list) else rows for name, rows in found.items()}


def quantised_numbers(tensor: torch.Tensor, quantisation: Q) -> torch.Tensor:
    """What is left of a tensor once it was stored so."""
    if tensor.ndim == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantisation][0]:
        return tensor.float()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), quantisation), quantisation))


# Where a block's float16 numbers lie: any other bytes may be anything.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, num_out: int, num_in: int) -> torch.Tensor:
    """A matrix of blocks as a file stores it: bytes [out, bytes of a row]."""
    elements, size_bytes = BLOCKS[name]
    source = np.random.default_rng(num_out + num_in)
    blocks = source.integers(0, 256, (num_out, num_in // elements, size_bytes), np.uint8)
    for offset in HALVES.get(name, ()):
        scales = source.standard_normal((*blocks.shape[:2], 1)) / 100
        blocks[..., offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 118 + blocks[..., 0] % 8  # exponents, so that sums are finite
    return torch.from_numpy(blocks.reshape(num_out, -1))
