"""How a family's config.json is read: what may vary, and typed reads of fields, with errors that name them.

Any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import BadCheckpoint, UnsupportedModel

CONFIG_PREFIX = "config.json: "  # of messages about its fields
BAD_FIELD_FIX = "download the model's directory again, or correct the file."
# Limits of counts. With the last two, whatever is built before the weights are looked at (tensors without memory, lists
# of layers) stays small, in any product of fields.
MAX_COUNT = 2**31 - 1
MAX_WIDTH = 2**24
MAX_LAYERS = MAX_EXPERTS = 1024


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
        has_value_norm: a head's value is normed, without weights.
        has_layer_scale: what a layer leaves is multiplied by a number of its own.
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
    has_value_norm: bool = False
    has_layer_scale: bool = False
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
        scales_inputs, are_beside: see core.config.ExpertsConfig.
        switch: a field that must be true for the model to have experts; "": none.
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
    are_beside: bool = False
    switch: str = ""


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
        has_chunks: layers with RoPE see the tokens of their attention_chunk_size alone.
        has_layer_inputs: of hidden_size_per_layer_input; and the last num_kv_shared_layers have no keys and values.
        has_streams: altup_num_inputs of them.
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
    has_layer_inputs: bool = False
    has_streams: bool = False


def read_bool(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise bad_field(f"{name}={value!r} is not true or false.")
    return value


def positive_int(config: Mapping[str, Any], name: str, default: int | None = None, at_most: int = MAX_COUNT) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise bad_field(f"{name}={value!r} is not a positive integer.")
    if value > at_most:
        raise bad_field(f"{name}={value} is too large: no known model has more than {at_most}.")
    return value


def count(config: Mapping[str, Any], name: str) -> int:
    """0 where the field is not set."""
    return positive_int(config, name) if config.get(name) else 0


def positive_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise bad_field(f"{name}={value!r} is not a positive number.")
    return float(value)


def optional_float(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else positive_float(config, name)


def floats(config: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    """Ones, where the field is not set."""
    listed = config.get(name)
    listed = [1.0] * length if listed is None else listed
    if not isinstance(listed, list | tuple) or len(listed) != length:
        raise bad_field(f"{name}={listed!r} is not a list of {length} numbers.")
    return tuple(positive_float({name: one}, name) for one in listed)


def token_ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One id, a list of them, or none."""
    value = config.get(name)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in listed):
        raise bad_field(f"{name}={value!r} is not a token id, or a list of them.")
    return tuple(listed)


def refuse_others(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], name: str) -> None:
    """
    Args:
        name: of the given object, for the error.

    Raises:
        UnsupportedModel: a field has a value that is not among its neutral ones.
    """
    for one, values in neutral.items():
        if given.get(one) not in values:
            raise unsupported_field(f"{name}.{one}", given.get(one), values)


def unsupported_field(name: str, value: object, supported: tuple[Any, ...]) -> UnsupportedModel:
    choices = ", ".join(repr(choice) for choice in supported if choice is not None) or "leaving it out"
    return UnsupportedModel(
        f"{CONFIG_PREFIX}{name}={value!r} is not supported.", f"use a model with {name} as: {choices}."
    )


def bad_field(what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{CONFIG_PREFIX}{what}", BAD_FIELD_FIX)
