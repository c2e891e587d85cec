"""config.json's quantization_config of GPTQ and AWQ checkpoints: understood completely, or refused by name.

Any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config_fields import bad_field, positive_int, read_bool, read_quantization, unsupported_field
from core.errors import UnsupportedModel
from core.fp8_config import METHODS as FP8_METHODS
from core.fp8_config import parse_fp8

# Fields that change what the tensors mean, and the values under which they do not.
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "gptq": {
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None),  # newer GPTQModel's word for it, beside the other
        "is_marlin_format": (False, None),
        "use_marlin_format": (False, None),
        "pack_dtype": ("int32", None),
        "dynamic": ({}, None),  # modules with settings of their own
    },
    "awq": {
        "zero_point": (True, None),
        "modules_to_fuse": ({}, [], None),
        **dict.fromkeys(("version", "checkpoint_format", "format"), ("gemm", "GEMM", None)),
    },
}
METHODS = tuple(_NEUTRAL)


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """How a checkpoint's matrices are packed: weight = (value - zero) * scale, all in integers of so many bits.

    Args:
        method: "gptq" or "awq".
        group_size: inputs that share scale and zero; None: all of a row.
        has_order: each input names its group (desc_act), and neighbours may be of different ones.
        zero_offset: what is added to stored zeros.
    """

    method: str
    bits: int
    group_size: int | None
    has_order: bool
    zero_offset: int

    @property
    def is_kept(self) -> bool:
        """Whether the integers are served as they are, as int4; otherwise they become floats while they load."""
        has_groups = not self.has_order and (self.group_size is None or self.group_size % 32 == 0)
        return self.bits == 4 and has_groups


def parse_packed(config: Mapping[str, Any]) -> PackedConfig | None:
    """None: the checkpoint is not of these methods.

    Raises:
        UnsupportedModel, BadCheckpoint: it is, but in a variant that is not read, or that no one can read.
    """
    given = read_quantization(config, _NEUTRAL)
    if given is None:
        return None
    if given["quant_method"] == "awq":
        return _parse_awq(given)
    bits = positive_int(given, "bits")
    if bits not in (4, 8):
        raise unsupported_field("quantization_config.bits", bits, (4, 8))
    # Of the first format stored zeros are one less: source: AutoGPTQ, QuantLinear.pack.
    zero_offset = 0 if _gptq_format(given) == "gptq_v2" else 1
    return PackedConfig("gptq", bits, _group_size(given, "group_size"), read_bool(given, "desc_act"), zero_offset)


def _gptq_format(given: Mapping[str, Any]) -> str:
    named = {str(given[name]) for name in ("checkpoint_format", "format") if given.get(name) is not None}
    if len(named) > 1:
        raise bad_field(f"quantization_config: checkpoint_format and format are {' and '.join(sorted(named))}.")
    return next(iter(named), "gptq")


def refuse_other_methods(config: Mapping[str, Any]) -> None:
    """
    Raises:
        UnsupportedModel: the checkpoint is quantised by a method that is not read.
    """
    given = config.get("quantization_config")
    if given is not None and parse_packed(config) is None and parse_fp8(config) is None:
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method={method!r} is not supported.",
            f"use a model quantised by {' or '.join((*METHODS, *FP8_METHODS))}, or the plain model with --quantize.",
        )


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
        raise bad_field(f"quantization_config.{name}={size} is not a group.")
    return size
