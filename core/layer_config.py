"""What the layers of one model differ in: which turn q and k, which have a window, which hold experts. Any thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config_fields import MAX_EXPERTS, MAX_WIDTH, bad_field, positive_int, read_bool, unsupported_field
from core.families import Family
from core.rope_config import RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What layers of one model differ in.

    Args:
        rope: None: q and k are not turned.
        window: a token sees so many, itself counted in; None: all before it.
        is_sparse: its MLP is the model's experts.
    """

    rope: RopeConfig | None
    window: int | None = None
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: gated MLPs of which each token goes through a few.

    Args:
        num_active: experts a token goes through, the likeliest of the router.
        intermediate_size: width of one.
        is_normalized: the shares of the active ones are made to sum to 1.
        has_bias: of router and experts.
        layout: how the checkpoint holds them: "mixtral", "qwen3_moe" or "gpt_oss".
        is_mxfp4: four-bit blocks, of which "gpt_oss" is made.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    layout: str
    is_normalized: bool = True
    has_bias: bool = False
    is_mxfp4: bool = False


def parse_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, rope: RopeConfig, local_rope: RopeConfig
) -> tuple[LayerConfig, ...]:
    """Which layers turn, and which have a window."""
    is_rotated = _rotated_layers(config, family, num_layers)
    is_windowed = _windowed_layers(config, family, is_rotated)
    window = positive_int(config, "sliding_window") if any(is_windowed) else None
    layers = []
    for rotated, windowed, is_sparse in zip(
        is_rotated, is_windowed, _sparse_layers(config, family, num_layers), strict=True
    ):
        own_rope = local_rope if windowed else rope
        layers.append(LayerConfig(own_rope if rotated else None, window if windowed else None, is_sparse))
    return () if set(layers) == {LayerConfig(rope)} else tuple(layers)


def _rotated_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """SmolLM3: no_rope_layers says 1 where a layer does turn."""
    if family.windows != "unrotated":
        return [True] * num_layers
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = positive_int(config, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(item not in (0, 1) for item in listed):
        raise bad_field(f"no_rope_layers={listed!r} is not a list of {num_layers} zeros and ones.")
    return [bool(item) for item in listed[:num_layers]]


def _windowed_layers(config: Mapping[str, Any], family: Family, is_rotated: list[bool]) -> list[bool]:
    """As layer_types says, or as the family does; where the family has no choice, both must agree."""
    num_layers = len(is_rotated)
    by_family = _windowed_by_family(config, family, is_rotated)
    listed = config.get("layer_types")
    if listed is None:
        return by_family
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in LAYER_TYPES for kind in listed):
        raise unsupported_field("layer_types", listed, LAYER_TYPES)
    is_windowed = [kind == "sliding_attention" for kind in listed]
    has_choice = family.windows == "pattern" or (
        family.windows in ("late", "unrotated") and bool(config.get("use_sliding_window"))
    )
    if is_windowed != by_family and not has_choice:
        raise unsupported_field(
            "layer_types", listed, (["sliding_attention" if w else "full_attention" for w in by_family],)
        )
    return is_windowed


def _windowed_by_family(config: Mapping[str, Any], family: Family, is_rotated: list[bool]) -> list[bool]:
    num_layers = len(is_rotated)
    if family.windows == "pattern":
        interval = positive_int(config, "sliding_window_pattern")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    has_window = config.get("sliding_window") is not None
    if family.windows in ("switched", "late", "unrotated"):
        has_window = has_window and read_bool(config, "use_sliding_window")
    if not has_window or family.windows == "none":
        return [False] * num_layers
    if family.windows == "late":
        first = config.get("max_window_layers")
        if not isinstance(first, int):
            raise bad_field(f"max_window_layers={first!r} is not a number of layers.")
        return [index >= first for index in range(num_layers)]
    if family.windows == "unrotated":
        return [not rotated for rotated in is_rotated]
    return [True] * num_layers


def _sparse_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Qwen3-MoE: every decoder_sparse_step-th layer, but those of mlp_only_layers."""
    if family.model_type != "qwen3_moe":
        return [family.expert_width is not None] * num_layers
    dense, step = config.get("mlp_only_layers") or [], positive_int(config, "decoder_sparse_step")
    if not isinstance(dense, list):
        raise bad_field(f"mlp_only_layers={dense!r} is not a list of layers.")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def parse_experts(config: Mapping[str, Any], family: Family) -> ExpertsConfig | None:
    if family.expert_width is None:
        return None
    field = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    num_experts = positive_int(config, field, at_most=MAX_EXPERTS)
    num_active = positive_int(config, "num_experts_per_tok")
    if num_active > num_experts:
        raise bad_field(f"num_experts_per_tok={num_active} is more than {field}={num_experts}.")
    experts = ExpertsConfig(
        num_experts,
        num_active,
        positive_int(config, family.expert_width, at_most=MAX_WIDTH),
        layout=family.model_type,
        is_normalized=family.model_type != "qwen3_moe" or read_bool(config, "norm_topk_prob"),
        has_bias=family.model_type == "gpt_oss",
        is_mxfp4=is_mxfp4(config, family),
    )
    widths = (positive_int(config, "hidden_size"), experts.intermediate_size)
    if experts.is_mxfp4 and any(width % 32 for width in widths):
        raise bad_field(f"mxfp4 blocks of 32 do not divide hidden_size and intermediate_size={widths}.")
    return experts


def is_mxfp4(config: Mapping[str, Any], family: Family) -> bool:
    """Of gpt-oss's experts only."""
    given = config.get("quantization_config")
    return family.model_type == "gpt_oss" and isinstance(given, Mapping) and given.get("quant_method") == "mxfp4"
