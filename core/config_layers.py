"""What a config.json says about layers: which rotate, have a window, recur or have experts, and how. Any thread."""

from collections.abc import Mapping
from typing import Any

from core.config import BLOCK_SIZE, ExpertsConfig, LayerConfig, RecurrentConfig, RopeConfig
from core.config_fields import (
    MAX_EXPERTS,
    MAX_WIDTH,
    ExpertFields,
    Family,
    bad_field,
    count,
    floats,
    positive_float,
    positive_int,
    read_bool,
    unsupported_field,
)

LAYER_TYPES = ("full_attention", "sliding_attention")
SPARSITY, NUM_SPARSE = 0.95, 10  # Gemma 3n's, of its first layers, where config.json does not say
OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # before transformers 5


def parse_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, rope: RopeConfig, local_rope: RopeConfig
) -> tuple[LayerConfig, ...]:
    """Which layers have rope, a window, experts."""
    is_rotated = _rotated_layers(config, family, num_layers)
    is_windowed = _windowed_layers(config, family, is_rotated)
    window = positive_int(config, "sliding_window") if any(is_windowed) else None
    is_recurrent = _recurrent_layers(config, family, num_layers)
    is_sparse = _sparse_layers(config, family, num_layers)
    chunk = _chunk(config) if family.has_chunks else None
    of_layers = _layer_differences(config, family, is_windowed) if family.has_layer_inputs else [{}] * num_layers
    layers = []
    for index in range(num_layers):
        recurrent, windowed = is_recurrent[index], is_windowed[index]
        attends, has_mlp = family.has_parallel_mixers or not recurrent, True
        if family.is_of_blocks:
            attends = config["layer_types"][index] == "full_attention"
            has_mlp = not attends and not recurrent
        own_rope: RopeConfig | None = local_rope if windowed else rope
        own_chunk = chunk
        if not attends or not is_rotated[index]:
            own_rope, own_chunk = _unturned(config) if family.has_chunks else None, None
        own_window = window if windowed else None
        mixer = recurrent, attends, has_mlp, own_chunk
        layers.append(LayerConfig(own_rope, own_window, is_sparse[index], *mixer, **of_layers[index]))
    return () if set(layers) == {LayerConfig(rope)} else tuple(layers)


def _chunk(config: Mapping[str, Any]) -> int | None:
    """Llama 4's layers with RoPE."""
    chunk = count(config, "attention_chunk_size")
    if chunk % BLOCK_SIZE:
        raise unsupported_field("attention_chunk_size", chunk, (f"a multiple of {BLOCK_SIZE}",))
    return chunk or None


def _layer_differences(config: Mapping[str, Any], family: Family, is_windowed: list[bool]) -> list[dict[str, Any]]:
    """Gemma 3n and 4: sizes of heads and MLPs, and whose keys and values a layer attends over."""
    num_layers = len(is_windowed)
    first_shared = num_layers - count(config, "num_kv_shared_layers")
    widths = layer_widths(config, num_layers)
    sparsity = _sparsity(config, num_layers) if family.has_streams else [0.0] * num_layers
    found: list[dict[str, Any]] = [{"sparsity": one} for one in sparsity]
    for index, own in enumerate(found):
        if index >= first_shared:
            sources = [one for one in range(first_shared) if is_windowed[one] == is_windowed[index]]
            if not sources:
                raise bad_field(f"num_kv_shared_layers={num_layers - first_shared} leaves layer {index} no keys.")
            own["source"] = sources[-1]
            if config.get("use_double_wide_mlp"):
                widths[index] *= 2
        elif config.get("attention_k_eq_v") and not is_windowed[index]:
            own["has_values"] = False
        if widths[index] != widths[0]:
            own["intermediate_size"] = widths[index]
        own |= _head_sizes(config, index, is_windowed[index]) if "global_head_dim" in family.defaults else {}
    return found


def _head_sizes(config: Mapping[str, Any], index: int, is_windowed: bool) -> dict[str, int]:
    """Gemma 4's layers without a window; transformers 5 writes per_layer_config."""
    named, given = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}, config.get("per_layer_config")
    own: Any = {"head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    if given is not None:
        own = given.get(str(index), {}) if isinstance(given, Mapping) else given
    if not isinstance(own, Mapping) or not own.keys() <= named.keys():
        raise unsupported_field("per_layer_config", given, tuple(named))
    if given is None and is_windowed:
        return {}
    sizes = {named[name]: positive_int(own, name, at_most=MAX_WIDTH) for name in own}
    heads, head_dim = positive_int(config, "num_attention_heads"), sizes.get("head_dim", 2)
    if heads % sizes.get("num_kv_heads", 1) or head_dim % 2 or heads * head_dim > MAX_WIDTH:
        raise bad_field(f"heads of {own!r} in layer {index} are odd, or not a divisor of num_attention_heads={heads}.")
    return {
        name: size
        for name, size in sizes.items()
        if size != config.get({"num_kv_heads": "num_key_value_heads"}.get(name, name))
    }


def layer_widths(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Of MLPs: intermediate_size is of all layers, or of each (Gemma 3n)."""
    given = config.get("intermediate_size")
    listed = given if isinstance(given, list) else [given] * num_layers
    if len(listed) != num_layers:
        raise bad_field(f"intermediate_size has {len(listed)} numbers for {num_layers} layers.")
    return [positive_int({"intermediate_size": one}, "intermediate_size", at_most=MAX_WIDTH) for one in listed]


def _sparsity(config: Mapping[str, Any], num_layers: int) -> list[float]:
    listed = config.get("activation_sparsity_pattern")
    if listed is None:
        return [SPARSITY if num_layers > NUM_SPARSE and index < NUM_SPARSE else 0.0 for index in range(num_layers)]
    is_list = isinstance(listed, list) and len(listed) == num_layers
    if not is_list or any(not isinstance(one, int | float) or not 0 <= one < 1 for one in listed):
        raise bad_field(f"activation_sparsity_pattern={listed!r} is not a list of {num_layers} parts of 1.")
    return [float(one) for one in listed]


def _unturned(config: Mapping[str, Any]) -> RopeConfig | None:
    """Llama 4's layers without RoPE: their queries grow with the position."""
    if not config.get("attn_temperature_tuning"):
        return None
    growth, scale = positive_float(config, "attn_scale"), positive_int(config, "floor_scale")
    return RopeConfig(1.0, "none", original_max_position=scale, query_growth=growth, query_offset=1)


def _recurrent_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """By layer_types, or else full_attn_idxs (LFM2, Bamba) or full_attention_interval (Qwen)."""
    if not family.recurrence or family.has_parallel_mixers:
        return [family.has_parallel_mixers] * num_layers
    own = "linear_attention" if family.recurrence == "mamba" else family.recurrence
    kinds, listed = (own, "full_attention"), config.get("layer_types")
    attending = config.get("full_attn_idxs")
    if isinstance(listed, list):
        listed = [OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    elif isinstance(attending, list):
        listed = [kinds[index in attending] for index in range(num_layers)]
    elif "full_attention_interval" in family.defaults:
        interval = positive_int(config, "full_attention_interval")
        listed = [kinds[(index + 1) % interval == 0] for index in range(num_layers)]
    allowed = (*kinds, "mlp", "moe") if family.is_of_blocks else kinds
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in allowed for kind in listed):
        raise unsupported_field("layer_types", listed, allowed)
    if "full_attention" not in listed:
        raise unsupported_field("layer_types", listed, ("some full_attention",))
    return [kind == own for kind in listed]


def _rotated_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """SmolLM3, Llama 4: no_rope_layers has a 1 for layers that do have rope. Granite 4: all or none."""
    if family.rotates == "if asked":
        kind = config.get("position_embedding_type")
        if kind not in ("rope", "nope", None):
            raise unsupported_field("position_embedding_type", kind, ("rope", "nope"))
        return [kind == "rope"] * num_layers
    if family.windows != "unrotated" and family.rotates != "listed":
        return [family.rotates == "all"] * num_layers
    listed = config.get("no_rope_layers")
    if listed is None or (listed == [] and family.rotates == "listed"):
        interval = positive_int(config, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(item not in (0, 1) for item in listed):
        raise bad_field(f"no_rope_layers={listed!r} is not a list of {num_layers} zeros and ones.")
    return [bool(item) for item in listed[:num_layers]]


def _windowed_layers(config: Mapping[str, Any], family: Family, is_rotated: list[bool]) -> list[bool]:
    """By layer_types, or else by the family; where the family leaves no choice, both must agree."""
    num_layers = len(is_rotated)
    by_family = _windowed_by_family(config, family, is_rotated)
    listed = config.get("layer_types")
    if family.has_chunks:
        kinds = ["chunked_attention" if rotated else "full_attention" for rotated in is_rotated]
        if listed not in (None, kinds):
            raise unsupported_field("layer_types", listed, (kinds,))
        return by_family
    if listed is None or family.recurrence:
        return by_family
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in LAYER_TYPES for kind in listed):
        raise unsupported_field("layer_types", listed, LAYER_TYPES)
    is_windowed = [kind == "sliding_attention" for kind in listed]
    has_choice = family.windows in ("late", "unrotated") and config.get("use_sliding_window")
    if is_windowed != by_family and not has_choice and family.windows != "pattern":
        raise unsupported_field("layer_types", listed, ([LAYER_TYPES[windowed] for windowed in by_family],))
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
    """See ExpertFields.dense."""
    fields = expert_fields(config, family)
    if fields is None or fields.dense == "none":
        return [fields is not None] * num_layers
    if fields.dense == "blocks":
        return [kind == "moe" for kind in config["layer_types"]]
    if fields.dense == "interleaved":
        step, sparse = positive_int(config, "interleave_moe_layer_step"), config.get("moe_layers")
        sparse = range(step - 1, num_layers, step) if sparse is None else sparse
        if not isinstance(sparse, list | range):
            raise bad_field(f"moe_layers={sparse!r} is not a list of layers.")
        return [index in sparse for index in range(num_layers)]
    if fields.dense == "first":
        listed = config.get("mlp_layer_types")
        if isinstance(listed, list) and len(listed) == num_layers and set(listed) <= {"dense", "sparse"}:
            return [kind == "sparse" for kind in listed]
        if listed is not None:
            raise unsupported_field("mlp_layer_types", listed, (["dense"], ["sparse"]))
        first = count(config, "first_k_dense_replace")
        return [index >= first for index in range(num_layers)]
    if fields.dense == "ernie":
        first, end = count(config, "moe_layer_start_index"), config.get("moe_layer_end_index")
        last = num_layers - 1 if end == -1 else count(config, "moe_layer_end_index")
        step = positive_int(config, "moe_layer_interval")
        return [first <= index <= last and (index + 1) % step == 0 for index in range(num_layers)]
    dense, step = config.get("mlp_only_layers") or [], positive_int(config, "decoder_sparse_step")
    if not isinstance(dense, list):
        raise bad_field(f"mlp_only_layers={dense!r} is not a list of layers.")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def expert_fields(config: Mapping[str, Any], family: Family) -> ExpertFields | None:
    """None: the model has no experts."""
    fields = family.experts
    if fields is None or (fields.is_optional and config.get(fields.count[0]) == 0):
        return None
    return None if fields.switch and not read_bool(config, fields.switch) else fields


def parse_experts(config: Mapping[str, Any], family: Family) -> ExpertsConfig | None:
    fields = expert_fields(config, family)
    if fields is None or (fields.dense == "blocks" and "moe" not in config["layer_types"]):
        return None
    field = next((name for name in fields.count if config.get(name) is not None), fields.count[-1])
    num_experts = positive_int(config, field, at_most=MAX_EXPERTS)
    num_active = positive_int(config, fields.active)
    if num_active > num_experts:
        raise bad_field(f"{fields.active}={num_active} is more than {field}={num_experts}.")
    width = positive_int(config, fields.width, at_most=MAX_WIDTH)
    shared_size = 0
    if fields.shared_width:
        shared_size = positive_int(config, fields.shared_width, at_most=MAX_WIDTH)
    elif fields.shared_count:
        shared_size = width * count(config, fields.shared_count)
    experts = ExpertsConfig(
        num_experts,
        num_active,
        width,
        layout=family.model_type,
        is_normalized=not fields.normalized or read_bool(config, fields.normalized),
        has_bias=family.model_type == "gpt_oss",
        is_mxfp4=is_mxfp4(config, family),
        scoring=fields.scoring,
        has_choice_bias=fields.has_choice_bias,
        is_router_float=fields.is_router_float,
        scale=positive_float(config, fields.scale, 1.0) if fields.scale else 1.0,
        shared_size=shared_size,
        has_shared_gate=fields.has_shared_gate,
        has_gate=family.has_gate,
        scales_inputs=fields.scales_inputs,
        are_beside=fields.are_beside,
        **(_groups(config, num_experts, num_active) if fields.has_groups else {}),
    )
    widths = (positive_int(config, "hidden_size"), experts.intermediate_size)
    if experts.is_mxfp4 and any(width % 32 for width in widths):
        raise bad_field(f"mxfp4 blocks of 32 do not divide hidden_size and intermediate_size={widths}.")
    return experts


def _groups(config: Mapping[str, Any], num_experts: int, num_active: int) -> dict[str, int]:
    if config.get("topk_method") == "greedy":
        return {}
    num_groups = positive_int(config, "n_group", 1)
    num_active_groups = positive_int(config, "topk_group", 1)
    if num_experts % num_groups or not num_active <= num_active_groups * (num_experts // num_groups) <= num_experts:
        raise bad_field(
            f"n_group={num_groups} and topk_group={num_active_groups} do not divide {num_experts} experts, or leave "
            f"fewer than {num_active} to choose from."
        )
    if num_groups > 1 and num_experts // num_groups < 2:
        raise bad_field(f"n_group={num_groups} leaves one expert in a group.")
    return {"num_groups": num_groups, "num_active_groups": num_active_groups}


def is_mxfp4(config: Mapping[str, Any], family: Family) -> bool:
    """Of gpt-oss's experts only."""
    given = config.get("quantization_config")
    return family.model_type == "gpt_oss" and isinstance(given, Mapping) and given.get("quant_method") == "mxfp4"


def parse_recurrence(config: Mapping[str, Any], family: Family, has_bias: bool) -> RecurrentConfig:
    if family.recurrence == "conv":
        width = positive_int(config, "hidden_size", at_most=MAX_WIDTH)
        taps = _taps(config, "conv_L_cache")
        return RecurrentConfig("conv", taps, width, has_bias=has_bias, has_convolution_bias=has_bias)
    if family.recurrence == "mamba":
        return _state_space(config, family)
    heads, key_heads, key_dim, value_dim = (
        positive_int(config, f"linear_{name}", at_most=MAX_WIDTH)
        for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
    )
    channels = 2 * key_heads * key_dim + heads * value_dim
    if heads % key_heads or channels > MAX_WIDTH:
        raise bad_field(
            f"linear_num_value_heads={heads} is not a multiple of linear_num_key_heads={key_heads}, or more than any "
            "model has."
        )
    return RecurrentConfig(
        "linear_attention",
        _taps(config, "linear_conv_kernel_dim"),
        channels,
        heads,
        key_heads,
        key_dim,
        value_dim,
        is_grouped=family.model_type == "qwen3_next",
        is_tiled=read_bool(config, "linear_value_heads_tiled"),
        eps=positive_float(config, "rms_norm_eps", 1e-6),
    )


def _state_space(config: Mapping[str, Any], family: Family) -> RecurrentConfig:
    heads, groups, key_dim = (
        positive_int(config, f"mamba_{name}", at_most=MAX_WIDTH) for name in ("n_heads", "n_groups", "d_state")
    )
    width = config.get("mamba_d_ssm")
    if width is None and "mamba_expand" in family.defaults:
        width = positive_int(config, "mamba_expand") * positive_int(config, "hidden_size", at_most=MAX_WIDTH)
    given = config.get("mamba_d_head")
    value_dim = width // heads if given in ("auto", None) and isinstance(width, int) else given
    value_dim = positive_int({"mamba_d_head": value_dim}, "mamba_d_head", at_most=MAX_WIDTH)
    channels = heads * value_dim + 2 * groups * key_dim
    if width not in (None, heads * value_dim) or heads % groups or channels > MAX_WIDTH:
        raise bad_field(
            f"mamba_n_heads={heads} of mamba_d_head={value_dim} are not the width {width!r}, not a multiple of "
            f"mamba_n_groups={groups}, or more than any model has."
        )
    return RecurrentConfig(
        "mamba",
        _taps(config, "mamba_d_conv"),
        channels,
        heads,
        groups,
        key_dim,
        value_dim,
        has_bias=read_bool(config, "mamba_proj_bias"),
        has_convolution_bias=read_bool(config, "mamba_conv_bias", True),
        has_norm=read_bool(config, "mamba_rms_norm", True),
        is_normed_first=read_bool(config, "mamba_norm_before_gate"),
        eps=positive_float(config, "rms_norm_eps", 1e-6),
        input_factors=_input_factors(config) if family.has_factors else (),
    )


def _input_factors(config: Mapping[str, Any]) -> tuple[float, ...]:
    of_all = positive_float(config, "ssm_in_multiplier", 1.0)
    factors = tuple(of_all * factor for factor in floats(config, "ssm_multipliers", 5))
    return () if set(factors) == {1.0} else factors


def _taps(config: Mapping[str, Any], name: str) -> int:
    taps = positive_int(config, name, at_most=BLOCK_SIZE)
    if taps < 2:
        raise bad_field(f"{name}={taps}: a convolution sees 2 tokens at least.")
    return taps
