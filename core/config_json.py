"""What a model's config.json says, as a ModelConfig: understood completely, or refused. Any thread.

A field that would change the output and is not computed here is an error that names it. Families are data
(families.py); transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`.

A token's rotary angle must be a function of its position alone, so that what was computed for it stays right as its
sequence grows. transformers has two kinds that choose their frequencies by the length of the whole sequence, anew at
every step. They are served as far as a fixed choice agrees with them: "dynamic" as the plain embedding up to
max_position_embeddings, "longrope" with its short factors up to original_max_position_embeddings, where the context
then ends, or, where the operator asks for a longer one, with its long factors for all sequences.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.config import LatentConfig, LayerInputs, ModelConfig, RopeConfig, StreamsConfig
from core.config_fields import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    Traits,
    bad_field,
    count,
    floats,
    optional_float,
    positive_float,
    positive_int,
    read_bool,
    token_ids,
    unsupported_field,
)
from core.config_layers import (
    LAYER_TYPES,
    OLDER_TYPES,
    expert_fields,
    is_mxfp4,
    layer_widths,
    parse_experts,
    parse_layers,
    parse_recurrence,
)
from core.errors import UnsupportedModel
from core.families import FAMILIES, SYNONYMS, TEXT_TOWERS
from core.prequantized import parse_packing

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of Nemotron-H's patterns
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
DEFAULT_POSITIONS = 2048  # of families without a default of their own: transformers' LlamaConfig

# Fields that change the output, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "per_layer_config": (None,),
}

# Ends of architectures without a head that generates
SCORING, HEADLESS = "ForSequenceClassification", "Model"
MAX_SCORES = 1024

# Of a model of texts and images, where text_config does not have them
_SHARED_FIELDS = "quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"


def parse_model_config(config: Mapping[str, Any], context: int | None = None) -> ModelConfig:
    """Parse a model's config.json.

    Args:
        context: tokens that sequences may have; None: as many as the model is served for by default. Longrope has long
            factors where it is more than the original context.

    Raises:
        UnsupportedModel: the architecture, or a field that would change the output, is not computed here.
        BadCheckpoint: a field is missing, of the wrong type, or contradicts another.
    """
    config = stated_fields(config)
    family = _family(config)
    name = architecture_of(config)
    _refuse_output_changing_fields(config, family)
    sizes = _sizes(config, family)
    max_position = positive_int(config, "max_position_embeddings", DEFAULT_POSITIONS)
    latent = sizes["latent"]
    rope_head_dim = sizes["head_dim"] if latent is None else latent.rope_dim
    rope, local_rope = _ropes(config, family, max_position, rope_head_dim, context)
    biased = {part for name, parts in family.biases.items() if not name or read_bool(config, name) for part in parts}
    layers = parse_layers(config, family, sizes["num_layers"], rope, local_rope)
    is_recurrent = any(layer.is_recurrent for layer in layers)
    return ModelConfig(
        architecture=family.architecture,
        **sizes,
        max_position=_served_positions(config, rope, max_position, context),
        rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        layers=layers,
        qkv_bias="qkv" in biased,
        output_bias="output" in biased,
        mlp_bias="mlp" in biased,
        **_traits(config, family),
        experts=parse_experts(config, family),
        recurrence=parse_recurrence(config, family, "recurrence" in biased) if is_recurrent else None,
        inputs=_layer_inputs(config, family),
        streams=_streams(config, family),
        activation=_activation(config, family),
        **_scales(config, family, latent),
        tie_embeddings=read_bool(config, "tie_word_embeddings") or _generating(name) != name,
        num_scores=num_scores_of(config),
        packing=None if is_mxfp4(config, family) else parse_packing(config),
        num_draft_layers=count(config, "num_nextn_predict_layers"),
        dtype=_dtype(config),
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=token_ids(config, "eos_token_id"),
    )


def _traits(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    traits = {trait.name: getattr(family, trait.name) for trait in dataclasses.fields(Traits)}
    if family.qk_norm_field and not read_bool(config, family.qk_norm_field):
        traits["qk_norm"] = "none"
    return traits


def stated_context(config: Mapping[str, Any]) -> int:
    """Tokens of context by config.json, or its family's default; fewer may be served.

    Raises:
        UnsupportedModel, BadCheckpoint: as parse_model_config.
    """
    return positive_int(stated_fields(config), "max_position_embeddings", DEFAULT_POSITIONS)


def stated_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields in config.json, with its family's defaults.

    Raises:
        UnsupportedModel, BadCheckpoint: as parse_model_config.
    """
    config = text_config(config)
    family = _family(config)
    return _renamed({**family.defaults, **config}, family)


def _renamed(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """With the usual names of what the family calls otherwise."""
    aliases = {usual: config[own] for own, usual in family.aliases.items() if config.get(own) is not None}
    config = {**config, **aliases}
    if not family.is_of_blocks:
        return config
    pattern, blocks = config.get("hybrid_override_pattern"), config.get("layer_types")
    if blocks is None and isinstance(pattern, str) and set(pattern) <= set(BLOCKS):
        blocks = [BLOCKS[letter] for letter in pattern]
    if not isinstance(blocks, list):
        raise bad_field(f"layers_block_type={blocks!r} and hybrid_override_pattern={pattern!r} name no layers.")
    blocks = [OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in blocks]
    return {**config, "layer_types": blocks, "num_hidden_layers": len(blocks)}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json as if its language model were the whole; see TextTower.

    Raises:
        UnsupportedModel: the language model is not computed here.
    """
    names = config.get("architectures") or [config.get("model_type")]
    named = names[0] if isinstance(names, list) else None
    tower = next((tower for name, tower in TEXT_TOWERS.items() if named in (name, tower.model_type)), None)
    if tower is None:
        return config
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else {**config, "model_type": tower.texts[0]}
    model_type = text.get("model_type", tower.texts[0])
    if model_type not in tower.texts:
        raise unsupported_field("text_config.model_type", model_type, tower.texts)
    shared = {name: config[name] for name in _SHARED_FIELDS if config.get(name) is not None}
    ties = config.get("tie_word_embeddings")  # the whole model's goes before its part's
    ties = text.get("tie_word_embeddings", tower.ties_embeddings) if ties is None else ties
    return {**shared, **text, "tie_word_embeddings": ties, "model_type": model_type, "architectures": None}


def _sizes(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    hidden_size = positive_int(config, "hidden_size", at_most=MAX_WIDTH)
    num_heads = positive_int(config, "num_attention_heads", at_most=MAX_WIDTH)
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise bad_field(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}.")
    latent = _latent(config) if family.has_latent else None
    head_dim = positive_int(config, "head_dim", family.defaults.get("head_dim") or hidden_size // num_heads)
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    if head_dim % 2:
        raise bad_field(f"head_dim={head_dim} is odd: RoPE turns pairs.")
    if num_heads * head_dim > MAX_WIDTH:
        raise bad_field(f"num_attention_heads={num_heads} of head_dim={head_dim} are more than any model has.")
    return {
        "vocab_size": positive_int(config, "vocab_size", at_most=MAX_WIDTH),
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(config, family),
        "num_layers": positive_int(config, "num_hidden_layers", at_most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "latent": latent,
    }


def _intermediate_size(config: Mapping[str, Any], family: Family) -> int:
    """LFM2's MLP has two thirds of it, times a factor, rounded up; Granite 4's is the shared expert's."""
    if family.experts is not None and expert_fields(config, family) is None:
        return positive_int(config, family.experts.shared_width, at_most=MAX_WIDTH)
    if isinstance(config.get("intermediate_size"), list) and family.has_streams:
        return layer_widths(config, positive_int(config, "num_hidden_layers"))[0]
    if "intermediate_size_mlp" in family.defaults:  # Llama 4's dense layers
        return positive_int(config, "intermediate_size_mlp", at_most=MAX_WIDTH)
    size = positive_int(config, "intermediate_size", at_most=MAX_WIDTH)
    if "block_auto_adjust_ff_dim" not in family.defaults or not read_bool(config, "block_auto_adjust_ff_dim"):
        return size
    size, multiple = int(2 * size / 3), positive_int(config, "block_multiple_of", at_most=MAX_WIDTH)
    size = int(positive_float(config, "block_ffn_dim_multiplier", 1.0) * size)
    return -(-size // multiple) * multiple


def _factors(config: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Falcon-H1's, of matrices in place of what they are multiplied by, as llama.cpp's converter has them."""
    before = positive_float(config, "attention_in_multiplier", 1.0)
    gate, down = floats(config, "mlp_multipliers", 2)
    found = {
        "self_attn.q_proj.weight": before,
        "self_attn.k_proj.weight": before * positive_float(config, "key_multiplier", 1.0),
        "self_attn.v_proj.weight": before,
        "self_attn.o_proj.weight": positive_float(config, "attention_out_multiplier", 1.0),
        "mamba.out_proj.weight": positive_float(config, "ssm_out_multiplier", 1.0),
        "mlp.gate_proj.weight": gate,
        "mlp.down_proj.weight": down,
    }
    return tuple((name, factor) for name, factor in found.items() if factor != 1)


def _layer_inputs(config: Mapping[str, Any], family: Family) -> LayerInputs | None:
    """Gemma 4's larger models have none."""
    if not family.has_layer_inputs or config.get("hidden_size_per_layer_input") == 0:
        return None
    names = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
    return LayerInputs(*(positive_int(config, name, at_most=MAX_WIDTH) for name in names))


def _streams(config: Mapping[str, Any], family: Family) -> StreamsConfig | None:
    if not family.has_streams:
        return None
    num_streams, active = (
        positive_int(config, "altup_num_inputs", at_most=MAX_LAYERS),
        count(config, "altup_active_idx"),
    )
    if active >= num_streams:
        raise bad_field(f"altup_active_idx={active} is none of altup_num_inputs={num_streams}.")
    rank = positive_int(config, "laurel_rank", at_most=MAX_WIDTH)
    return StreamsConfig(num_streams, active, rank, read_bool(config, "altup_correct_scale", True))


def _latent(config: Mapping[str, Any]) -> LatentConfig:
    rank, rope_dim = (positive_int(config, name, at_most=MAX_WIDTH) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if rank % 2 or rope_dim % 2:
        raise bad_field(f"kv_lora_rank={rank} or qk_rope_head_dim={rope_dim} is odd: RoPE turns pairs.")
    plain_dim, value_dim = (positive_int(config, f"{name}_head_dim", at_most=MAX_WIDTH) for name in ("qk_nope", "v"))
    return LatentConfig(rank, count(config, "q_lora_rank"), plain_dim, rope_dim, value_dim)


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type")]
    if not isinstance(names, list):
        raise bad_field(f"architectures={names!r} is not a list.")
    architecture, model_type = (
        SYNONYMS.get(str(name), name) for name in (_generating(names[0]), config.get("model_type"))
    )
    for family in FAMILIES:
        if architecture in (family.architecture, family.model_type):
            if model_type not in (family.model_type, None):  # by which transformers computes
                raise bad_field(f"model_type={config['model_type']!r} contradicts architectures={names!r}.")
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(f"Architecture {names[0]!r} is not supported.", f"use a model of one of: {supported}.")


def _generating(architecture: str | None) -> str | None:
    """The name of the architecture with a head that generates, whichever head it has."""
    ends = {SCORING: "ForCausalLM", f"Text{HEADLESS}": "ForConditionalGeneration", HEADLESS: "ForCausalLM"}
    for end, own in ends.items():
        if architecture is not None and architecture.endswith(end):
            return architecture.removesuffix(end) + own
    return architecture


def architecture_of(config: Mapping[str, Any]) -> str:
    """Its name by config.json; "" where it has none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def num_scores_of(config: Mapping[str, Any]) -> int:
    """What a classification head tells of a prompt; 0: it has none."""
    if not architecture_of(config).endswith(SCORING):
        return 0
    labels = config.get("id2label")
    return positive_int(config, "num_labels", len(labels) if isinstance(labels, Mapping) else 2, at_most=MAX_SCORES)


def _refuse_output_changing_fields(config: Mapping[str, Any], family: Family) -> None:
    neutral = {name: values for name, values in _NEUTRAL.items() if name not in family.biases}
    if family.has_partial_rope:
        del neutral["partial_rotary_factor"]
    neutral |= family.neutral
    if "global_head_dim" in family.defaults:
        del neutral["per_layer_config"]
    if family.windows == "none":
        neutral["use_sliding_window"] = (False, None)
    for name, values in neutral.items():
        if config.get(name) not in values:
            raise unsupported_field(name, config[name], values)


def _activation(config: Mapping[str, Any], family: Family) -> str:
    if family.activation is not None:
        return family.activation
    name = config.get(family.activation_field) or family.defaults.get(family.activation_field, "silu")
    if name not in ACTIVATIONS:
        raise unsupported_field(family.activation_field, name, ACTIVATIONS)
    return str(name)


def _scales(config: Mapping[str, Any], family: Family, latent: LatentConfig | None) -> dict[str, Any]:
    """Factors and caps of Granite, Falcon-H1, Gemma and DeepSeek; other families have none of these fields."""
    if latent is not None:
        growth = _yarn_growth(_rope_fields(config))
        return {"attention_scale": (latent.plain_dim + latent.rope_dim) ** -0.5 * growth**2}
    if family.has_factors:
        return {
            "embedding_scale": positive_float(config, "embedding_multiplier", 1.0),
            "logits_scale": positive_float(config, "lm_head_multiplier", 1.0),
            "factors": _factors(config),
            "has_unknown_factors": read_bool(config, "multipliers_in_matrices"),
        }
    if family.model_type in ("granite", "granitemoehybrid", "granitehybrid"):
        return {
            "attention_scale": positive_float(config, "attention_multiplier"),
            "embedding_scale": positive_float(config, "embedding_multiplier", 1.0),
            "residual_scale": positive_float(config, "residual_multiplier", 1.0),
            "logits_scale": 1 / positive_float(config, "logits_scaling", 1.0),
        }
    scales: dict[str, Any] = {}
    if family.has_layer_inputs:
        scales |= {"attention_scale": 1.0, "logits_cap": optional_float(config, "final_logit_softcapping")}
    if family.has_scaled_embedding:
        scales["embedding_scale"] = positive_int(config, "hidden_size") ** 0.5
    if "query_pre_attn_scalar" in family.defaults:
        scales |= {
            "attention_scale": positive_float(config, "query_pre_attn_scalar") ** -0.5,
            "attention_cap": optional_float(config, "attn_logit_softcapping"),
            "logits_cap": optional_float(config, "final_logit_softcapping"),
        }
    return scales


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the two spellings the older takes precedence, as in transformers."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise bad_field(f"the rope configuration is not an object: {given!r}.")
    return given


def _ropes(
    config: Mapping[str, Any], family: Family, max_position: int, head_dim: int, context: int | None
) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without a window, and of those with one; transformers 5 nests them by layer type."""
    given = _rope_fields(config)
    is_nested = any(isinstance(value, Mapping) for value in given.values())
    if is_nested and not family.has_local_rope:
        raise unsupported_field("rope_parameters", sorted(given), ("one configuration for all layers",))
    beside = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}

    def parse(part: Mapping[str, Any]) -> RopeConfig:
        merged = {"rope_theta": 10_000.0, **beside, **part}
        neutral = _NEUTRAL["partial_rotary_factor"]
        is_partial = family.has_partial_rope or merged.get("rope_type") == "proportional"
        if not is_partial and merged.get("partial_rotary_factor") not in neutral:
            raise unsupported_field("partial_rotary_factor", merged["partial_rotary_factor"], (1.0,))
        if family.has_mrope and merged.get("rope_type", merged.get("type")) == "mrope":
            merged["rope_type"] = "default"
        return _rope(config, merged, family, max_position, head_dim, context)

    if not family.has_local_rope:
        return parse(given), parse(given)
    full, local = (given.get(name) or {} for name in LAYER_TYPES) if is_nested else (given, {})
    theta = config.get("rope_local_base_freq", config.get("rope_theta", 10_000.0))
    return parse(full), parse({"rope_theta": theta, **local})


def _served_positions(config: Mapping[str, Any], rope: RopeConfig, max_position: int, context: int | None) -> int:
    """Yarn stretches the original context it names; longrope's short factors are for the original one."""
    if rope.kind == "yarn" and "original_max_position_embeddings" in {**config, **_rope_fields(config)}:
        return max(max_position, int(min(rope.original_max_position * rope.factor, MAX_COUNT)))
    if rope.kind == "longrope" and not _is_long(rope, context):
        return min(max_position, rope.original_max_position)
    if context is None and "default_context" in config:  # of GGUF files that do not say what the model has
        return positive_int(config, "default_context", at_most=max_position)
    return max_position


def _is_long(rope: RopeConfig, context: int | None) -> bool:
    return context is not None and context > rope.original_max_position


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype", config.get("torch_dtype"))  # torch_dtype: before transformers 5
    return name if isinstance(name, str) else None


def _rope(
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    family: Family,
    max_position: int,
    head_dim: int,
    context: int | None,
) -> RopeConfig:
    """Parse one rope configuration, in the spelling of transformers 5 or an earlier one.

    Args:
        config: the whole config.json, for fields beside it.
        given: rope_theta and its scaling.
        context: see parse_model_config.
    Source: transformers 5, modeling_rope_utils.py.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    if family.model_type == "phi3" and kind in ("su", "yarn"):  # it was called so at first
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise unsupported_field("rope_type", kind, ROPE_KINDS)
    growth = positive_float(given, "llama_4_scaling_beta") if given.get("llama_4_scaling_beta") else 0.0
    if family.has_query_scale and growth and kind != "yarn":
        raise unsupported_field("llama_4_scaling_beta", growth, (None,))
    theta = positive_float(given, "rope_theta")
    partial = positive_float(given, "partial_rotary_factor", 1.0)
    if kind == "proportional" and partial <= 1:
        return RopeConfig(theta, kind, factor=positive_float(given, "factor", 1.0), turning=partial)
    if partial > 1 or int(head_dim * partial) % 2 or int(head_dim * partial) == 0:
        raise bad_field(f"partial_rotary_factor={partial} of head_dim={head_dim} is not a number of pairs.")
    rope = RopeConfig(theta, partial=partial)
    if kind in ("default", "dynamic"):
        return rope
    if kind == "linear":
        return replace(rope, kind=kind, factor=positive_float(given, "factor"))
    beside = config.get("original_max_position_embeddings")  # Phi-3's place for it, which takes precedence
    merged = given if beside is None else {**given, "original_max_position_embeddings": beside}
    original = positive_int(merged, "original_max_position_embeddings", max_position)
    rope = replace(rope, kind=kind, original_max_position=original)
    if kind == "llama3":
        return _llama3(merged, rope)
    rope = replace(rope, factor=positive_float(merged, "factor", max_position / original))
    if kind == "yarn":
        return replace(_yarn(merged, rope), query_growth=growth if family.has_query_scale else 0.0)
    return _longrope(merged, rope, rope.rotary_dim(head_dim) // 2, "long" if _is_long(rope, context) else "short")


def _llama3(given: Mapping[str, Any], rope: RopeConfig) -> RopeConfig:
    low, high = positive_float(given, "low_freq_factor"), positive_float(given, "high_freq_factor")
    if low > high:
        raise bad_field(f"rope: low_freq_factor={low} is above high_freq_factor={high}.")
    return replace(rope, factor=positive_float(given, "factor"), low_freq_factor=low, high_freq_factor=high)


def _yarn_growth(given: Mapping[str, Any]) -> float:
    """What latent attention multiplies queries and keys by, each, beside attention_factor."""
    if given.get("rope_type", given.get("type", "default")) == "default" or not given.get("mscale_all_dim"):
        return 1.0
    factor = positive_float(given, "factor")
    return 0.1 * positive_float(given, "mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn(given: Mapping[str, Any], rope: RopeConfig) -> RopeConfig:
    """Source: YaRN (arXiv:2309.00071), section 3.4 for the attention factor."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = magnitude(positive_float(given, "mscale"))
        attention_factor /= magnitude(positive_float(given, "mscale_all_dim"))
    fast, slow = positive_float(given, "beta_fast", 32.0), positive_float(given, "beta_slow", 1.0)
    if fast < slow:
        raise bad_field(f"rope: beta_fast={fast} is below beta_slow={slow}.")
    return replace(
        rope,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=read_bool(given, "truncate", True),
        attention_factor=positive_float(given, "attention_factor", attention_factor),
    )


def _longrope(given: Mapping[str, Any], rope: RopeConfig, num_factors: int, kind: str) -> RopeConfig:
    """kind: "short" or "long". Source: LongRoPE (arXiv:2402.13753)."""
    name, factor, original = f"{kind}_factor", rope.factor, rope.original_max_position
    factors = given.get(name)
    if not isinstance(factors, list) or len(factors) != num_factors:
        raise bad_field(f"rope: {name} is not a list of {num_factors} numbers.")
    of_pairs = tuple(positive_float({name: number}, name) for number in factors)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return replace(rope, factors=of_pairs, attention_factor=positive_float(given, "attention_factor", attention_factor))
