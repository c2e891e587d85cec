"""What the engine is asked to be, and what a model is: frozen, validated once, at start.

A model's config.json is understood completely or refused: a field that would change the output and is not computed
here is an error that names it. Families are data (FAMILIES); transformers 5 writes `rope_parameters`, earlier ones
`rope_theta` and `rope_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import BadCheckpoint, UnsupportedModel

BLOCK_SIZE = 16  # tokens per KV block


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
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Args:
        kind: "default", "linear" (positions divided by factor) or "llama3" (low frequencies divided by factor).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class Family:
    """What the architectures differ in."""

    architecture: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_max_position: int = 2048
    default_theta: float = 10_000.0


FAMILIES = (
    Family("LlamaForCausalLM", "llama"),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, default_max_position=32_768),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, default_head_dim=128, default_max_position=32_768),
)
ROPE_KINDS = ("default", "linear", "llama3")

# Fields that change the output, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm before, grouped-query attention with RoPE, SwiGLU.

    Args:
        max_position: tokens of context the model was made for.
        dtype: of the checkpoint, e.g. "bfloat16"; None when config.json does not say.
        eos_token_ids: from config.json (generation_config.json may name more).
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
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

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
        qkv = self.query_size + 2 * self.kv_size
        attention = (qkv + self.query_size) * self.hidden_size + qkv * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Understand a model's config.json.

    Raises:
        UnsupportedModel: the architecture, or a field that would change the output, is not computed here.
        BadCheckpoint: a field is missing, of the wrong type, or contradicts another.
    """
    family = _family(config)
    _refuse_output_changing_fields(config)
    hidden_size = _positive_int(config, "hidden_size")
    num_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise _bad(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}.")
    head_dim = _positive_int(config, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise _bad(f"head_dim={head_dim} is odd: RoPE turns pairs.")
    max_position = _positive_int(config, "max_position_embeddings", family.default_max_position)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=_positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=_positive_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, family, max_position),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=_bool(config, "tie_word_embeddings", False),
        dtype=_dtype(config),
        bos_token_id=_first(_ids(config, "bos_token_id")),
        eos_token_ids=_ids(config, "eos_token_id"),
    )


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type")]
    if not isinstance(names, list):
        raise _bad(f"architectures={names!r} is not a list.")
    for family in FAMILIES:
        if names[0] in (family.architecture, family.model_type):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(f"Architecture {names[0]!r} is not supported.", f"use a model of one of: {supported}.")


def _refuse_output_changing_fields(config: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise _unsupported(name, config[name], neutral)
    layer_types = config.get("layer_types") or ()
    if any(kind != "full_attention" for kind in layer_types):
        raise _unsupported("layer_types", sorted(set(layer_types)), ("full_attention",))
    # Qwen2 before layer_types: layers from max_window_layers on slide. Llama and Qwen ignore sliding_window otherwise.
    if config.get("use_sliding_window") and not layer_types:
        raise _unsupported("use_sliding_window", True, (False,))


def _rope(config: Mapping[str, Any], family: Family, max_position: int) -> RopeConfig:
    """Source: transformers, modeling_rope_utils.py; both spellings of its configuration."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise _bad(f"the rope configuration is not an object: {given!r}.")
    merged = {"rope_theta": config.get("rope_theta", family.default_theta), **given}
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise _unsupported("rope_type", kind, ROPE_KINDS)
    if merged.get("partial_rotary_factor") not in _NEUTRAL["partial_rotary_factor"]:
        raise _unsupported("partial_rotary_factor", merged["partial_rotary_factor"], (1.0,))
    theta = _positive_float(merged, "rope_theta")
    if kind == "default":
        return RopeConfig(theta)
    factor = _positive_float(merged, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = _positive_float(merged, "low_freq_factor"), _positive_float(merged, "high_freq_factor")
    if not low < high:
        raise _bad(f"rope: low_freq_factor={low} is not below high_freq_factor={high}.")
    original = _positive_int(merged, "original_max_position_embeddings", max_position)
    return RopeConfig(theta, kind, factor, low, high, original)


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype", config.get("torch_dtype"))  # torch_dtype: before transformers 5
    return name if isinstance(name, str) else None


def _ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in listed):
        raise _bad(f"{name}={value!r} is not a token id, or a list of them.")
    return tuple(listed)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _bool(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise _bad(f"{name}={value!r} is not true or false.")
    return value


def _positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _bad(f"{name}={value!r} is not a positive integer.")
    return value


def _positive_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise _bad(f"{name}={value!r} is not a positive number.")
    return float(value)


def _unsupported(name: str, value: object, supported: tuple[Any, ...]) -> UnsupportedModel:
    choices = ", ".join(repr(choice) for choice in supported if choice is not None) or "leaving it out"
    return UnsupportedModel(
        f"config.json: {name}={value!r} is not supported.", f"use a model with {name} as: {choices}."
    )


def _bad(what: str) -> BadCheckpoint:
    return BadCheckpoint(f"config.json: {what}", "download the model's directory again, or correct the file.")
