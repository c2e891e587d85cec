"""Translates a GGUF file to Hugging Face's terms: config.json's fields, the names of tensors.

A table of architectures, then what reads files by it. Any thread. Source: llama.cpp, conversion/*.py (what it writes)
and src/models/*.cpp (what it computes where a file is silent).
"""

import math
import re
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from core.config_fields import Family
from core.config_layers import LAYER_TYPES
from core.errors import BadCheckpoint, UnsupportedModel
from core.families import FAMILIES
from core.gguf import GgufFile, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling: the divisor of each frequency
# Longrope's, of short and of long contexts
LONG_FACTORS = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
FACTORS = (ROPE_FACTORS, *LONG_FACTORS.values())
# Of every Llama 3.1 to 3.3; they differ in `factor`, which is the last divisor
_LLAMA3 = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
MOST_DRAFT_LAYERS = 64
SCORINGS = ("softmax", "sigmoid")  # expert_gating_func, from 1 on
_YARN_GROWTH = "rope.scaling.yarn_log_multiplier"
# Optional fields that change the computation unless they are so
_ZERO = (
    *("expert_count", "expert_shared_count", "moe_latent_size", _YARN_GROWTH),
    *(f"attention.{name}" for name in ("clamp_kqv", "temperature_scale", "scale")),
)
_ZERO_OR_ONE = "expert_weights_scale", "logit_scale", "embedding_scale", "residual_scale"
# Tokens that llama.cpp's converter gives to models of state spaces, whatever they have, and what these are served with
ARBITRARY_CONTEXT, USUAL_CONTEXT = 2**20, 2**17
NEVER = 1e29  # a divisor of frequencies that leaves no turning
_TOLERANCE = 1e-4  # relative; the factors were computed in float32

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # LFM2's last norm
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# Of several matrices, one after the other
_STACKED_NAMES = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
# Of a layer that predicts later tokens, beside what every layer has
_DRAFT_PARTS = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
_QWENS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
_QWEN_DRAFTS = tuple((f"mtp.layers.0.{one}.", f"mtp.{own}.") for one, own in _QWENS.items())
_DRAFT_NAMES = {f"nextn.{name.replace('.', '_')}.weight": f"{name}.weight" for name in _DRAFT_PARTS}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# config.json field -> metadata key, after the architecture's name: required ones, and optional ones
_NEEDED = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "partial_rotary_factor": "rope.dimension_count",
}
_SAMPLING = {"general.sampling.temp": "temperature", "general.sampling.penalty_repeat": "repetition_penalty"}
_SAMPLING |= {f"general.sampling.{name}": name for name in ("top_p", "top_k", "min_p")}


_ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "attn_output": "self_attn.o_proj",
}
_QKV = "attn_qkv"  # where its name here has {}: the rows of q, k and v one after the other
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_NORMED_AFTER = {**_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_ATTENTION, **_MLP, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_SSM = {"ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_SPACE = {name: f"mamba.{own}" for name, own in {"ssm_in": "in_proj", **_SSM}.items()}
_TAKEN = {_QKV: "qkv", "attn_gate": "z", "ssm_alpha": "a", "ssm_beta": "b", "ssm_ba": "ba", "ssm_in": "qkvz"}
_SPACE_WHOLE = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
# Of state spaces and of delta nets
_SSM_FIELDS = {
    "ssm.time_step_rank": ("mamba_n_heads", "linear_num_value_heads"),
    "ssm.group_count": ("mamba_n_groups", "linear_num_key_heads"),
    "ssm.state_size": ("mamba_d_state", "linear_key_head_dim"),
    "ssm.conv_kernel": ("mamba_d_conv", "linear_conv_kernel_dim"),
}
_SPACE_FIELDS = {"mamba_d_ssm": "ssm.inner_size", **{name: key for key, (name, _) in _SSM_FIELDS.items()}}
_DELTA_FIELDS = {"full_attention_interval": "full_attention_interval"}
_DELTA_FIELDS |= {name: key for key, (_, name) in _SSM_FIELDS.items()}
_CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_SHARED_EXPERT = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_WINDOW_FIELDS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_GEMMA_FIELDS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")} | _WINDOW_FIELDS


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
        constants: config.json fields that the metadata leaves out, or may leave out.
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
_NUMBERED_EXPERTS = {
    f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{own}"
    for name, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_EXPERT_SIZES = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EXPERT_FIELDS = {"num_experts": "expert_count", **_EXPERT_SIZES}
_ROUTED_FIELDS = {
    "n_routed_experts": "expert_count",
    **_EXPERT_SIZES,
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
_GRANITE_FIELDS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


_NEMOTRON = GgufFamily(
    "nemotron_h",
    {**_ATTENTION, **_MLP, **_SPACE, **_SHARED_EXPERT, "attn_norm": "norm", "ffn_gate_inp": "mlp.gate"},
    {**_SPACE_WHOLE, **_CHOICE_BIAS},
    _EXPERTS,
    are_heads_turned=True,
    fields={
        **_SPACE_FIELDS,
        **_ROUTED_FIELDS,
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
)

_LAYER_INPUTS = {
    **_GEMMA,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_STREAMS = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_LAYER_INPUT_FIELDS = {
    **_GEMMA_FIELDS,
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
}

_LFM2 = GgufFamily(
    "lfm2",
    {**_ATTENTION, **_MLP, "attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
    {
        f"shortconv.{name}.{kind}": f"conv.{name}.{kind}"
        for name in ("in_proj", "conv", "out_proj")
        for kind in ("weight", "bias")
    },
    fields={"conv_L_cache": "shortconv.l_cache"},
    constants={"block_auto_adjust_ff_dim": False},  # the length says what it comes to
)

_ROUTED = {**_LLAMA, "ffn_gate_inp": "mlp.gate"}
_ONE_SHARED = _ROUTED | {name: own.replace("experts", "expert") for name, own in _SHARED_EXPERT.items()}
_GATED_SHARED = {**_ONE_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_GATED_FIELDS = {**_EXPERT_FIELDS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_TILED = {"linear_value_heads_tiled": True}  # no field of config.json's: so llama.cpp orders them
_QWEN_DELTA = GgufFamily(
    "",
    {
        **_GATED_SHARED,
        **_NORMED_AFTER,
        **{name: f"linear_attn.in_proj_{own}" for name, own in _TAKEN.items()},
        **{name: f"linear_attn.{own}" for name, own in _SSM.items()},
    },
    {name: own.replace("mamba", "linear_attn") for name, own in _SPACE_WHOLE.items()},
    _EXPERTS,
    fields={**_GATED_FIELDS, **_DELTA_FIELDS},
)
_QWEN3_MOE = GgufFamily("qwen3_moe", _ROUTED, {}, _EXPERTS, fields=_EXPERT_FIELDS, constants={"norm_topk_prob": True})
_DEEPSEEK2 = GgufFamily(
    "deepseek_v2",
    {
        **_ROUTED,
        **_SHARED_EXPERT,
        **{f"attn_{name}_b": f"self_attn.{name}_b_proj" for name in ("q", "kv", "k", "v")},
        **{f"attn_{name}_a_norm": f"self_attn.{name}_a_layernorm" for name in ("q", "kv")},
        "attn_q_a": "self_attn.q_a_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    },
    _CHOICE_BIAS,
    _EXPERTS,
    fields={
        **_ROUTED_FIELDS,
        **{name: f"attention.{name}" for name in ("q_lora_rank", "kv_lora_rank")},
        "qk_rope_head_dim": "rope.dimension_count",
        "v_head_dim": "attention.value_length",
        "mscale_all_dim": _YARN_GROWTH,
    },
    constants={"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": 0},
)

GGUF_FAMILIES = {
    "llama": GgufFamily("llama", are_heads_turned=True),
    **{name: GgufFamily(name) for name in ("qwen2", "qwen3", "gemma", "ernie4_5")},
    **{name: GgufFamily(name, are_heads_turned=True) for name in ("smollm3", "arcee")},
    "qwen2vl": GgufFamily("qwen2_5_vl_text"),
    "qwen3vl": GgufFamily("qwen3_vl_text"),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": replace(_QWEN3_MOE, model_type="qwen3_vl_moe_text"),
    "llama4": GgufFamily(
        "llama4_text",
        _ONE_SHARED,
        expert_names=_EXPERTS,
        fields={
            "intermediate_size_mlp": "feed_forward_length",
            "intermediate_size": "expert_feed_forward_length",
            **_LOCAL_EXPERTS,
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    ),
    "qwen2moe": GgufFamily("qwen2_moe", _GATED_SHARED, expert_names=_EXPERTS, fields=_GATED_FIELDS),
    "seed_oss": GgufFamily("seed_oss", _NORMED_AFTER),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {**_NORMED_AFTER, **_SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"},
        _CHOICE_BIAS,
        _EXPERTS,
        fields=_ROUTED_FIELDS,
    ),
    "qwen3next": replace(_QWEN_DELTA, model_type="qwen3_next"),
    "qwen35": replace(_QWEN_DELTA, model_type="qwen3_5_text", fields=_DELTA_FIELDS, constants=_TILED),
    "qwen35moe": replace(_QWEN_DELTA, model_type="qwen3_5_moe_text", constants=_TILED),
    "chatglm": GgufFamily("glm", {**_LLAMA, _QKV: "self_attn.{}_proj", "ffn_up": "mlp.gate_up_proj"}),
    "glm4": GgufFamily(
        "glm4",
        {
            **_LLAMA,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "mistral3": GgufFamily(
        "ministral3",
        are_heads_turned=True,
        fields={"llama_4_scaling_beta": "attention.temperature_scale", "mscale_all_dim": _YARN_GROWTH},
    ),
    "granite": GgufFamily("granite", are_heads_turned=True, fields=_GRANITE_FIELDS),
    "granitehybrid": GgufFamily(
        "granitehybrid",
        {**_ROUTED, **_SPACE, **_SHARED_EXPERT},
        _SPACE_WHOLE,
        _EXPERTS,
        are_heads_turned=True,
        fields={
            **_GRANITE_FIELDS,
            **_SPACE_FIELDS,
            **_LOCAL_EXPERTS,
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "falcon-h1": GgufFamily(
        "falcon_h1",
        {**_LLAMA, **_SPACE, "ffn_norm": "pre_ff_layernorm"},
        {**_SPACE_WHOLE, "ffn_norm": "pre_ff_layernorm.weight"},
        fields=_SPACE_FIELDS,
        # The second is no field of config.json's: llama.cpp's converter multiplies, and does not write by what
        constants={"mamba_norm_before_gate": False, "multipliers_in_matrices": True},
    ),
    "deepseek2": _DEEPSEEK2,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "olmo2": GgufFamily("olmo2", {**_ATTENTION, **_MLP, **_POST_NORMS}),
    "phi3": GgufFamily(
        "phi3",
        {**_LLAMA, _QKV: "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
    ),
    "gemma2": GgufFamily("gemma2", _GEMMA, fields=_GEMMA_FIELDS, whole_width_layers=46),
    "gemma3": GgufFamily("gemma3_text", _GEMMA, fields=_GEMMA_FIELDS, whole_width_layers=62),
    "ernie4_5-moe": GgufFamily(
        "ernie4_5_moe",
        {**_ROUTED, **_SHARED_EXPERT},
        {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        _EXPERTS,
        fields={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        constants={"moe_layer_end_index": -1},
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        {**_NORMED_AFTER, "ffn_gate_inp": "mlp.router"},
        {
            "attn_sinks.weight": "self_attn.sinks",
            **{f"ffn_{name}_exps.bias": f"mlp.experts.{name}_proj_bias" for name in ("gate", "up", "down")},
        },
        _EXPERTS,
        fields={
            "sliding_window": "attention.sliding_window",
            **_LOCAL_EXPERTS,
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        layer_names={**_LFM2.layer_names, "ffn_gate_inp": "feed_forward.gate"},
        whole_names={**_LFM2.whole_names, "exp_probs_b.bias": "feed_forward.expert_bias"},
        expert_names={name: own.replace("block_sparse_moe", "feed_forward") for name, own in _NUMBERED_EXPERTS.items()},
        fields={**_EXPERT_FIELDS, **_LFM2.fields, "first_k_dense_replace": "leading_dense_block_count"},
        constants={},
    ),
    "gemma3n": GgufFamily(
        "gemma3n_text",
        {**_LAYER_INPUTS, **_STREAMS},
        {"altup_correct_scale.weight": "altup.correct_output_scale"},
        fields={**_LAYER_INPUT_FIELDS, "altup_active_idx": "altup.active_idx", "altup_num_inputs": "altup.num_inputs"},
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        {
            **_LAYER_INPUTS,
            "ffn_gate_inp": "router.proj",
            **{f"post_ffw_norm_{number}": f"post_feedforward_layernorm_{number}" for number in (1, 2)},
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        },
        {
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        {f"ffn_{name}_exps": f"experts.{{}}.{name}_proj" for name in ("gate_up", "down")},
        fields={
            **_LAYER_INPUT_FIELDS,
            "head_dim": "attention.key_length_swa",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
}
# Mixtral's files say llama, and have experts
MIXTRAL = GgufFamily(
    "mixtral",
    {**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
    expert_names=_NUMBERED_EXPERTS,
    are_heads_turned=True,
    fields=_LOCAL_EXPERTS,
)
# OLMo 3's say olmo2, and have windows
OLMO3 = GgufFamily("olmo3", GGUF_FAMILIES["olmo2"].layer_names, fields=_WINDOW_FIELDS)
# DeepSeek V3's and GLM-4.7-Flash's say deepseek2; GLM's, known by their vocabulary, do not say how experts are scored
DEEPSEEK_V3, GLM_VOCABULARY = replace(_DEEPSEEK2, model_type="deepseek_v3"), 154_880


def find_family(metadata: Mapping[str, Any]) -> GgufFamily | None:
    """None: an unsupported architecture."""
    name = metadata.get("general.architecture")
    if name == "deepseek2":
        scoring = metadata.get("deepseek2.expert_gating_func")
        is_glm = not scoring and metadata.get("deepseek2.vocab_size") == GLM_VOCABULARY
        return DEEPSEEK_V3 if is_glm or scoring == SCORINGS.index("sigmoid") + 1 else _DEEPSEEK2
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "olmo2" and metadata.get("olmo2.attention.sliding_window"):
        return OLMO3
    if name == "mistral3" and not metadata.get("mistral3.attention.temperature_scale"):
        return GGUF_FAMILIES["llama"]  # Mistral Small 3
    return GGUF_FAMILIES.get(name) if isinstance(name, str) else None


def keys_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Fields of config.json and of generation_config.json -> the metadata keys that they are read from."""
    family = find_family(metadata)
    fields = {**_NEEDED, **_OPTIONAL, **({} if family is None else family.fields)}
    prefix = metadata.get("general.architecture")
    return {
        **{name: f"{prefix}.{key}" for name, key in fields.items()},
        **{name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id")},
        **{name: key for key, name in _SAMPLING.items()},
    }


def hugging_face_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """The file's tensors by their names in a Hugging Face checkpoint; an unknown tensor keeps its name.

    A tensor that holds all experts becomes one tensor per expert.

    Raises:
        UnsupportedModel: the architecture is not supported.
        BadCheckpoint: heads are not counted whose rows are to be told apart.
    """
    family, drafts = _family(file), _draft_layers(file.metadata)
    found: dict[str, GgufTensor] = {}
    for name, stored in file.tensors.items():
        match, tensor = _LAYER_NAME.fullmatch(name), replace(stored, shape=_shape(name, stored.shape, family))
        _, index, within = (*name.split(".", 2), "", "")[:3]
        if name in FACTORS:
            continue
        stack, layer = _STACKED_NAMES.get(name.removesuffix(".weight")), f"model.layers.{index}"
        if index in drafts and family.family.recurrence == "linear_attention":
            layer = f"mtp.layers.{sorted(drafts, key=int).index(index)}"
        named = {_NAMES.get(name, name): tensor}
        if within in family.whole_names:
            named = {f"{layer}.{family.whole_names[within]}": tensor}
        elif match is not None and match[2] in family.expert_names and len(tensor.shape) == 3:
            stem = f"{layer}.{family.expert_names[match[2]]}.{match[3]}"
            named = {stem.format(number): one for number, one in enumerate(_matrices(tensor))}
        elif stack is not None and len(tensor.shape) == 3:
            named = {f"{stack}.{number}.weight": one for number, one in enumerate(_matrices(tensor))}
        elif match is not None and match[2] in family.layer_names:
            stem = f"{layer}.{family.layer_names[match[2]]}.{match[3]}"
            parts = _by_heads(tensor, file.metadata) if "{}" in stem else [tensor]
            named = {stem.format(letter): one for letter, one in zip("qkv", parts, strict=False)}
        elif name.startswith("blk.") and index in drafts:
            named = {f"{layer}.{_DRAFT_NAMES.get(within, within)}": tensor}
        found |= {_own_name(one, family.family): part for one, part in named.items()}
    return found


def _own_name(name: str, family: Family) -> str:
    for usual, own in family.renamed + _QWEN_DRAFTS:
        name = name.replace(usual, own)
    return name


def _matrices(tensor: GgufTensor) -> list[GgufTensor]:
    """Of a stack of them, each as a tensor."""
    count, *shape = tensor.shape
    size = tensor.size_bytes // max(1, count)  # of whole rows of blocks
    return [GgufTensor(tuple(shape), tensor.format, tensor.offset + number * size, size) for number in range(count)]


def _by_heads(tensor: GgufTensor, metadata: Mapping[str, Any]) -> list[GgufTensor]:
    """The rows of q, k and v, each as a tensor."""
    prefix, (rows, *inputs) = metadata["general.architecture"], tensor.shape
    counted = ("attention.head_count", "attention.head_count_kv")
    fields = {"general.architecture": prefix, **{name: metadata.get(f"{prefix}.{name}") for name in counted}}
    heads, kv_heads = (_count(fields, name) for name in counted)
    found, offset, row_bytes = list[GgufTensor](), tensor.offset, tensor.size_bytes // max(1, rows)
    for some in (heads, kv_heads, kv_heads):
        own = rows // (heads + 2 * kv_heads) * some
        found.append(GgufTensor((own, *inputs), tensor.format, offset, own * row_bytes))
        offset += own * row_bytes
    return found


def _shape(name: str, shape: tuple[int, ...], family: GgufFamily) -> tuple[int, ...]:
    """What Hugging Face's tensor has; a file leaves out dimensions of 1, or has more of them."""
    kind = (*name.split("."), "", "", "")[2]
    is_row = kind == "ffn_gate_inp_shexp" or (kind == "exp_probs_b" and family.model_type == "ernie4_5_moe")
    if is_row and len(shape) == 1:  # llama-quantize leaves out the dimension that the converter writes
        return 1, *shape
    if (kind == "ssm_conv1d" or name.endswith(".shortconv.conv.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (math.prod(shape),) if kind in ("ssm_a", "ssm_d", "ssm_norm") else shape


def _draft_layers(metadata: Mapping[str, Any]) -> set[str]:
    """Numbers of the layers that predict later tokens, which count among the others, behind them."""
    prefix = metadata["general.architecture"]
    end, count = (metadata.get(f"{prefix}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    if not (isinstance(end, int) and isinstance(count, int) and 0 <= count <= MOST_DRAFT_LAYERS and count < end):
        return set()  # config_of refuses it where it is not 0
    return {str(index) for index in range(end - count, end)}


def num_turned_heads(name: str, metadata: Mapping[str, Any]) -> int | None:
    """Heads of a tensor whose rows llama.cpp has reordered (rotary pairs side by side); None: it has not.

    Args:
        name: Hugging Face's.
    """
    family = find_family(metadata)
    if family is None or not family.are_heads_turned:
        return None
    prefix = metadata["general.architecture"]
    heads = metadata.get(f"{prefix}.attention.head_count")
    if ".q_proj." in name:
        return heads
    return _common(metadata.get(f"{prefix}.attention.head_count_kv", heads)) if ".k_proj." in name else None


def _common(value: Any) -> Any:
    """Of a field with a number for each layer, 0 where the layer has no such part; a list where they differ."""
    found = [one for one in value if one != 0] if isinstance(value, list) else []
    return found[0] if found and found.count(found[0]) == len(found) else value


def is_decay(name: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the tensor is a logarithm, of which GGUF stores the exponential, negated. name: Hugging Face's."""
    family = find_family(metadata)
    return family is not None and bool(family.whole_names) and name.endswith(".A_log")


def is_norm_shifted(name: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the tensor is a norm of offsets from 1, which GGUF stores with 1 added. name: Hugging Face's."""
    family = find_family(metadata)
    is_norm = "norm" in name.rpartition(".")[0].rpartition(".")[2] and not name.endswith("linear_attn.norm.weight")
    return family is not None and family.family.has_norm_offset and is_norm


def config_of(file: GgufFile, factors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    """The equivalent config.json.

    Args:
        factors: the numbers of those of FACTORS that the file has.

    Raises:
        UnsupportedModel: the architecture, or a field that would change the output, is not computed here.
        BadCheckpoint: a field or a tensor that every model has is missing.
    """
    prefix = file.metadata.get("general.architecture")
    fields = _Fields({key.removeprefix(f"{prefix}."): value for key, value in file.metadata.items()})
    if any(name in factors for name in LONG_FACTORS.values()):  # by which llama.cpp knows it
        fields["rope.scaling.type"] = "longrope"
    try:
        return _config_of(file, fields, factors)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        key = fields.last if fields.last in file.metadata else f"{prefix}.{fields.last}"
        is_there = key in file.metadata
        raise _bad(f"{key} is {file.metadata[key]!r}" if is_there else f"the metadata has no {key}") from error


class _Fields(UserDict[str, Any]):
    """Metadata, and which of it was read last: where a value is missing, or of a wrong type, an error names that."""

    last = ""

    def __getitem__(self, name: str) -> Any:
        self.last = name
        return super().__getitem__(name)


def _config_of(file: GgufFile, fields: _Fields, factors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    family = _family(file)
    head_dim, num_draft_layers = _head_dim(fields, family), len(_draft_layers(file.metadata))
    _refuse_output_changing(fields, family, head_dim, num_draft_layers)
    config = {
        "architectures": [family.family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(file),
        **{name: _common(fields[key]) for name, key in _NEEDED.items()},
        "intermediate_size": _common(fields.get("feed_forward_length")),
        "num_hidden_layers": _num_layers(file, fields) - num_draft_layers,
        "num_nextn_predict_layers": num_draft_layers,
        "num_key_value_heads": _common(fields.get("attention.head_count_kv", fields["attention.head_count"])),
        "head_dim": head_dim,
        "rope_theta": fields.get("rope.freq_base", 10_000.0),
        **_ropes(fields, family, factors, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        **family.constants,
        **{name: fields[key] for name, key in family.fields.items() if key in fields},
        **_family_fields(file, family, fields, head_dim),
    }
    if family.family.recurrence == "mamba" and fields["context_length"] == ARBITRARY_CONTEXT:
        config["default_context"] = USUAL_CONTEXT
    own = {usual: name for name, usual in family.family.aliases.items()}
    return {own.get(name, name): value for name, value in config.items() if value is not None}


def _head_dim(fields: Mapping[str, Any], family: GgufFamily) -> Any:
    """Phi-3 and GLM rotate a part of a head, and their files may leave out a head's size."""
    if family.family.has_partial_rope and "attention.key_length" not in fields:
        return _count(fields, "embedding_length") // _count(fields, "attention.head_count")
    return fields.get("attention.key_length", fields.get("rope.dimension_count"))


def _family_fields(
    file: GgufFile, family: GgufFamily, fields: Mapping[str, Any], head_dim: int | None
) -> dict[str, Any]:
    """Fields that an architecture derives from several keys."""
    num_layers = fields["block_count"]
    found: dict[str, Any] = {}
    if family.whole_width_layers is not None:
        per_head = _count(fields, "embedding_length") // _count(fields, "attention.head_count")
        found["query_pre_attn_scalar"] = per_head if family.whole_width_layers == num_layers else head_dim
    if family.model_type == "gemma3_text" and not fields.get("attention.sliding_window"):
        found |= {"sliding_window": None, "sliding_window_pattern": 1}  # every layer sees all
    pattern = "attention.sliding_window_pattern"
    if family is OLMO3 and isinstance(fields.get(pattern), list):
        found |= {"sliding_window_pattern": None, "layer_types": _layer_types(fields, pattern)}
    if family.model_type == "phi3":
        found["sliding_window"] = fields.get("attention.sliding_window") or None
    if family.family.has_partial_rope:
        found["partial_rotary_factor"] = _count(fields, "rope.dimension_count") / (head_dim or 1)
    if family.family.qk_norm_field:
        found[family.family.qk_norm_field] = "blk.0.attn_q_norm.weight" in file.tensors
    if family.family.qk_norm == "plain":  # as llama.cpp tells Maverick, which has none
        found[family.family.qk_norm_field] = _count(fields, "expert_count") != 128
    if family.family.recurrence == "mamba":
        found |= _space_fields(file, family, fields)
    if family.family.recurrence == "linear_attention":
        found["linear_value_head_dim"] = _count(fields, "ssm.inner_size") // _count(fields, "ssm.time_step_rank")
        if "attention.recurrent_layers" in fields:  # with those that predict later tokens
            kinds = _layer_types(fields, "attention.recurrent_layers", ("full_attention", "linear_attention"))
            found["layer_types"] = kinds[: num_layers - len(_draft_layers(file.metadata))]
    if family.family.recurrence == "conv":
        found["layer_types"] = _layer_types(fields, "attention.head_count_kv", ("conv", "full_attention"))
    if family.family.has_layer_inputs:
        found |= _layer_input_fields(file, family, fields)
    if family.family.has_latent:  # heads' sizes are plain lengths in files from before April 2025
        names = (f"attention.{name}_length" for name in ("key", "value"))
        key, value = (_count(fields, f"{name}_mla" if f"{name}_mla" in fields else name) for name in names)
        own = {"qk_nope_head_dim": key - _count(fields, "rope.dimension_count"), "v_head_dim": value}
        found |= {**own, "n_routed_experts": _count(fields, "expert_count")}
    biased = {"qkv": "attn_q", "output": "attn_output", "mlp": "ffn_down", "recurrence": "shortconv.conv"}
    for name, parts in family.family.biases.items():
        if name and parts:
            stored = (biased[parts[-1]], _QKV) if parts == ("qkv",) else (biased[parts[-1]],)
            found[name] = any(f"blk.0.{one}.bias" in file.tensors for one in stored)
    return found


def _space_fields(file: GgufFile, family: GgufFamily, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of models with state spaces, whose layers differ in what they have."""

    def of_layers(name: str) -> list[Any]:
        value, num_layers = fields.get(name), fields["block_count"]
        num_own = num_layers - len(_draft_layers(file.metadata))
        if isinstance(value, list) and len(value) != num_layers:
            raise _bad(f"{name} has {len(value)} numbers for {num_layers} layers")
        return value[:num_own] if isinstance(value, list) else [value] * num_own

    ends = {"proj_bias": ".ssm_in.bias", "conv_bias": ".ssm_conv1d.bias", "rms_norm": ".ssm_norm.weight"}
    there = {own: any(name.endswith(end) for name in file.tensors) for own, end in ends.items()}
    found: dict[str, Any] = {f"mamba_{own}": is_there for own, is_there in there.items()}
    found["mamba_d_head"] = _count(fields, "ssm.inner_size") // _count(fields, "ssm.time_step_rank")
    if family.family.has_parallel_mixers:
        return found
    attending, mlps = of_layers("attention.head_count_kv"), of_layers("feed_forward_length")
    if family.family.is_of_blocks:
        mlp = "moe" if fields.get("expert_count") else "mlp"
        layers = zip(attending, mlps, strict=True)
        kinds = ["full_attention" if kv else mlp if inner else "linear_attention" for kv, inner in layers]
        return {**found, "layer_types": kinds}
    kinds = ["full_attention" if num_kv_heads else "linear_attention" for num_kv_heads in attending]
    kind = "rope" if fields.get("rope.scaling.finetuned") else "nope"
    own = {"num_local_experts": fields.get("expert_count", 0), "position_embedding_type": kind}
    return {**found, **own, "layer_types": kinds}


def _layer_input_fields(file: GgufFile, family: GgufFamily, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of Gemma 3n and 4, whose layers differ."""
    num_layers, embedding = _num_layers(file, fields), file.tensors.get("per_layer_token_embd.weight")
    found: dict[str, Any] = {"sliding_window_pattern": None, "hidden_size_per_layer_input": 0}
    if embedding is not None:
        found["hidden_size_per_layer_input"] = _count(fields, "embedding_length_per_layer_input")
        found["vocab_size_per_layer_input"] = embedding.shape[0]
    found["layer_types"] = _layer_types(fields, "attention.sliding_window_pattern")
    windowed = fields["attention.sliding_window_pattern"]
    if family.family.has_streams:
        left, scales = file.tensors.get("blk.0.laurel_l.weight"), fields["activation_sparsity_scale"]
        found["laurel_rank"] = 0 if left is None else left.shape[0]
        return {**found, "activation_sparsity_pattern": [(1 + math.erf(one / math.sqrt(2))) / 2 for one in scales]}
    widths, heads = fields["feed_forward_length"], fields.get("attention.head_count_kv")
    if isinstance(widths, list) and widths:
        found |= {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0]}
    own: dict[str, Any] = {"head_dim": _count(fields, "attention.key_length")}
    if isinstance(heads, list) and len(heads) == num_layers:
        of_windows = [count for count, has_window in zip(heads, windowed, strict=True) if has_window]
        found["num_key_value_heads"] = (of_windows or heads)[0]
        own["num_key_value_heads"] = next((count for count in heads if count != found["num_key_value_heads"]), heads[0])
    whole = [index for index, has_window in enumerate(windowed) if not has_window]
    found["per_layer_config"] = {str(index): own for index in whole}
    has_own = range(num_layers - fields.get("attention.shared_kv_layers", 0))
    lacks = [index for index in whole if index in has_own and f"blk.{index}.attn_v.weight" not in file.tensors]
    return {**found, "attention_k_eq_v": bool(lacks), "enable_moe_block": bool(fields.get("expert_count"))}


def _layer_types(fields: Mapping[str, Any], name: str, kinds: Sequence[str] = LAYER_TYPES) -> list[str]:
    listed, num_layers = fields.get(name), fields["block_count"]
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise _bad(f"{name} is {listed!r}, not of {num_layers} layers")
    return [kinds[bool(one)] for one in listed]


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent generation_config.json: the file's recommended sampling, if any."""
    return {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}


def _family(file: GgufFile) -> GgufFamily:
    family, name = find_family(file.metadata), file.metadata.get("general.architecture")
    if family is None:
        known = f"{', '.join(GGUF_FAMILIES)}, with or without experts in llama"
        raise UnsupportedModel(f"GGUF architecture {name!r} is not supported.", f"use a model of one of: {known}.")
    if name == "granitehybrid" and f"{name}.attention.scale" not in file.metadata:
        raise UnsupportedModel("GGUF files of Bamba are not supported.", "use the model's safetensors.")
    return family


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _bad("token_embd.weight is missing")
    return embedding.shape[0]


def _num_layers(file: GgufFile, fields: Mapping[str, Any]) -> int:
    """Checked against the number of tensors, so that the file bounds whatever is made per layer."""
    num_layers = fields["block_count"]
    if not isinstance(num_layers, int) or num_layers > len(file.tensors):
        raise _bad(f"{fields['general.architecture']}.block_count is {num_layers!r}, of {len(file.tensors)} tensors")
    return num_layers


def _refuse_output_changing(
    fields: Mapping[str, Any], family: GgufFamily, key_length: int | None, num_draft_layers: int
) -> None:
    """Refuse values of optional fields that would change the computation."""
    experts, factor = family.family.experts, fields.get("rope.scaling.factor", 1)
    # What yarn comes to anyway; OLMo 3's files have it, and llama.cpp computes it without reading it
    growth = 0.1 * math.log(factor) + 1 if isinstance(factor, float) and factor > 1 else 1.0
    holds: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(_ZERO, lambda value: value == 0),
        **dict.fromkeys(_ZERO_OR_ONE, lambda value: value in (0, 1)),
        "rope.scaling.type": lambda value: (
            value in ("none", "linear", "yarn") or (value == "longrope" and family.model_type == "phi3")
        ),
        "rope.scaling.yarn_ext_factor": lambda value: value == 1,
        "rope.scaling.yarn_attn_factor": lambda value: value == 1 or math.isclose(value, growth, rel_tol=_TOLERANCE),
        "rope.dimension_count": lambda value: (
            value == key_length or family.family.has_partial_rope or family.family.rotates == "none"
        ),
        "nextn_predict_layers": lambda value: value == num_draft_layers,
        "attention.value_length": lambda value: value == key_length,
        "attention.sliding_window_pattern": lambda value: not value,
        "expert_gating_func": lambda value: experts is None or value in (0, SCORINGS.index(experts.scoring) + 1),
        "attention.causal": bool,
        "attention.sliding_window": lambda value: value == 0 and not family.family.has_chunks,  # 0: none has chunks
        "use_parallel_residual": lambda value: not value,
        "rope.scaling.attn_factor": lambda value: value == 1 or fields.get("rope.scaling.type") == "longrope",
    }
    for name, is_neutral in holds.items():
        if name in fields and name not in family.fields.values() and not is_neutral(fields[name]):
            raise UnsupportedModel(
                f"{fields['general.architecture']}.{name}={fields[name]!r} is not supported.", "use a model without it."
            )


def _ropes(
    fields: Mapping[str, Any], family: GgufFamily, given: Mapping[str, tuple[float, ...]], head_dim: int | None
) -> dict[str, Any]:
    """Gemma 4's layers without a window turn the first pairs of a head; the others' frequencies are next to 0."""
    if family.model_type != "gemma4_text":
        scaling = _rope_scaling(fields, given, head_dim)
        if scaling is not None and family.model_type == "gpt_oss":
            scaling["truncate"] = False  # as its config.json has it
        if family.family.has_query_scale:
            own = {name: fields[key] for name, key in family.fields.items() if key in fields}
            scaling = {"rope_type": "default", **(scaling or {}), "mscale": 1.0, **own}
        growth = fields.get(_YARN_GROWTH)
        if family.family.has_latent and scaling is not None and isinstance(growth, float):
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(growth / 0.1, 6))  # where both are the same
        return {"rope_scaling": scaling}
    factors = given.get(ROPE_FACTORS)
    turning = sum(factor == 1 for factor in factors or ())
    if factors is not None and (factors[:turning] != (1.0,) * turning or min(factors[turning:], default=NEVER) < NEVER):
        raise UnsupportedModel(f"GGUF: {ROPE_FACTORS} is not Gemma 4's.", "use the model's safetensors.")
    whole = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 1e6)}
    if factors:
        whole |= {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
    windowed = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 1e4)}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": windowed}}


def _rope_scaling(
    fields: Mapping[str, Any], given: Mapping[str, tuple[float, ...]], head_dim: int | None
) -> dict[str, Any] | None:
    factors = given.get(ROPE_FACTORS)
    if factors is not None:
        theta = fields.get("rope.freq_base", 10_000.0)
        if not isinstance(theta, float) or not 0 < theta < math.inf or not 0 < factors[-1] < math.inf:
            raise _bad(f"{ROPE_FACTORS} ends in {factors[-1]!r}, rope.freq_base is {theta!r}")
        return _llama3_scaling(factors, theta, head_dim)
    # llama.cpp's load_hparams: a factor without a type means linear; scale_linear is its older name
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    kind = fields.get("rope.scaling.type", None if factor is None else "linear")
    if kind == "longrope":
        own = {name: list(given[tensor]) for name, tensor in LONG_FACTORS.items() if tensor in given}
        return {"rope_type": kind, "attention_factor": fields.get("rope.scaling.attn_factor", 1.0), **own}
    if kind == "yarn":
        names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        found = {name: fields[f"rope.scaling.{key}"] for name, key in names.items()}
        betas = {name: fields.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {"rope_type": "yarn", **found, **{name: value for name, value in betas.items() if value is not None}}
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields["rope.scaling.factor"] if factor is None else factor}
    return None


def _llama3_scaling(factors: tuple[float, ...], theta: float, head_dim: int | None) -> dict[str, Any]:
    """Llama 3's scaling parameters, checked against every factor."""
    width = 2 * len(factors)
    for high in (4.0, 1.0) if head_dim in (width, None) else ():  # the second is Llama 4 Scout's
        expected = [_llama3_factor(theta ** (2 * index / width), factors[-1], high) for index in range(len(factors))]
        if all(map(lambda one, other: math.isclose(one, other, rel_tol=_TOLERANCE), expected, factors)):
            return {"rope_type": "llama3", "factor": factors[-1], "high_freq_factor": high, **_LLAMA3}
    raise UnsupportedModel(f"GGUF: {ROPE_FACTORS} is not Llama 3's scaling.", "use a model without it.")


def _llama3_factor(tokens_per_radian: float, factor: float, high: float) -> float:
    """The divisor of a frequency. Source: Llama 3.1's reference code, apply_scaling."""
    low = _LLAMA3["low_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * tokens_per_radian)
    kept = min(max((turns - low) / max(high - low, 1e-30), 0.0), 1.0)
    return 1 / ((1 - kept) / factor + kept)


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or value < 1:
        raise _bad(f"{fields['general.architecture']}.{name} is {value!r}, which counts nothing")
    return value


def _bad(cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"The GGUF file is not complete: {cause}.", "download it again, or name another.")
