"""What the engine is asked to be, and what a model is: frozen, validated once, at start. Any thread.

A model's config.json is understood completely or refused: a field that would change the output and is not computed
here is an error that names it. Families are data (families.py); transformers 5 writes `rope_parameters`, earlier ones
`rope_theta` and `rope_scaling` (rope_config.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config_fields import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_WIDTH,
    bad_field,
    positive_float,
    positive_int,
    read_bool,
    token_ids,
    unsupported_field,
)
from core.errors import UnsupportedModel
from core.families import FAMILIES, Family
from core.fp8_config import Fp8Config, parse_fp8
from core.layer_config import LAYER_TYPES, is_mxfp4, parse_experts, parse_layers
from core.layer_config import ExpertsConfig as ExpertsConfig
from core.layer_config import LayerConfig as LayerConfig
from core.packed_config import PackedConfig, parse_packed, refuse_other_methods
from core.rope_config import RopeConfig as RopeConfig
from core.rope_config import parse_rope

BLOCK_SIZE = 16  # tokens per KV block
INTER_TOKEN_TARGET = 1.6  # of EngineConfig
QUANTIZE_SCHEMES = ("int8", "fp8", "int4")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
DEFAULT_POSITIONS = 2048  # of families that name no other: transformers' LlamaConfig

# Fields that change the output, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the operator asks of the engine; None leaves the choice to measurement at start.

    Args:
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_model_len: tokens of context per sequence, at most the model's own.
        kv_memory_bytes: for KV blocks.
        max_batch_tokens: computed in one step.
        max_sequences: that run at once.
        threads: compute threads on a CPU.
        quantize: the layers' matrices to one of QUANTIZE_SCHEMES while they load; None: as they are.
        quantize_cache_bytes: how much of what was quantised is kept on disk; 0: nothing.
        has_prefix_cache: requests use the keys and values that earlier ones have left.
        inter_token_target: how many times what its decodes alone would take a step with prompts in it may take, by
            the step-cost model, unless the prompts came together with all that decode (core/burst.py); None: as long
            as max_batch_tokens makes it.
        overlap: "on": the next step is sent before the tokens of this one are read; "off"; "auto": on a GPU.
        tensor_parallel: devices of this machine that compute the model together.
        graphs: "on": steps are captured as CUDA graphs, at start; "lazy": when one is needed; "off"; "auto": at start,
            on a GPU. Where they cannot be, steps are sent without.
        kv_offload_bytes: of host memory for KV blocks that give way to others; 0: they are forgotten.
        kv_offload_dir: where these are kept for the next process; None: nowhere.
        kv_offload_dir_bytes: of files in it; None: all that lies in kv_offload_bytes.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    threads: int | None = None
    quantize: str | None = None
    quantize_cache_bytes: int = 0
    has_prefix_cache: bool = True
    inter_token_target: float | None = INTER_TOKEN_TARGET
    overlap: str = "auto"
    tensor_parallel: int = 1
    graphs: str = "auto"
    kv_offload_bytes: int = 0
    kv_offload_dir: str | None = None
    kv_offload_dir_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, grouped-query attention with RoPE, a gated MLP.

    Args:
        max_position: tokens of context the model was made for, or that are computed exactly: see rope_config.
        layers: num_layers of them; empty: all have rope and no window.
        has_fused_weights: how the checkpoint holds q, k, v, and gate and up.
        attention_scale: what scores are multiplied by; None: 1 / sqrt(head_dim).
        attention_cap, logits_cap: scores, and logits, are cap * tanh(value / cap).
        embedding_scale, residual_scale, logits_scale: what embeddings, what each block adds, and logits are
            multiplied by.
        packed, fp8: how the checkpoint's matrices are quantised; both None: they are floats (or mxfp4, see experts).
        dtype: of the checkpoint, e.g. "bfloat16"; None when config.json does not say.
        eos_token_ids: from config.json (generation_config.json may name more).

    The other fields are as Family says.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerConfig, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"
    has_pre_norm: bool = True
    has_post_norm: bool = False
    has_norm_offset: bool = False
    has_sinks: bool = False
    has_fused_weights: bool = False
    experts: ExpertsConfig | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tie_embeddings: bool = False
    packed: PackedConfig | None = None
    fp8: Fp8Config | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def layer(self, index: int) -> LayerConfig:
        return self.layers[index] if self.layers else LayerConfig(self.rope)

    @property
    def packing(self) -> PackedConfig | Fp8Config | None:
        """How the checkpoint's matrices are quantised."""
        return self.packed or self.fp8

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers."""
        return tuple(dict.fromkeys(self.layer(index).window for index in range(self.num_layers)))

    @property
    def query_size(self) -> int:
        """Width of q: all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of k, and of v: all KV heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Counted once where embeddings are tied."""
        num_sparse = sum(self.layer(index).is_sparse for index in range(self.num_layers))
        mlps = num_sparse * self._expert_parameters + (self.num_layers - num_sparse) * self._mlp_parameters
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * self._attention_parameters + mlps + embeddings + self.hidden_size

    @property
    def _attention_parameters(self) -> int:
        qkv = self.query_size + 2 * self.kv_size
        norms = 2 * (self.has_pre_norm + self.has_post_norm) * self.hidden_size  # the MLP's too
        qk_norms = {"none": 0, "head": 2 * self.head_dim, "all": self.query_size + self.kv_size}[self.qk_norm]
        biases = qkv * self.qkv_bias + self.hidden_size * self.output_bias
        sinks = self.num_heads * self.has_sinks
        return (qkv + self.query_size) * self.hidden_size + norms + qk_norms + biases + sinks

    @property
    def _mlp_parameters(self) -> int:
        biases = (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.intermediate_size + biases

    @property
    def _expert_parameters(self) -> int:
        """Of one layer."""
        if self.experts is None:
            return 0
        width = self.experts.intermediate_size
        expert = 3 * self.hidden_size * width + (2 * width + self.hidden_size) * self.experts.has_bias
        return self.experts.num_experts * (expert + self.hidden_size + self.experts.has_bias)


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Understand a model's config.json.

    Raises:
        UnsupportedModel: the architecture, or a field that would change the output, is not computed here.
        BadCheckpoint: a field is missing, of the wrong type, or contradicts another.
    """
    family = _family(config)
    config = {**family.defaults, **config}
    _refuse_output_changing_fields(config, family)
    sizes = _sizes(config, family)
    max_position = positive_int(config, "max_position_embeddings", DEFAULT_POSITIONS)
    rope, local_rope = _ropes(config, family, max_position, sizes["head_dim"])
    return ModelConfig(
        architecture=family.architecture,
        **sizes,
        max_position=_served_positions(config, rope, max_position),
        rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        layers=parse_layers(config, family, sizes["num_layers"], rope, local_rope),
        **_biases(config, family),
        **_family_fields(family),
        experts=parse_experts(config, family),
        activation=_activation(config, family),
        **_scales(config, family),
        tie_embeddings=read_bool(config, "tie_word_embeddings"),
        packed=parse_packed(config),
        fp8=parse_fp8(config),
        dtype=_dtype(config),
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=token_ids(config, "eos_token_id"),
    )


def stated_context(config: Mapping[str, Any]) -> int:
    """Tokens of context that config.json says, or its family where it is silent; what is served may be less.

    Raises:
        UnsupportedModel, BadCheckpoint: as parse_model_config.
    """
    return positive_int({**_family(config).defaults, **config}, "max_position_embeddings", DEFAULT_POSITIONS)


def _sizes(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    hidden_size = positive_int(config, "hidden_size", at_most=MAX_WIDTH)
    num_heads = positive_int(config, "num_attention_heads", at_most=MAX_WIDTH)
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise bad_field(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}.")
    head_dim = positive_int(config, "head_dim", family.defaults.get("head_dim") or hidden_size // num_heads)
    if head_dim % 2:
        raise bad_field(f"head_dim={head_dim} is odd: RoPE turns pairs.")
    if num_heads * head_dim > MAX_WIDTH:
        raise bad_field(f"num_attention_heads={num_heads} of head_dim={head_dim} are more than any model has.")
    return {
        "vocab_size": positive_int(config, "vocab_size", at_most=MAX_WIDTH),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(config, "intermediate_size", at_most=MAX_WIDTH),
        "num_layers": positive_int(config, "num_hidden_layers", at_most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _biases(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    has_attention_bias = family.has_attention_bias and read_bool(config, "attention_bias")
    return {
        "qkv_bias": family.has_qkv_bias or has_attention_bias,
        "output_bias": has_attention_bias,
        "mlp_bias": family.has_mlp_bias and read_bool(config, "mlp_bias"),
    }


def _family_fields(family: Family) -> dict[str, Any]:
    """What all of a family's models have in common."""
    return {
        "qk_norm": family.qk_norm,
        "has_pre_norm": family.has_pre_norm,
        "has_post_norm": family.has_post_norm,
        "has_norm_offset": family.has_norm_offset,
        "has_sinks": family.has_sinks,
        "has_fused_weights": family.is_fused,
    }


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type")]
    if not isinstance(names, list):
        raise bad_field(f"architectures={names!r} is not a list.")
    for family in FAMILIES:
        if names[0] in (family.architecture, family.model_type):
            if config.get("model_type") not in (family.model_type, None):  # by which transformers computes
                raise bad_field(f"model_type={config['model_type']!r} contradicts architectures={names!r}.")
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(f"Architecture {names[0]!r} is not supported.", f"use a model of one of: {supported}.")


def _refuse_output_changing_fields(config: Mapping[str, Any], family: Family) -> None:
    neutral = dict(_NEUTRAL)
    if family.has_attention_bias:
        del neutral["attention_bias"]
    if family.has_mlp_bias:
        del neutral["mlp_bias"]
    if family.has_partial_rotary:
        del neutral["partial_rotary_factor"]
    if family.windows == "none":
        neutral["use_sliding_window"] = (False, None)
    if family.model_type == "gemma3_text":
        neutral["attn_logit_softcapping"] = (None,)  # transformers reads it and does not apply it
    if family.model_type == "gpt_oss":
        neutral |= {"swiglu_alpha": (1.702, None), "swiglu_limit": (7, 7.0, None)}
    for name, values in neutral.items():
        if config.get(name) not in values:
            raise unsupported_field(name, config[name], values)
    if not is_mxfp4(config, family):
        refuse_other_methods(config)


def _activation(config: Mapping[str, Any], family: Family) -> str:
    if family.activation is not None:
        return family.activation
    name = config.get(family.activation_field) or family.defaults.get(family.activation_field, "silu")
    if name not in ACTIVATIONS:
        raise unsupported_field(family.activation_field, name, ACTIVATIONS)
    return str(name)


def _scales(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What Granite and Gemma multiply and cap; other families have none of these fields."""
    if family.model_type == "granite":
        return {
            "attention_scale": positive_float(config, "attention_multiplier"),
            "embedding_scale": positive_float(config, "embedding_multiplier", 1.0),
            "residual_scale": positive_float(config, "residual_multiplier", 1.0),
            "logits_scale": 1 / positive_float(config, "logits_scaling", 1.0),
        }
    if family.model_type in ("gemma2", "gemma3_text"):
        return {
            "attention_scale": positive_float(config, "query_pre_attn_scalar") ** -0.5,
            "attention_cap": _optional_float(config, "attn_logit_softcapping"),
            "logits_cap": _optional_float(config, "final_logit_softcapping"),
            "embedding_scale": positive_int(config, "hidden_size") ** 0.5,
        }
    return {}


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the two spellings the older goes first, as in transformers."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise bad_field(f"the rope configuration is not an object: {given!r}.")
    return given


def _ropes(
    config: Mapping[str, Any], family: Family, max_position: int, head_dim: int
) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without a window, and with one; nested by layer type where transformers 5 writes it so."""
    given = _rope_fields(config)
    is_nested = any(isinstance(value, Mapping) for value in given.values())
    if is_nested and not family.has_local_rope:
        raise unsupported_field("rope_parameters", sorted(given), ("one configuration for all layers",))
    beside = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}

    def parse(part: Mapping[str, Any]) -> RopeConfig:
        merged = {"rope_theta": 10_000.0, **beside, **part}
        neutral = _NEUTRAL["partial_rotary_factor"]
        if not family.has_partial_rotary and merged.get("partial_rotary_factor") not in neutral:
            raise unsupported_field("partial_rotary_factor", merged["partial_rotary_factor"], (1.0,))
        return parse_rope(config, merged, max_position, head_dim, is_phi=family.model_type == "phi3")

    if not family.has_local_rope:
        return parse(given), parse(given)
    full, local = (given.get(name) or {} for name in LAYER_TYPES) if is_nested else (given, {})
    return parse(full), parse({"rope_theta": config["rope_local_base_freq"], **local})


def _served_positions(config: Mapping[str, Any], rope: RopeConfig, max_position: int) -> int:
    """Yarn stretches the original context it names; of longrope the original is what can be computed exactly."""
    if rope.kind == "yarn" and "original_max_position_embeddings" in {**config, **_rope_fields(config)}:
        return max(max_position, int(min(rope.original_max_position * rope.factor, MAX_COUNT)))
    if rope.kind == "longrope":
        return min(max_position, rope.original_max_position)
    return max_position


def _optional_float(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else positive_float(config, name)


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype", config.get("torch_dtype"))  # torch_dtype: before transformers 5
    return name if isinstance(name, str) else None
