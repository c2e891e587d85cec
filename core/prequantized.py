"""Parses config.json's quantization_config: prequantized checkpoints are understood completely or refused. Any thread.

GPTQ, AWQ and compressed-tensors' pack-quantized pack integers; the others store 8-bit floats (e4m3). Only weights are
read so: scales of activations, keys and values are ignored, and those stay in the serving format. The tensor files show
which matrices are quantised, so lists of modules that are not are ignored too.

Sources: AutoGPTQ and AutoAWQ; transformers, FineGrainedFP8Config; AutoFP8, its config.json; compressed-tensors,
QuantizationArgs; NVIDIA's Model Optimizer, export/convert_hf_config.py. What the 8-bit numbers are: arXiv:2209.05433.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from core.config_fields import bad_field, positive_int, read_bool, refuse_others, unsupported_field
from core.errors import UnsupportedModel

FLOATS, INTEGERS = "float-quantized", "pack-quantized"  # compressed-tensors' names
# By method: fields that change what the tensors mean, and the values under which they do not.
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "gptq": {
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None),  # newer GPTQModel's name for checkpoint_format
        "is_marlin_format": (False, None),
        "use_marlin_format": (False, None),
        "pack_dtype": ("int32", None),
    },
    "awq": {
        "zero_point": (True, None),
        "modules_to_fuse": ({}, [], None),
        **dict.fromkeys(("version", "checkpoint_format", "format"), ("gemm", "GEMM", None)),
    },
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "scale_fmt": ("float", "ue8m0", None),  # powers of two are floats, too
        "expert_dtype": ("fp8", None),
    },
    "modelopt": {"quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")},
    "compressed-tensors": {"format": (FLOATS, INTEGERS), "transform_config": ({}, None)},
}
_NEUTRAL_WEIGHTS: dict[str, dict[str, tuple[Any, ...]]] = {
    FLOATS: {
        "num_bits": (8,),
        "type": ("float",),
        "symmetric": (True, None),
        "dynamic": (False, None),
        "strategy": ("tensor", "channel", "block"),
    },
    INTEGERS: {
        "num_bits": (4, 8),
        "type": ("int",),
        "dynamic": (False, None),
        "strategy": ("channel", "group"),
        "actorder": ("static", "weight", "dynamic", "group", None),
    },
}


class PackedConfig(msgspec.Struct, frozen=True, tag=True):
    """How a checkpoint's matrices are packed: weight = (value - zero) * scale, with integers of so many bits.

    Args:
        method: "gptq", "awq" or "compressed-tensors".
        group_size: inputs that share scale and zero; None: all of a row.
        has_order: each input names its group (desc_act), and neighbours may be in different ones.
        zero_offset: to be added to stored zeros.
        has_zeros: they are stored; False: all are the middle one.
    """

    method: str
    bits: int
    group_size: int | None
    has_order: bool
    zero_offset: int
    has_zeros: bool = True

    @property
    def is_served(self) -> bool:
        """Whether the integers are served as int4 without conversion; otherwise they become floats while they load."""
        has_groups = not self.has_order and (self.group_size is None or self.group_size % 32 == 0)
        return self.bits == 4 and has_groups


class Fp8Config(msgspec.Struct, frozen=True, tag=True):
    """How a checkpoint's matrices are scaled: weight = value * scale.

    Args:
        block: (outputs, inputs) that share a scale, the last block perhaps smaller; None: a scale per output, or one
            for all.
    """

    block: tuple[int, int] | None

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None: all of a row."""
        return None if self.block is None else self.block[1]


Packing = PackedConfig | Fp8Config


def parse_packing(config: Mapping[str, Any]) -> Packing | None:
    """None: the checkpoint's matrices are floats.

    Raises:
        UnsupportedModel, BadCheckpoint: they are quantised by another method, or in an unsupported or an inconsistent
            variant.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or method not in tuple(_NEUTRAL):
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method={method!r} is not supported.",
            f"use a model quantised by {' or '.join(_NEUTRAL)}, or the plain model with --quantize.",
        )
    refuse_others(given, _NEUTRAL[method], "quantization_config")
    return _PARSERS[method](given)


def _parse_gptq(given: Mapping[str, Any]) -> PackedConfig:
    _refuse_other_settings(given)
    bits = positive_int(given, "bits")
    if bits not in (4, 8):
        raise unsupported_field("quantization_config.bits", bits, (4, 8))
    formats = {str(given[name]) for name in ("checkpoint_format", "format") if given.get(name) is not None}
    if len(formats) > 1:
        raise bad_field(f"quantization_config: checkpoint_format and format are {' and '.join(sorted(formats))}.")
    zero_offset = 0 if "gptq_v2" in formats else 1  # v1 stores zeros less one: AutoGPTQ, QuantLinear.pack
    return PackedConfig("gptq", bits, _group_size(given, "group_size"), read_bool(given, "desc_act"), zero_offset)


def _refuse_other_settings(given: Mapping[str, Any]) -> None:
    """Of GPTQModel's modules: a rule may leave some out ("-:"), or repeat the settings of all."""
    rules = given.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise bad_field(f"quantization_config.dynamic={rules!r} is not an object.")
    for rule, settings in rules.items():
        own = settings if isinstance(settings, Mapping) else {}
        if not rule.startswith("-:") and any(given.get(name) != value for name, value in own.items()):
            raise unsupported_field(f"quantization_config.dynamic[{rule!r}]", settings, ({},))


def _parse_awq(given: Mapping[str, Any]) -> PackedConfig:
    bits = positive_int(given, "bits" if "bits" in given else "w_bit")
    if bits != 4:
        raise unsupported_field("quantization_config.bits", bits, (4,))
    group_size = _group_size(given, "group_size" if "group_size" in given else "q_group_size")
    return PackedConfig("awq", bits, group_size, has_order=False, zero_offset=0)


def _group_size(given: Mapping[str, Any], name: str) -> int | None:
    if given.get(name) == -1:
        return None
    size = positive_int(given, name)
    if size < 8:
        raise bad_field(f"quantization_config.{name}={size} is too small for a group.")
    return size


def _parse_compressed(given: Mapping[str, Any]) -> Packing:
    """All groups must be stored alike, so that their lists of modules do not matter."""
    sparsity, groups = given.get("sparsity_config"), given.get("config_groups")
    if isinstance(sparsity, Mapping):
        refuse_others(sparsity, {"format": ("dense", None)}, "quantization_config.sparsity_config")
    if not isinstance(groups, Mapping) or not groups:
        raise bad_field(f"quantization_config.config_groups={groups!r} names no group.")
    found = {_parse_group(group, f"quantization_config.config_groups.{name}", given) for name, group in groups.items()}
    if len(found) > 1:
        name = "quantization_config.config_groups: weights"
        raise unsupported_field(name, sorted(map(str, found)), ("the same in all groups",))
    return found.pop()


def _parse_group(group: object, name: str, given: Mapping[str, Any]) -> Packing:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise bad_field(f"{name} does not say how weights are stored.")
    refuse_others(group, {"format": (given["format"], None)}, name)
    refuse_others(weights, _NEUTRAL_WEIGHTS[given["format"]], f"{name}.weights")
    if given["format"] == INTEGERS:
        has_order = weights.get("actorder") in ("group", "dynamic")
        group_size = _group_size(weights, "group_size") if weights["strategy"] == "group" else None
        has_zeros = not read_bool(weights, "symmetric", True)
        return PackedConfig("compressed-tensors", weights["num_bits"], group_size, has_order, 0, has_zeros)
    if weights["strategy"] != "block":
        return Fp8Config(None)
    block = _block(weights.get("block_structure"), f"{name}.weights.block_structure")
    if block is None:
        raise bad_field(f"{name}.weights.block_structure is missing.")
    return Fp8Config(block)


def _block(given: object, name: str) -> tuple[int, int] | None:
    """[outputs, inputs], or "128x128" as older compressed-tensors write it."""
    if given is None:
        return None
    sizes = given.split("x") if isinstance(given, str) else given
    if not isinstance(sizes, list) or [str(size).isdecimal() and int(size) > 0 for size in sizes] != [True, True]:
        raise bad_field(f"{name}={given!r} is not two sizes.")
    return int(sizes[0]), int(sizes[1])


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "fp8": lambda given: Fp8Config(_block(given.get("weight_block_size"), "quantization_config.weight_block_size")),
    "modelopt": lambda given: Fp8Config(None),
    "compressed-tensors": _parse_compressed,
}
